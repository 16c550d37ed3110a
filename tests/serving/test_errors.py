"""Whatever is refused is refused in one shape, by name, and the next request is answered."""

import json
import socket
import threading

import openai
import pytest

from quantkit.runtime.core import ContextLengthError, EngineClosed, EngineFull
from quantkit.runtime.engine import Engine
from quantkit.serving import guard
from quantkit.serving.errors import api_error
from quantkit.serving.prompt import PromptReader
from quantkit.support.errors import QuantkitError, SourceError, UsageError
from quantkit.text.chat import TemplateError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def check(answer, status, param=None, code=None, said=""):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    assert said in error["message"] and error["message"]


@pytest.fixture(autouse=True)
def _still_serves(request):
    yield
    for name in {"shared", "strict"} & {*request.fixturenames}:
        server = request.getfixturevalue(name)
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(("change", "param"), [
    ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": 1.5}, "n"), ({"n": True}, "n"), ({"n": "2"}, "n"),
    ({"temperature": -1}, "temperature"), ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": -0.1}, "top_p"), ({"top_p": 1.1}, "top_p"),
    ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": 2**40}, "max_tokens"),
    ({"stop": ""}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": ["a" * 2000]}, "stop[0]"),
    ({"stop": [1]}, "stop[0]"), ({"seed": 2**63}, "seed"), ({"seed": 1.5}, "seed"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"model": 3}, "model"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"ignore_eos": 1}, "ignore_eos"),
    ({"temprature": 1}, "temprature"), ({"\ud800": 1}, "?"),
])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_parameter_out_of_range_is_named(strict, path, change, param):
    body = {"model": "tiny", **({"messages": USER} if path == CHAT else {"prompt": "a"}), **change}
    with strict.http as client:
        check(client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}),
              400, param)


@pytest.mark.parametrize(("path", "change"), [
    (CHAT, {"functions": [{}]}), (TEXT, {"tools": [{"type": "function"}]}),
    (TEXT, {"tool_choice": "required"}),
    (CHAT, {"modalities": ["audio"]}), (CHAT, {"audio": {}}),
    (CHAT, {"reasoning_effort": "high"}), (CHAT, {"prediction": {"type": "content"}}),
    (TEXT, {"suffix": "x"}),
    (TEXT, {"best_of": 3}), (TEXT, {"chat_template": "{{ 1 }}"}), (CHAT, {"chat_template": "{{ 1 }}"}),
    (CHAT, {"echo": True}),
])
def test_what_would_change_the_answer_and_cant_be_obeyed_is_refused(strict, path, change):
    body = {"messages": USER, **change} if path == CHAT else {"prompt": "a", **change}
    check(strict.post(path, body), 400, next(iter(change)), "unsupported_parameter")


def test_what_changes_nothing_is_taken(shared):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [],
                "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "suffix": None,
                "presence_penalty": 0, "frequency_penalty": 0.0, "n": None, "stop": None, "max_tokens": 2,
                "seed": -5, "parallel_tool_calls": True, "stream_options": {"include_obfuscation": False}}
    assert shared.post(CHAT, {"messages": USER, **harmless}).status_code == 200
    assert shared.post(TEXT, {"prompt": "a", "best_of": 2, **harmless, "n": 2}).status_code == 200


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), ("hi", "messages"), ([{"role": "user"}], "messages[0].content"), ([3], "messages[0]"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([{"content": "x"}], "messages[0].role"),
    ([*USER, {"role": "user", "content": None}], "messages[1].content"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "user", "content": "x", "nme": "y"}], "messages[0].nme"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]}],
     "messages[0].content[0].image_url"),
    ([{"role": "user", "content": [{"type": "file", "text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
])
def test_messages_that_cant_be_are_refused_where_they_are_wrong(strict, messages, param):
    body = json.dumps({"model": "tiny", "messages": messages})
    with strict.http as client:
        check(client.post(CHAT, content=body, headers={"content-type": "application/json"}), 400, param)


@pytest.mark.parametrize(("prompt", "said"), [
    ([], "empty"), (["a", 3], "prompt"), ([3, "a"], "prompt"), ([[3], "a"], "prompt"), ({"a": 1}, "prompt"),
    ([True], "prompt"), ([-1], "doesn't know"), ([10**9], "doesn't know"), ([2**70], "doesn't know"),
    ([[]], "empty"), (3, "prompt"), (None, "prompt"), ([1.5], "prompt"),
])
def test_prompts_that_cant_be(shared, prompt, said):
    check(shared.post(TEXT, {"prompt": prompt}), 400, said=said)


@pytest.mark.parametrize("change", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21},
                                    {"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 0},
                                    {"logprobs": 3}])
def test_chat_settings_that_contradict(shared, change):
    check(shared.post(CHAT, {"messages": USER, **change}), 400)


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
def test_too_long_for_the_context_says_both_numbers(strict, loaded, path):
    limit = loaded.config.max_position_embeddings
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    ids = loaded.tokenizer.chat(USER) if path == CHAT else loaded.tokenizer.encode("hi")
    answer = strict.post(path, {**body, "max_tokens": limit})
    check(answer, 400, code="context_length_exceeded", said=str(limit))
    assert str(len(ids) + limit) in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        strict.openai().completions.create(model="tiny", prompt=[5] * limit)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        strict.openai().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "7 " * limit}])


