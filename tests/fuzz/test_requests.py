"""Requests to the server: whatever a body is made into, it is answered or refused in the one shape."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import h11
import pytest
import torch

from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.serving.app import create_app
from quantkit.serving.connection import RequestReader
from quantkit.serving.models import ServedEngine
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_HEADERS = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
_SETTINGS: dict[str, Any] = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["a", "the"],
    "seed": 5,
    "stream": False, "stream_options": {"include_usage": True}, "top_k": 5, "min_p": 0.01,
    "repetition_penalty": 1.1, "ignore_eos": True, "user": "me", "presence_penalty": 0, "tools": [],
    "cache_salt": "x"}
_CHAT = {**_SETTINGS, "logprobs": True, "top_logprobs": 2, "messages": [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text",
                                                                              "text": "the cat"}]},
    {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}, {"role": "user",
                                                                               "content": "a"}]}
_TEXT = {**_SETTINGS, "logprobs": 2, "echo": True, "best_of": 2}
BODIES = [(CHAT, _CHAT), (TEXT, {**_TEXT, "prompt": "the cat"}), (TEXT, {**_TEXT, "prompt": ["a", "b"]}),
          (TEXT, {**_TEXT, "prompt": [5, 6], "stream": True}), (TEXT, {**_TEXT, "prompt": [[5], [6, 7]]}),
          (CHAT, {**_CHAT, "stream": True, "max_completion_tokens": 2})]


class Refusal(QuantkitError):
    """The server refused a request."""


@pytest.fixture(scope="module")
def send(tmp_path_factory) -> Iterator[Callable[..., None]]:
    """``send(path, body, headers)``: a request to an application without a socket, and its answer checked."""
    torch.set_num_threads(1)
    loaded = load(str(tiny_model(tmp_path_factory.mktemp("fuzz") / "tiny", dtype="float32")))
    engine, errors = Engine(loaded), []
    application = create_app([ServedEngine(engine, loaded, "tiny")], on_error=errors.append)
    engine.start()
    loop = asyncio.new_event_loop()

    def run(path: str, body: bytes, headers: list[tuple[bytes, bytes]] = _HEADERS) -> None:
        sent: list[dict[str, Any]] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not waiting:
                await asyncio.Event().wait()  # the client stays
            return waiting.pop()

        async def put(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
                 "query_string": b"",
                 "root_path": "", "headers": headers, "http_version": "1.1", "scheme": "http",
                 "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1)}
        loop.run_until_complete(asyncio.wait_for(application(scope, receive, put), 60))
        status = sent[0]["status"]
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        assert not errors, errors
        if status == 200:
            assert answer
            return
        assert 400 <= status < 500 or status == 503, (status, answer)
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        raise Refusal(error["message"], next="ask for something else")

    yield run
    engine.close()
    loop.close()


def test_bodies_whose_parts_are_changed(send, fuzz, mutations):
    def change(seed, chance):
        path, body = seed
        return path, _short(mutations["json"](body, chance))

    fuzz(lambda case: send(case[0], mutations["encode"](case[1])), BODIES, change)


def test_bodies_whose_bytes_are_changed(send, fuzz, mutations):
    seeds = [(path, mutations["encode"](body)) for path, body in BODIES]
    fuzz(lambda case: send(*case), seeds, lambda seed, chance: (seed[0], mutations["bytes"](seed[1], chance)))


def test_headers_whose_bytes_are_changed(send, fuzz, mutations):
    seeds = [[*_HEADERS, (b"origin", b"http://localhost:8000"), (b"content-length", b"20"), (b"accept",
                                                                                             b"*/*")]]
    body = mutations["encode"]({"model": "tiny", "prompt": "a", "max_tokens": 1})

    def change(seed, chance):
        changed = list(seed)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(changed))
            name, value = changed[at]
            if chance.random() < 0.2:
                changed.append((name, mutations["bytes"](value, chance)))
            else:
                changed[at] = name, mutations["bytes"](value, chance)
        return changed

    fuzz(lambda headers: send(TEXT, body, headers), seeds, change)


def test_bodies_in_other_encodings(send, fuzz, mutations):
    encodings = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig", "latin-1")

    def change(seed, chance):
        path, body = seed
        text = mutations["encode"](_short(mutations["json"](body, chance))).decode()
        return path, text.encode(chance.choice(encodings))

    fuzz(lambda case: send(case[0], case[1] if isinstance(case[1], bytes) else mutations["encode"](case[1])),
         BODIES, change)


FRAMED = [
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4;a=b\r\na\r\nb\r\n1\r\nc\r\n0\r\nX: y\r\n\r\n",
    b"GET http://localhost:8000/trace?since=1 HTTP/1.0\r\nAccept: */*\r\nX:\r\n\r\n",
]
LINES = [b"Content-Length: 4", b"Transfer-Encoding: chunked", b"Host: a", b" folded", b"X : y", b"", b"0",
         b"2"]


def test_a_request_is_the_same_however_it_is_cut(fuzz, mutations):
    def change(seed, chance):
        if chance.random() < 0.5:
            return mutations["bytes"](seed, chance)
        end = chance.choice([b"\r\n", b"\r\n", b"\n", b"\r"])
        lines = seed.split(b"\r\n")
        lines.insert(chance.randrange(len(lines) + 1), chance.choice(LINES))
        at = chance.randrange(1, len(lines))
        return b"\r\n".join(lines[:at]) + end + b"\r\n".join(lines[at:])

    def read(raw):
        whole = _framed([raw] if raw else [])  # nothing at all means that the client has left
        assert whole == _framed([raw[at:at + 1] for at in range(len(raw))]), raw
        if isinstance(whole, int):
            raise Refusal(f"status {whole}", next="ask for something else")

    fuzz(read, FRAMED, change)


def _framed(parts: list[bytes]) -> int | list[Any]:
    """The first request that comes in these parts, with its body as far as it came, or why it is refused."""
    reader, request, body, ended = RequestReader(), None, b"", False
    try:
        for part in parts:
            reader.receive_data(part)
            while not ended and (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    request = event
                    framing = {b"content-length", b"transfer-encoding"} & {name for name, _ in event.headers}
                    assert len(framing) < 2 and (event.http_version >= b"1.1"
                                                 or b"transfer-encoding" not in framing)
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    ended = True
    except h11.RemoteProtocolError as error:
        return error.error_status_hint
    return [request, body, ended]


def _short(body: Any) -> Any:
    """Few tokens, where many would be allowed: an answer's length is no part of what is tried here."""
    if isinstance(body,
                  dict) and body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        return {**body, "max_tokens": 2}
    return body
