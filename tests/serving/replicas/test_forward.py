"""The server's side of replicas, with replicas that do as they are told."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from quantkit.serving.guard import TENANT
from quantkit.serving.replicas import forward
from quantkit.serving.replicas.forward import create_replicated_app
from quantkit.serving.replicas.replica import REPORT
from quantkit.serving.replicas.replica_set import ReplicaLostError
from quantkit.support.errors import QuantkitError

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
START = {"type": "http.response.start", "status": 200,
         "headers": [(b"content-type", b"text/event-stream"), (b"x-quantkit-replica", b"a")]}
END = {"type": "http.response.body", "body": b"", "more_body": False}
LOST = ReplicaLostError()


def event(text):
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


class Scripted:
    """Replicas whose answers are scripts, one a request: batches of messages, or an error to raise."""

    def __init__(self, *scripts):
        self.scripts, self.requests = list(scripts), []
        self.cancelled, self.running = 0, ["a"]

    async def answer(self, replica, request):
        self.requests.append(request)
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield [await part.wait()] if isinstance(part, asyncio.Event) else part
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    def close(self):
        """Nothing runs."""


def ask(replicas, path=CHAT, *, method="POST", key=None, keys=(), drained=False, errors=None, ignored=None,
        **options):
    async def run():
        app = create_replicated_app(replicas, keys=keys if key is None else (key,),
                                    on_ignored=None if ignored is None else ignored.append,
                                    on_error=None if errors is None else errors.append)
        if drained:
            assert await app.drain(1)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


BODY = {"json": {"model": "m", "messages": [{"role": "user", "content": "Hello " * 50}]}}


def test_an_answer_comes_as_the_replica_gave_it():
    replicas = Scripted([[START, event("data: 1\n\n")], [event("data: 2\n\n"), END]])
    answer = ask(replicas, **BODY)
    assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: 2\n\n")
    assert answer.headers["x-quantkit-replica"] == "a" and answer.headers["cache-control"] == "no-store"
    (request,) = replicas.requests
    assert json.loads(request.body) == BODY["json"] and request.scope["path"] == CHAT
    assert not replicas.cancelled
    assert "app" not in request.scope and "extensions" not in request.scope


@pytest.mark.parametrize(("path", "preamble"), [
    (CHAT, []), (MESSAGES, ["event: message_start\ndata: {}\n\n"]),
    (RESPONSES, ["event: response.created\ndata: {}\n\n", "event: response.in_progress\ndata: {}\n\n"])])
def test_before_a_token_another_replica_answers_and_nobody_notices(path, preamble):
    first = [[START, *map(event, preamble)], LOST] if preamble else [[START], LOST]
    good = [[START, *(event(text.replace("{}", '{"second": 1}')) for text in preamble)],
            [event("event: text\ndata: good\n\n"), END]]
    answer = ask(Scripted(first, good), path, **BODY)
    assert answer.status_code == 200
    assert answer.text == "".join(text.replace("{}", '{"second": 1}') for text in preamble) + \
        "event: text\ndata: good\n\n"


@pytest.mark.parametrize(("path", "preamble", "alive"), [
    (CHAT, "", ": keep-alive\n\n"),
    (MESSAGES, "event: message_start\ndata: {}\n\n", "event: ping\ndata: {}\n\n"),
    (RESPONSES, "event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n",
     "event: response.in_progress\ndata: {}\n\n")])
def test_a_keep_alive_comes_at_once_and_after_it_no_other_replica_answers(path, preamble, alive):
    start = [event(f"{text}\n\n") for text in preamble.split("\n\n") if text]
    replicas = Scripted([[START, *start], [event(alive)], LOST], [[START, END]])
    answer = ask(replicas, path, **BODY)
    assert answer.text.startswith(preamble + alive) and "has ended" in answer.text
    assert len(replicas.requests) == 1


@pytest.mark.parametrize(("path", "last"), [
    (CHAT, 'data: {"error":{"message":"the replica that was answering has ended; send the request again",'
           '"type":"server_error","param":null,"code":"replica_lost"}}\n\ndata: [DONE]\n\n'),
    (MESSAGES, 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error",'
               '"message":"the replica that was answering has ended; send the request again"}}\n\n'),
    (RESPONSES, 'event: error\ndata: {"type":"error","sequence_number":2,"code":"replica_lost","message":'
                '"the replica that was answering has ended; send the request again","param":null}\n\n'),
])
def test_after_a_token_the_stream_ends_with_the_api_s_error(path, last):
    replicas = Scripted([[START, event("data: one\n\n")], [event("data: two\n\n")], LOST])
    answer = ask(replicas, path, **BODY)
    assert answer.status_code == 200 and answer.text == "data: one\n\ndata: two\n\n" + last
    assert len(replicas.requests) == 1


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "server_error"), (MESSAGES, "overloaded_error")])
def test_a_request_ends_no_more_than_two_replicas(path, kind):
    replicas = Scripted([LOST], [[START], LOST], [[START, END]])
    answer = ask(replicas, path, **BODY)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["type"] == kind and "has ended" in answer.json()["error"]["message"]
    assert len(replicas.requests) == 2


async def visit(replicas, leaves, **options):
    """The messages that a client gets which leaves as soon as ``leaves`` holds of the last one."""
    bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]
    sent = []
    left = asyncio.Event()

    async def receive():
        if bodies:
            return bodies.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if leaves(message):
            left.set()

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
    app = create_replicated_app(replicas, **options)
    async with asyncio.timeout(60):
        await app(scope, receive, send)
    assert app.guard.active == 0 and len(replicas.requests) == 1
    return sent


def test_a_client_that_leaves_cancels_the_request():
    async def run():
        replicas = Scripted([[START, event("data: 1\n\n")], asyncio.Event()])
        assert len(await visit(replicas, lambda message: "body" in message)) == 2
        return replicas

    assert asyncio.run(run()).cancelled == 1


@pytest.mark.parametrize("rest", [[], [[{"type": REPORT, "errors": [QuantkitError("it failed")]}]], [LOST]])
def test_a_complete_answer_is_neither_cancelled_nor_called_lost(rest):
    """A client that has all of its answer leaves before the replica's generator has ended."""
    replicas, errors = Scripted([[START, event("data: 1\n\n"), END], *rest]), []
    sent = asyncio.run(visit(replicas, lambda message: message.get("more_body") is False,
                             on_error=errors.append))
    assert replicas.cancelled == 0
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b""]
    assert [error.what for error in errors] == ["it failed"] * (bool(rest) and rest != [LOST])


