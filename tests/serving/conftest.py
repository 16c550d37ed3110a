"""Real servers over a tiny model, each on a thread and a port of its own."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import TypeAdapter

from quantkit.runtime.drafting.base import Drafter
from quantkit.runtime.engine import Engine, FairLock
from quantkit.runtime.loader import LoadedModel, load
from quantkit.serving.address import bind, url
from quantkit.serving.app import Application, create_app
from quantkit.serving.models import SchedulingPolicy, ServedEngine
from quantkit.serving.server import Server
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta
from quantkit.testing import tiny_model
from quantkit.text.tokenizer import Tokenizer

CONTEXT = 2**16
DEADLINE = 60.0
"""Seconds that a test waits for what should come at once; nothing is measured."""


@dataclass
class Live:
    """A running server."""

    url: str
    engine: Engine
    application: Application
    loaded: LoadedModel
    server: Server
    errors: list[BaseException]
    loop: asyncio.AbstractEventLoop

    @property
    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client, which never tries again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0,
                                                           "timeout": DEADLINE, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A JSON body to a path; ``model`` is filled in."""
        if isinstance(body, dict):
            body = {"model": "tiny", **body}
        with self.http as client:
            return client.post(path, json=body, **options)

    def post_content(self, path: str, content: Any, **headers: str) -> httpx.Response:
        """A body as it is written, said to be JSON."""
        with self.http as client:
            return client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def get(self, path: str, **options: Any) -> httpx.Response:
        """What is at a path."""
        with self.http as client:
            return client.get(path, **options)

    def endless(self, most: int = 50_000) -> openai.Stream[Any]:
        """A completion that is streamed to the official client, and goes on and on."""
        return self.openai().completions.create(model="tiny", prompt="a", max_tokens=most, stream=True,
                                                extra_body={"ignore_eos": True})

    def connect(self) -> socket.socket:
        """A connection on which a test writes HTTP itself."""
        base = httpx.URL(self.url)
        return socket.create_connection((base.host, base.port), timeout=DEADLINE)


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
"""The beginning of a request for a completion, as it is sent; its length and its body follow."""


def sent(**body: Any) -> bytes:
    """A request for a completion, as it is sent."""
    text = json.dumps({"model": "tiny", "prompt": "a", **body})
    return f"{HEAD}Content-Length: {len(text)}\r\n\r\n{text}".encode()


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
APIS = (CHAT, TEXT, RESPONSES, MESSAGES)


def asked(path: str, text: str = "the cat", most: int = 16) -> dict[str, Any]:
    """A request of any API for an answer of at most so many tokens."""
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": most}
    if path == TEXT:
        return {"prompt": text, "max_tokens": most}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": most}


def called(path: str, answer: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """Names and arguments of the calls of a whole answer, and its text."""
    if path == RESPONSES:
        calls = [(item["name"], item["arguments"]) for item in answer["output"]
                 if item["type"] == "function_call"]
        text = "".join(part["text"] for item in answer["output"] for part in item.get("content") or [])
    elif path == MESSAGES:
        calls = [(part["name"], json.dumps(part["input"])) for part in answer["content"]
                 if part["type"] == "tool_use"]
        text = "".join(part.get("text", "") for part in answer["content"])
    else:
        message = answer["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"])
                 for call in message.get("tool_calls", [])]
        text = message["content"] or ""
    return calls, text


