"""A client that leaves frees what it held, whatever it was waiting for."""

import json
import socket
from contextlib import contextmanager

import pytest

ENDLESS = {"model": "tiny", "prompt": "a", "max_tokens": 60_000, "ignore_eos": True}
PATH = "/v1/completions"


@pytest.fixture
def idle(eventually):
    """Wait until an engine has nothing left, neither requests nor pages."""

    def wait(made):
        eventually(lambda: all(made.engine.stats()[key] == 0
                               for key in ("running", "waiting", "kv_allocated_bytes")))
        eventually(lambda: made.application.guard.active == 0)
        assert made.engine.timing.decode_tokens < 30_000, "it ran on for nobody"
        assert made.post(PATH, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert made.errors == []

    return wait


@contextmanager
def asking(made, **body):
    """A client that asks, and leaves at the end of the block without having read a thing."""
    host, port = made.url.removeprefix("http://").split(":")
    text = json.dumps({**ENDLESS, **body})
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(text)}\r\n\r\n{text}".encode())
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_it_is_written(live, idle, eventually, stream):
    made = live()
    with asking(made, stream=stream):
        eventually(lambda: made.engine.timing.decode_tokens > 3)
    idle(made)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_during_prefill(live, idle, eventually, stream):
    made = live()
    with asking(made, stream=stream, prompt=[5] * 60_000, max_tokens=1000):
        eventually(lambda: made.engine.timing.prefill_tokens)
    idle(made)
    assert made.engine.timing.prefill_tokens < 50_000, "the prompt was read to its end for nobody"


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue(live, idle, eventually, stream):
    made = live(max_batch=1)
    with asking(made):
        eventually(lambda: made.engine.stats()["running"] == 1)
        with asking(made, stream=stream):
            eventually(lambda: made.engine.stats()["waiting"] == 1)
        eventually(lambda: made.engine.stats()["waiting"] == 0)
        assert made.engine.stats()["running"] == 1, "the other one goes on"
    idle(made)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_several_choices(live, idle, eventually, stream):
    made = live(max_batch=2)
    with asking(made, n=5, stream=stream):
        eventually(lambda: made.engine.timing.decode_tokens > 3)
    idle(made)


def test_the_official_client_stops_a_stream(live, idle):
    made = live()
    with made.openai().completions.create(model="tiny", prompt="a", max_tokens=60_000, stream=True,
                                          extra_body={"ignore_eos": True}) as stream:
        assert next(iter(stream)).choices
    idle(made)


def test_many_come_and_go(live, idle, eventually):
    made = live(max_batch=3)
    for number in range(12):
        with asking(made, stream=bool(number % 2)):
            eventually(lambda: made.application.guard.active)
    idle(made)
