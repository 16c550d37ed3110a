"""Every error has one shape and says nothing about the inside, and the next request is answered."""

import json
import threading

import openai
import pytest

from quantkit.runtime.core import ContextLengthError, EngineClosed, EngineFull
from quantkit.runtime.engine import Engine
from quantkit.serving import guard
from quantkit.serving.errors import api_error
from quantkit.serving.work import PromptReader
from quantkit.support.errors import QuantkitError, SourceError, UsageError
from quantkit.text.chat import TemplateError

from .conftest import CHAT, HEAD, MESSAGES, RESPONSES, TEXT, asked

USER = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.usefixtures("still_serves")


def check(answer, status, param=None, code=None, said=""):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    assert said in error["message"] and error["message"]


@pytest.mark.parametrize(("method", "path", "status", "code"), [
    ("GET", "/nowhere", 404, "not_found"), ("GET", "/v1/models/", 404, "model_not_found"),
    ("GET", "/v1/models/gpt-4", 404, "model_not_found"), ("GET", "/docs", 404, "not_found"),
    ("GET", "/redoc", 404, "not_found"), ("GET", "/v1/completions/", 404, "not_found"),
    ("GET", "/..%2f..%2fetc/passwd", 404, "not_found"), ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ("GET", CHAT, 405, "method_not_allowed"), ("POST", "/health", 405, "method_not_allowed"),
    ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
])
def test_what_is_not_there(shared, method, path, status, code):
    with shared.http as client:
        answer = client.request(method, path)
    check(answer, status, code=code)
    assert status != 405 or answer.headers["allow"]
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_another_model(strict):
    check(strict.post(TEXT, {"model": "gpt-4", "prompt": "a"}), 404, "model", "model_not_found", "'tiny'")
    check(strict.post(TEXT, {"model": None, "prompt": "a"}), 400, "model", "missing_parameter")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_too_long_for_the_context_says_both_numbers(strict, shared, loaded, path):
    limit = loaded.config.max_position_embeddings
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    ids = loaded.tokenizer.chat(USER) if path == CHAT else loaded.tokenizer.encode("hi")
    answer = strict.post(path, {**body, "max_tokens": limit})
    check(answer, 400, code="context_length_exceeded", said=str(limit))
    assert str(len(ids) + limit) in answer.json()["error"]["message"]
    long = [{"role": "user", "content": "7 " * limit}]
    body = {"messages": long} if path == CHAT else {"prompt": [5] * limit}
    for server in (strict, shared):  # of which the lenient one cuts answers, and never a prompt
        check(server.post(path, {**body, "max_tokens": 10**6}), 400, code="context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match=str(limit)):
        strict.openai().completions.create(model="tiny", prompt=[5] * limit)


@pytest.mark.parametrize("content", [
    b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"model": "tiny", "prompt": NaN}',
    b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', b'{"a":' * 100_000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b', "model": "tiny"}',
    b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
    b'{"model": "tiny", "prompt": [' + b'"a", 1, ' * 100_000 + b"1]}",
    b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 4000 + b"}",
])
def test_bodies_that_are_no_request(shared, content):
    check(shared.post_content(TEXT, content), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                                  None])
def test_only_json_is_read(shared, kind):
    """What a web page may send to a foreign server without asking is never JSON."""
    with shared.http as client:
        answer = client.post(TEXT, content=b'{"model": "tiny", "prompt": "a"}',
                             headers={} if kind is None else {"content-type": kind})
    check(answer, 400, said="application/json")


def test_a_body_that_is_too_large_whether_it_says_so_or_not(shared):
    text = json.dumps({"model": "tiny", "prompt": "a" * guard.MAX_BODY}).encode()
    check(shared.post_content(TEXT, text), 413, code="body_too_large")
    check(shared.post_content(TEXT, iter([text[:1000]] * 5000)), 413, code="body_too_large")
    assert shared.post(TEXT, {"prompt": "a", "user": "x" * 10**6}).status_code == 200


def test_a_long_text_keeps_nobody_waiting(shared, monkeypatch):
    """A tokenizer that kept the interpreter to itself would let no other answer through before its own."""
    monkeypatch.setattr(PromptReader, "check", lambda *_: None)  # which spares it most of the text
    text, answers = "the cat and the hat " * 50_000, []
    reading = threading.Thread(target=lambda: answers.append(shared.post(TEXT, {"prompt": text})))
    count = 0
    reading.start()
    with shared.http as client:
        while reading.is_alive():
            count += client.get("/health").status_code == 200
    check(*answers, 400, code="context_length_exceeded")
    assert count > 20


def test_a_body_that_never_comes(shared, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with shared.connect() as raw:
        raw.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        assert raw.recv(2000).startswith(b"HTTP/1.1 408 ")


def test_a_full_queue_is_said_at_once_and_the_place_comes_back(live, eventually):
    made = live(max_batch=1, max_queue=1)
    client = made.openai()
    stuck = {"model": "tiny", "prompt": "a", "max_tokens": 50_000, "stream": True,
             "extra_body": {"ignore_eos": True}}
    first = client.completions.create(**stuck)
    next(iter(first))
    second = threading.Thread(target=lambda: client.completions.create(**{**stuck, "max_tokens": 1}))
    second.start()
    eventually(lambda: made.engine.stats()["waiting"] == 1)
    answer = made.post(TEXT, {"prompt": "a"})
    check(answer, 503, code="overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    check(made.post(TEXT, {"prompt": ["a", "b"]}), 400, "n", "too_many_choices")
    check(made.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2}), 400, "n",
          "too_many_choices")
    first.close()
    second.join()
    eventually(lambda: made.engine.stats()["waiting"] == made.engine.stats()["running"] == 0)
    assert made.post(TEXT, {"prompt": "a"}).status_code == 200