def events(answer: httpx.Response, kind: TypeAdapter[Any]) -> list[dict[str, Any]]:
    """The events of a stream in which each has its name, as the official client's types have them."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        kind.validate_python(found[-1])
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A two-layer Llama in float32 with a long context. Tests don't write to it."""
    return tiny_model(tmp_path_factory.mktemp("serve") / "tiny", dtype="float32",
                      max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def loaded(folder) -> LoadedModel:
    """The same, loaded; one thread, because other processes may want the rest."""
    torch.set_num_threads(1)
    return load(str(folder))


@contextmanager
def running(loaded: LoadedModel, *, models: dict[str, LoadedModel] | None = None, name: str = "tiny",
            host: str = "127.0.0.1", max_batch: int = 8, max_queue: int = 64, parse_special: bool = False,
            scheduling_policy: SchedulingPolicy = "fcfs", strict_requests: bool = False,
            bare_json_calls: bool = True, drafter: Drafter | None = None, prefix_cache: int = 0,
            lock: FairLock | None = None, key: str | None = None, **options: Any) -> Iterator[Live]:
    """A server; of several ``models`` the first is the one that :class:`Live` shows."""
    errors: list[BaseException] = []
    served = [ServedEngine(Engine(model, max_batch=max_batch, max_queue=max_queue, drafter=drafter,
                                  prefix_cache=prefix_cache, lock=lock), model, called, parse_special,
                           scheduling_policy, strict_requests, bare_json_calls)
              for called, model in (models or {name: loaded}).items()]
    keys = options.pop("keys", () if key is None else (key,))
    application = create_app(served, on_error=errors.append, keys=keys, **options)
    loops: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()
    with bind(host, 0, has_key=bool(keys)) as bound:
        server = Server(application, drain_timeout=DEADLINE, on_drain=lambda active: None,
                        on_ready=lambda: loops.put(asyncio.get_running_loop()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        for model in served:
            model.engine.start(errors.append)
        thread.start()
        try:
            yield Live(url(bound), served[0].engine, application, served[0].loaded, server, errors,
                       loops.get(timeout=DEADLINE))
        finally:
            application.close()
            server.should_exit = True
            thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.fixture
def live(loaded) -> Iterator[Callable[..., Live]]:
    """``live(key=…, max_batch=…)`` → a server that ends with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(options.pop("loaded", loaded), **options))


@pytest.fixture(scope="session")
def shared(loaded) -> Iterator[Live]:
    """A server for tests that leave nothing behind."""
    with running(loaded) as made:
        yield made


@pytest.fixture(scope="session")
def strict(loaded) -> Iterator[Live]:
    """The same, started with ``--strict-requests``."""
    with running(loaded, strict_requests=True) as made:
        yield made


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], None]:
    """Wait until something holds."""

    def wait(holds: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def twin(folder) -> LoadedModel:
    """The shared model once more: an engine needs one of its own."""
    return load(str(folder))


@pytest.fixture
def still_serves(request) -> Iterator[None]:
    """After each of a module's tests its server answers a normal request, and has had no error of its own."""
    yield
    for name in {"shared", "strict"} & {*request.fixturenames}:
        server = request.getfixturevalue(name)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert not server.errors


class ScriptedTurn:
    """A parser that finds in any text what its script says: one delta, or several, for each piece of text."""

    def __init__(self, script: list[list[TurnDelta]]) -> None:
        self._left = list(script)

    def push(self, text: str) -> list[TurnDelta]:
        return self._left.pop(0) if self._left else []

    def finish(self) -> list[TurnDelta]:
        return [delta for deltas in self._left for delta in deltas]


SCRIPT: list[list[TurnDelta]] = [
    [ReasoningDelta("I need ")], [ReasoningDelta("a tool.")], [TextDelta("Let me ")], [TextDelta("look.")],
    [ToolCallDelta(0, id="call_a", name="look")], [ToolCallDelta(0, '{"place": ')],
    [ToolCallDelta(0, '"here"}')],
    [ToolCallDelta(1, "{}", id="call_b", name="wait")]]
"""A turn with everything that a turn may have."""


@pytest.fixture
def scripted(monkeypatch) -> Callable[..., None]:
    """``scripted(script)``: every turn is read as this, whatever the model writes."""

    def script(deltas: list[list[TurnDelta]] = SCRIPT) -> None:
        monkeypatch.setattr("quantkit.serving.turns.parser", lambda *_: ScriptedTurn(deltas))

    return script


def lookup(name: str = "look", **more: Any) -> dict[str, Any]:
    """A tool as chat completions have it."""
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    return {"type": "function", "function": {"name": name, "description": "Look.", "parameters": parameters,
                                             **more}}


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    """Two tools."""
    return [lookup(), lookup("wait", parameters={"type": "object", "properties": {}})]


@pytest.fixture
def prepared(monkeypatch) -> list[tuple[Any, ...]]:
    """Conversations that were made ready for a template: messages, tools, and the template's options."""
    seen: list[tuple[Any, ...]] = []
    chat = Tokenizer.chat

    def prepare(format, messages, tools):
        seen.append((messages, tools))
        return [{"role": "user", "content": "the cat"}], None

    def noted(self, *args, options=MappingProxyType({}), **rest):
        seen[-1] += (dict(options),)
        return chat(self, *args, **rest)

    monkeypatch.setattr("quantkit.serving.turns.prepare", prepare)
    monkeypatch.setattr(Tokenizer, "chat", noted)
    return seen
