"""A client that leaves frees what it held, whatever it was waiting for."""

from contextlib import contextmanager

import pytest

from .conftest import sent
from .test_metrics import read
from .test_trace import ended, spans, trace

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
    with made.connect() as raw:
        raw.sendall(sent(**{"max_tokens": 60_000, "ignore_eos": True, **body}))
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "counted"), [
    pytest.param({}, "decode_tokens", id="while it is written"),
    pytest.param({"prompt": [5] * 60_000, "max_tokens": 1000}, "prefill_tokens", id="during prefill"),
    pytest.param({"n": 5}, "decode_tokens", id="several choices")])
def test_leaving(live, idle, eventually, body, counted, stream):
    made = live(max_batch=2)
    with asking(made, stream=stream, **body):
        eventually(lambda: getattr(made.engine.timing, counted) > 3)
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


def test_the_official_client_stops_a_stream(live, idle, eventually):
    made = live()
    with made.endless() as stream:
        name = next(iter(stream)).id
        assert trace(made)["models"][0]["stats"]["running"] == 1
        assert read(made)[0]["vllm:num_requests_running"].value == 1
    eventually(ended(made, 1))
    assert spans(trace(made), name)[-1]["reason"] == "cancelled"
    eventually(lambda: read(made)[0]["vllm:request_success_totalabort"].value == 1)
    idle(made)


def test_many_come_and_go(live, idle, eventually):
    made = live(max_batch=3)
    for number in range(12):
        with asking(made, stream=bool(number % 2)):
            eventually(lambda: made.application.guard.active)
    idle(made)