def test_what_replicas_ignore_is_told():
    named, ignored = (b"quantkit-ignored", b"a, b (no such setting)"), []
    begin = {**START, "headers": [*START["headers"], named]}
    replicas = Scripted([[begin, event("data: 1\n\n")], [END]])
    answer = ask(replicas, ignored=ignored, headers={"user-agent": "codex/1 (x)"}, **BODY)
    assert answer.headers["quantkit-ignored"] == "a, b (no such setting)"
    assert ignored == ["ignored in requests of codex/1: a, b (no such setting)"]


def test_an_unstreamed_answer_is_complete_with_its_last_message():
    body = {"type": "http.response.body", "body": b"{}", "more_body": False}
    replicas = Scripted([[START, body], LOST])
    assert ask(replicas, **BODY).text == "{}" and len(replicas.requests) == 1


@pytest.mark.parametrize("comes", [False, True])
def test_a_replica_is_waited_for_only_so_long(monkeypatch, comes):
    looks = []

    class Starting(Scripted):
        @property
        def running(self):
            looks.append(None)
            return ["a"] if comes and len(looks) == 3 else []

        @running.setter
        def running(self, names):
            """They come when they do."""

    monkeypatch.setattr(forward, "REPLICA_SECONDS", 60 if comes else 0.05)
    replicas = Starting([[START, END]])
    answer = ask(replicas, **BODY)
    assert len(replicas.requests) == comes and len(looks) >= 3
    assert answer.status_code == (200 if comes else 503)
    if not comes:
        assert answer.headers["retry-after"] and answer.json()["error"]["code"] == "replica_lost"
        assert answer.json()["error"]["message"] == "no replica runs; send the request again later"


def test_secrets_stay_in_the_server():
    replicas = Scripted([[START, END]])
    secrets = {"Authorization": "Bearer sesame", "X-Api-Key": "sesame", "Proxy-Authorization": "Basic sesame",
               "Cookie": "session=sesame"}
    ask(replicas, key="sesame", headers={**secrets, "X-Request": "7"}, **BODY)
    headers = dict(replicas.requests[0].scope["headers"])
    assert headers[b"x-request"] == b"7" and headers[b"content-type"] == b"application/json"
    assert not {name.lower().encode() for name in secrets} & headers.keys()
    assert not any(b"sesame" in value for value in headers.values())