def test_choices_are_queued_all_or_none(live, eventually):
    made = live(max_batch=1, max_queue=2)
    stream = made.endless()
    next(iter(stream))
    waiting = threading.Thread(target=lambda: made.post(TEXT, {"prompt": "a", "max_tokens": 1}))
    waiting.start()
    eventually(lambda: made.engine.stats()["waiting"] == 1)
    check(made.post(TEXT, {"prompt": "a", "n": 2}), 503, code="overloaded")
    eventually(lambda: made.engine.stats()["waiting"] == 1)
    stream.close()
    waiting.join()


ENDS = {CHAT: "server_error", TEXT: "server_error", MESSAGES: "api_error", RESPONSES: "internal_error"}
"""What the last event of a failed stream of each API says."""


@pytest.mark.parametrize("path", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_the_engine_is_told_and_the_server_lives(live, eventually, monkeypatch, path, stream):
    made = live()
    kind, count = type(made.engine.loaded.model), iter(range(100))
    push = kind.forward

    def breaks(self, *args, **options):
        if next(count) == 2:
            raise QuantkitError("the model's output is not finite", why="its weights are damaged")
        return push(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", breaks)
        answer = made.post(path, {**asked(path, "a"), "stream": stream, "temperature": 0})
    assert answer.status_code == (200 if stream else 500) and "not finite" in answer.text
    if stream:
        name, data = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[-2].split("data: ")
        error = json.loads(data)
        assert error.get("code", error.get("error", {}).get("type")) == ENDS[path]
        assert name == ("event: error\n" if path in (MESSAGES, RESPONSES) else "")
    assert [type(error) for error in made.errors] == [QuantkitError]
    assert made.post(TEXT, {"prompt": "a"}).status_code == 200
    eventually(lambda: made.engine.stats()["kv_allocated_bytes"] == 0)


@pytest.mark.parametrize("path", ["/tokenize", TEXT])
@pytest.mark.parametrize("kind", [ZeroDivisionError, QuantkitError])
def test_an_internal_error_says_nothing_about_the_inside(live, monkeypatch, eventually, path, kind):
    made = live()

    def fail(*_):
        raise kind("secret")

    monkeypatch.setattr(type(made.loaded.tokenizer), "encode", fail)
    answer = made.post(path, {"prompt": "a"})
    check(answer, 500, code="internal_error")
    assert kind is QuantkitError or answer.json()["error"]["message"] == "internal error"
    eventually(lambda: made.errors)  # the answer is sent first
    assert [type(error) for error in made.errors] == [kind]


def test_a_template_that_refuses_is_the_requests_fault(live, monkeypatch):
    made = live()

    def refuse(*_, **options):
        raise TemplateError("the chat template refused the conversation", why="roles must alternate")

    monkeypatch.setattr(type(made.loaded.tokenizer), "chat", refuse)
    check(made.post(CHAT, {"messages": USER}), 400, "messages", "chat_template_error", "must alternate")


@pytest.mark.parametrize(("error", "status", "code"), [
    (EngineFull("x"), 503, "overloaded"), (EngineClosed("x"), 503, "shutting_down"),
    (ContextLengthError(5, 6, 10), 400, "context_length_exceeded"), (UsageError("x"), 400, None),
    (SourceError("x"), 400, "tokenizer_error"), (TemplateError("x"), 400, "chat_template_error"),
    (QuantkitError("x"), 500, "internal_error"), (RuntimeError("secret"), 500, "internal_error"),
])
def test_errors_of_ours_in_openais_words(error, status, code):
    found = api_error(error)
    assert (found.status_code, found.code) == (status, code)
    assert "secret" not in found.detail
    assert ("Retry-After" in found.headers) == (status == 503)


@pytest.mark.parametrize("body", ["[" * 100_000, '{"model": "tiny", "prompt": ' + "[" * 100_000,
                                  '{"model": "tiny", "seed": ' + "9" * 5000 + "}"])
def test_what_is_too_much_for_a_parser(shared, body):
    check(shared.post_content(TEXT, body), 400, code="invalid_json")


@pytest.mark.parametrize("almost", [{"temperature": 1e-6}, {"temperature": 1, "top_p": 0}])
def test_greedy_in_all_but_name(shared, almost):
    found = [shared.post(TEXT, {"prompt": "the cat", **how}).json()["choices"][0]["text"]
             for how in ({"temperature": 0}, almost)]
    assert found[0] == found[1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_by_itself_is_told_once_and_no_shutdown(live, eventually, monkeypatch, stream):
    made = live()
    failure = ZeroDivisionError("secret")
    submit = Engine.submit

    def fails(self, *args, on_error, **options):
        request = submit(self, *args, on_error=on_error, **options)
        on_error(failure)
        return request

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "submit", fails)
        for _ in range(2):
            answer = made.post(TEXT, {"prompt": "a", "max_tokens": 500, "stream": stream})
            assert answer.status_code == (200 if stream else 500)
            assert '"internal_error"' in answer.text and "secret" not in answer.text
    eventually(lambda: made.errors)
    assert made.errors == [failure]
