"""Sockets, and what an ending server doesn't wait for (its signals are tested with the command)."""

import asyncio
import socket

import httpx
import openai
import pytest

from quantkit.runtime.core import EngineDeadError
from quantkit.runtime.engine import FairLock
from quantkit.serving.address import bind, is_loopback, url
from quantkit.support.errors import QuantkitError, UsageError

from .conftest import APIS, HEAD, MESSAGES, asked, sent


def test_a_free_port_is_taken_and_said():
    with bind("127.0.0.1", 0, has_key=False) as bound:
        assert is_loopback(bound) and url(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert bound.getsockname()[1] > 0


def test_a_port_in_use_is_an_error_in_three_parts():
    """By a server, or by one of ours that loads its model still."""
    with bind("127.0.0.1", 0, has_key=False) as other, pytest.raises(QuantkitError) as caught:
        bind("127.0.0.1", other.getsockname()[1], has_key=False)
    assert "in use" in caught.value.what and caught.value.why and "--port 0" in caught.value.next


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_what_others_can_reach_needs_a_key(host):
    with pytest.raises(UsageError) as caught:
        bind(host, 0, has_key=False)
    assert "no API key" in caught.value.what or "can't be bound" in caught.value.what


def test_names():
    with bind("localhost", 0, has_key=False) as bound:
        assert is_loopback(bound)
    with pytest.raises(UsageError, match="can't be bound"):
        bind("no.such.name.invalid", 0, has_key=False)
    with pytest.raises(QuantkitError, match="can't be bound"):
        bind("192.0.2.1", 0, has_key=True)


def test_draining_waits_for_no_body_that_never_comes(live, eventually, monkeypatch):
    monkeypatch.setattr("quantkit.serving.guard.LAST_BODY", 0.1)
    made = live()
    head = f"{HEAD}Content-Length: 100\r\n\r\n{{".encode()
    with made.connect() as stuck:
        stuck.sendall(head)
        eventually(lambda: made.application.guard.active == 1)
        assert asyncio.run_coroutine_threadsafe(made.application.drain(30), made.loop).result(60) is True
        assert stuck.recv(2000).startswith(b"HTTP/1.1 503 ")
    assert made.get("/ready").headers["retry-after"] and made.get("/health").status_code == 200
    with made.connect() as late:
        late.sendall(head)
        assert late.recv(2000).startswith(b"HTTP/1.1 503 ")


def test_ending_waits_for_no_answer_that_is_never_read(live, eventually, monkeypatch):
    monkeypatch.setattr("quantkit.serving.connection.LINGER_SECONDS", 0.1)
    made = live()
    made.server.config.timeout_graceful_shutdown = None
    for listening in made.server.servers[0].sockets:  # or the system takes all of the answer
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect((httpx.URL(made.url).host, httpx.URL(made.url).port))
        unread.sendall(2 * sent(max_tokens=60, ignore_eos=True, logprobs=20))
        eventually(lambda: made.engine.stats()["tokens_generated"] == 120)
        eventually(lambda: not made.application.guard.active)
        (stuck,) = made.server.server_state.connections
        assert stuck.transport.get_write_buffer_size(), "there is something left to send"
        made.server.should_exit = True
        eventually(lambda: not made.server.server_state.connections)


class BreakableLock(FairLock):
    """A lock that raises between two steps, where no request is at fault, once it is broken."""

    broken = False

    def decodes(self, engine, whether):
        super().decodes(engine, whether)
        if self.broken:
            raise RuntimeError("the device is gone\nand more")


@pytest.mark.parametrize("at_start", [True, False])
def test_when_the_engine_dies_every_request_is_told_and_the_server_isn_t_healthy(live, eventually, at_start):
    lock = BreakableLock()
    lock.broken = at_start
    made = live(lock=lock, max_batch=1)
    if not at_start:
        assert made.get("/health").status_code == made.get("/ready").status_code == 200
        stream = made.endless()
        next(stream)
        with made.connect() as waits:
            waits.sendall(sent())
            eventually(lambda: made.engine.stats()["waiting"] == 1)
            lock.broken = True
            assert waits.recv(2000).startswith(b"HTTP/1.1 503 ")
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
    eventually(lambda: made.errors)
    for path, body in (*((path, asked(path)) for path in APIS), ("/v1/embeddings", {"input": "a"})):
        refused = made.post(path, body)
        error = refused.json()["error"]
        assert refused.status_code == 503
        assert error["message"] == ("the engine has stopped (RuntimeError); start the server again: quantkit "
                                    "serve-local")
        assert path == MESSAGES or error["code"] == "engine_dead"
    assert made.get("/health").status_code == made.get("/ready").status_code == 503
    assert made.get("/health").json()["error"]["code"] == "engine_dead"
    assert made.post("/tokenize", {"prompt": "a"}).status_code == 200, "it needs no engine"
    (failure,) = made.errors
    assert isinstance(failure, EngineDeadError) and failure.why == "RuntimeError: the device is gone"