def test_a_replica_is_told_whose_request_it_is_and_not_by_which_key():
    replicas = Scripted(*[[[START, END]]] * 3)
    for key in ("sesame", "poppy", "sesame"):
        ask(replicas, keys=("sesame", "poppy"), headers={"Authorization": f"Bearer {key}"}, **BODY)
    first, other, again = replicas.requests
    assert first.scope[TENANT] == again.scope[TENANT] != other.scope[TENANT]
    assert b"sesame" not in first.scope[TENANT]


def test_the_key_is_checked_before_a_replica_is_asked():
    replicas = Scripted([[START, END]])
    assert ask(replicas, key="sesame", **BODY).status_code == 401 and not replicas.requests
    assert ask(replicas, "/health", method="GET", key="sesame").json() == {"status": "ok"}
    good = ask(replicas, key="sesame", headers={"Authorization": "Bearer sesame"}, **BODY)
    assert good.status_code == 200 and len(replicas.requests) == 1


@pytest.mark.parametrize("content", [b"[" * 100_000, ("[" * 100_000).encode("utf-16")])
def test_a_body_of_too_many_lists_is_refused_here(content):
    replicas = Scripted()
    answer = ask(replicas, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert not replicas.requests


def test_a_server_that_ends_takes_no_new_work():
    replicas = Scripted([[START, END]])
    for path, method in ((CHAT, "POST"), ("/v1/embeddings", "POST"), ("/ready", "GET")):
        refused = ask(replicas, path, method=method, drained=True, **(BODY if method == "POST" else {}))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
    assert ask(replicas, "/v1/models", method="GET", drained=True).status_code == 200


def test_errors_of_a_replica_reach_the_server_s_terminal():
    errors = []
    report = {"type": REPORT, "errors": [QuantkitError("a plugin failed", why="it divides")]}
    assert ask(Scripted([[report, START, END]]), errors=errors, **BODY).status_code == 200
    (error,) = errors
    assert (error.what, error.why, error.next) == ("a plugin failed", "it divides", None)


STATE = {"running": 1, "waiting": 2, "max_batch": 8, "max_queue": 64, "kv_allocated_bytes": 100,
         "tokens_generated": 7}


def state_of(text, status=200):
    """The script of an answer to ``GET``."""
    return [[{**START, "status": status}, {"type": "http.response.body", "body": text.encode()}]]


def test_ready_is_the_sum():
    replicas = Scripted()
    refusal = state_of('{"error": "it is ending"}', 503)
    for path in ("/ready", "/metrics"):
        for replicas.running, replicas.scripts in ([], []), (["a"], [refusal]), (["a"], [[LOST]]):
            assert ask(replicas, path, method="GET").status_code == 503, "no replica runs"
    state = {"status": "ready", **STATE, "models": {"m": STATE, "n": STATE}}
    replicas.running = ["a", "b", "c"]
    replicas.scripts = [state_of(json.dumps(state)), state_of(json.dumps(state)), refusal]
    double = {key: 2 * value for key, value in STATE.items()}
    assert ask(replicas, "/ready", method="GET").json() == {
        "status": "ready", **double, "models": {"m": double, "n": double}}


def test_there_is_no_common_trace():
    replicas = Scripted()
    answer = ask(replicas, "/trace", method="GET")
    assert answer.status_code == 404 and "each has a clock of its own" in answer.json()["error"]["message"]
    assert not replicas.requests


def test_metrics_have_the_replica_as_label():
    replicas = Scripted(*(state_of(
        "# HELP vllm:num_requests_running Requests.\n# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{model_name="m"}} {count}.0\n'
        "# HELP vllm:prompt_tokens_total Tokens.\n# TYPE vllm:prompt_tokens_total counter\n"
        f'vllm:prompt_tokens_total{{model_name="m"}} {count}0.0\n'
        "# HELP vllm:e2e Seconds.\n# TYPE vllm:e2e histogram\n"
        f'vllm:e2e_bucket{{le="1.0"}} {count}.0\nvllm:e2e_bucket{{le="+Inf"}} {count}.0\n'
        f"vllm:e2e_count {count}.0\nvllm:e2e_sum 0.5\n") for count in (1, 2)))
    replicas.running = ["b", "a"]
    answer = ask(replicas, "/metrics", method="GET")
    lines = answer.text.splitlines()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in ('vllm:num_requests_running{model_name="m",replica="a"} 1.0',
                 'vllm:num_requests_running{model_name="m",replica="b"} 2.0',
                 'vllm:prompt_tokens_total{model_name="m",replica="b"} 20.0',
                 'vllm:e2e_bucket{le="+Inf",replica="a"} 1.0', 'vllm:e2e_count{replica="b"} 2.0'):
        assert line in lines
    assert sum(line.startswith("# TYPE") for line in lines) == 3
