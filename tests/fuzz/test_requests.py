"""Requests to the server: whatever a body is made into, it is answered or refused in the one shape."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.serve.app import create_app
from quantkit.serve.models import ServedEngine
from quantkit.testing import tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_HEADERS = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
_SETTINGS: dict[str, Any] = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["a", "the"],
    "seed": 5,
    "stream": False, "stream_options": {"include_usage": True}, "top_k": 5, "min_p": 0.01,
    "repetition_penalty": 1.1, "ignore_eos": True, "user": "me", "presence_penalty": 0, "tools": []}
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


def _short(body: Any) -> Any:
    """Few tokens, where many would be allowed: an answer's length is no part of what is tried here."""
    if isinstance(body,
                  dict) and body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        return {**body, "max_tokens": 2}
    return body
