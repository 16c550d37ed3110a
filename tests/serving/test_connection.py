"""Connections that take their time, as raw sockets: none is kept open for nothing."""

import json
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from quantkit.serving import connection

from .conftest import HEAD, sent


@pytest.fixture
def connect():
    """``connect(made)`` → a socket to a server."""
    with ExitStack() as opened:
        yield lambda made: opened.enter_context(made.connect())


def everything(raw):
    """What comes until the server ends the connection."""
    found = b""
    while part := raw.recv(2**16):
        found += part
    return found


def trickle(raw, data):
    """Send on and on, and return what comes back before the server gives up."""
    def send():
        try:
            while True:
                raw.sendall(data)
                time.sleep(0.02)
        except OSError:
            pass

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        return everything(raw)
    except ConnectionResetError:  # it ended while a byte was on its way
        return b""
    finally:
        raw.close()
        sender.join(60)
        assert not sender.is_alive()


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    first, _ = json.JSONDecoder().raw_decode(body.decode())  # another answer may follow
    return int(head.split()[1]), first["error"]["code"]


@pytest.fixture
def quick(monkeypatch):
    """A server that doesn't wait long."""
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.2)


@pytest.mark.parametrize("begun", ["G", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_never_end_are_a_408(shared, quick, connect, begun):
    raw = connect(shared)
    raw.sendall(begun.encode())
    assert error_of(everything(raw)) == (408, "timeout")


def test_headers_that_trickle_in_are_a_408(shared, quick, connect):
    raw = connect(shared)
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
    answer = trickle(raw, b"y")
    assert not answer or error_of(answer) == (408, "timeout")


def test_a_connection_without_a_request_is_closed(shared, quick, connect):
    assert everything(connect(shared)) == b""


def test_a_connection_is_closed_some_time_after_its_last_answer(shared, quick, connect):
    raw = connect(shared)
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert everything(raw).startswith(b"HTTP/1.1 200 ")


def test_the_next_requests_headers_have_as_long_and_no_longer(shared, connect, monkeypatch):
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 3)
    raw = connect(shared)
    for _ in range(4):
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += raw.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        time.sleep(1)
    raw.sendall(b"GET /health HTTP/1.1\r\nHo")
    assert error_of(everything(raw)) == (408, "timeout")


def test_a_body_that_trickles_in_after_its_answer_ends_the_connection(shared, quick, connect):
    raw = connect(shared)
    raw.sendall((HEAD.replace("localhost", "evil.example") + "Content-Length: 4000000\r\n\r\n").encode())
    answer = trickle(raw, b" ")
    assert not answer or b"forbidden_host" in answer


def test_a_long_answer_is_not_cut_short_by_the_wait_for_requests(shared, quick, connect):
    raw = connect(shared)
    raw.sendall(sent(max_tokens=2000, ignore_eos=True, stream=True))
    assert b"data: [DONE]" in everything(raw)


def test_an_answer_that_is_not_read_is_given_up(live, connect, eventually, monkeypatch):
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.3)
    made = live()
    for listening in made.server.servers[0].sockets:  # or the system holds megabytes of it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    raw = connect(made)
    raw.sendall(sent(max_tokens=60_000, ignore_eos=True, stream=True, logprobs=20))
    eventually(lambda: made.engine.stats()["running"])
    eventually(lambda: not made.engine.stats()["running"] and not made.application.guard.active)
    assert made.engine.timing.decode_tokens < 50_000, "it was written to its end for nobody"


def test_who_leaves_in_the_middle_of_a_body_is_no_error(live, connect, eventually):
    made = live()
    for text in (HEAD + "Content-Length: 100\r\n\r\n{", HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        raw = connect(made)
        raw.sendall(text.encode())
        eventually(lambda: made.application.guard.active == 1)
        raw.close()
        eventually(lambda: made.application.guard.active == 0)
    assert made.errors == []


def test_a_bad_chunk_after_the_answer_breaks_nothing(shared, connect):
    raw = connect(shared)
    raw.sendall((HEAD.replace("localhost", "evil.example") + "Transfer-Encoding: chunked\r\n\r\n").encode())
    assert raw.recv(2**16).startswith(b"HTTP/1.1 403 ")
    raw.sendall(b"zz\r\n")
    assert b"HTTP/1.1" not in everything(raw), "there is one answer"
    assert shared.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