@pytest.mark.parametrize("content", [
    b"", b"{", b"null", b"[]", b'"x"', b"{}", b"\xff\xfe", b'{"model": "tiny", "prompt": NaN}',
    b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b', "model": "tiny"}',
    b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
    b'{"model": "tiny", "prompt": [' + b'"a", 1, ' * 100_000 + b"1]}",
    b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 4000 + b"}",
])
def test_bodies_that_are_no_request(shared, content):
    with shared.http as client:
        check(client.post(TEXT, content=content, headers={"content-type": "application/json"}), 400)


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
    kind = {"content-type": "application/json"}
    with shared.http as client:
        check(client.post(TEXT, content=text, headers=kind), 413, code="body_too_large")
        check(client.post(TEXT, content=iter([text[:1000]] * 5000), headers=kind), 413, code="body_too_large")
        assert client.post(TEXT, content=json.dumps({"model": "tiny", "prompt": "a", "user": "x" * 10**6}),
                           headers=kind).status_code == 200


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
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                    "Content-Length: 100\r\n\r\n{".encode())
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
    stream = made.openai().completions.create(model="tiny", prompt="a", max_tokens=50_000, stream=True,
                                              extra_body={"ignore_eos": True})
    next(iter(stream))
    waiting = threading.Thread(target=lambda: made.post(TEXT, {"prompt": "a", "max_tokens": 1}))
    waiting.start()
    eventually(lambda: made.engine.stats()["waiting"] == 1)
    check(made.post(TEXT, {"prompt": "a", "n": 2}), 503, code="overloaded")
    eventually(lambda: made.engine.stats()["waiting"] == 1)
    stream.close()
    waiting.join()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_the_engine_is_told_and_the_server_lives(live, eventually, monkeypatch, stream):
    made = live()
    kind, count = type(made.engine.loaded.model), iter(range(100))
    push = kind.forward

    def breaks(self, *args, **options):
        if next(count) == 2:
            raise QuantkitError("the model's output is not finite", why="its weights are damaged")
        return push(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", breaks)
        with pytest.raises(openai.APIError, match="not finite"):
            answer = made.openai().completions.create(model="tiny", prompt="a", max_tokens=9, stream=stream,
                                                      extra_body={"ignore_eos": True})
            list(answer)
    assert [type(error) for error in made.errors] == [QuantkitError]
    assert made.post(TEXT, {"prompt": "a"}).status_code == 200
    eventually(lambda: made.engine.stats()["kv_allocated_bytes"] == 0)


def test_an_internal_error_says_nothing_about_the_inside(live, monkeypatch, eventually):
    made = live()
    monkeypatch.setattr(type(made.loaded.tokenizer), "encode", lambda *_: 1 / 0)
    answer = made.post(TEXT, {"prompt": "a"})
    check(answer, 500, code="internal_error")
    assert answer.json()["error"]["message"] == "internal error"
    eventually(lambda: made.errors)  # the answer is sent first
    assert [type(error) for error in made.errors] == [ZeroDivisionError]


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


@pytest.mark.parametrize("prompt", [[-1], [2**40], [2**70], [[5], [-1]]])
@pytest.mark.parametrize("echo", [True, False])
def test_ids_that_no_text_has(shared, prompt, echo):
    answer = shared.post(TEXT, {"prompt": prompt, "echo": echo})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert not shared.errors


@pytest.mark.parametrize("body", ["[" * 100_000, '{"model": "tiny", "prompt": ' + "[" * 100_000,
                                  '{"model": "tiny", "seed": ' + "9" * 5000 + "}"])
def test_what_is_too_much_for_a_parser(shared, body):
    with shared.http as client:
        answer = client.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    check(answer, 400, code="invalid_json")


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


@pytest.mark.parametrize("path", ["/tokenize", TEXT])
def test_an_error_of_ours_in_a_thread_is_told_too(live, monkeypatch, path):
    made = live()

    def fail(*_):
        raise QuantkitError("the tokenizer is damaged")

    monkeypatch.setattr(type(made.loaded.tokenizer), "encode", fail)
    check(made.post(path, {"prompt": "a"}), 500, code="internal_error")
    assert [type(error) for error in made.errors] == [QuantkitError]
