"""How many prompts are read at once, who waits, and who is forgotten."""

import asyncio
import threading

import pytest

from quantkit.runtime.core import EngineFull
from quantkit.serving.errors import ApiError
from quantkit.serving.models import ServedEngine
from quantkit.serving.reply import COMPILING, PREPARING, BoundedThreads
from quantkit.text.tokenizer import Tokenizer

from .conftest import sent

PATH = "/v1/completions"


def test_a_thread_that_cant_be_started_takes_no_place(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def run():
        threads, start = BoundedThreads(2, 5), threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                await threads.run(lambda: 5)
        monkeypatch.setattr(threading.Thread, "start", start)
        assert await asyncio.wait_for(threads.run(lambda: 5), 60) == 5

    asyncio.run(run())


def test_who_leaves_while_waiting_is_dropped_and_what_has_begun_counts_on():
    async def run():
        threads = BoundedThreads(1, 2)
        going = threading.Event()
        ran = []
        first = asyncio.ensure_future(threads.run(going.wait))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(threads.run(lambda i=i: ran.append(i))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineFull):
            await threads.run(lambda: ran.append("full"))
        first.cancel()  # its thread is at work still
        waiting[0].cancel()
        await asyncio.wait([first, waiting[0]])
        late = asyncio.ensure_future(threads.run(lambda: ran.append("late")))
        await asyncio.sleep(0.1)
        assert ran == []
        going.set()
        await asyncio.gather(waiting[1], late)
        assert ran == [1, "late"]

    asyncio.run(run())


@pytest.fixture
def held(monkeypatch):
    """Tokenizers that wait; the texts that they were given, and what lets them go on."""
    texts = []
    going = threading.Event()
    encode = Tokenizer.encode

    def wait(self, text, special=True):
        if "hold" in text:
            texts.append(text)
            assert going.wait(60)
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", wait)
    yield texts, going
    going.set()


def test_requests_that_are_read_slowly_hold_up_nobody_else_and_are_forgotten(live, held, eventually):
    texts, going = held
    made = live(max_queue=3)

    def ask(text):
        raw = made.connect()
        raw.sendall(sent(prompt=text, max_tokens=1))
        return raw

    stream = made.openai().completions.create(model="tiny", prompt=[5], max_tokens=30_000, stream=True,
                                              extra_body={"ignore_eos": True})
    # ids are read by the same threads, so this one has to come first
    next(iter(stream))
    reading = [ask(f"hold {number}") for number in range(PREPARING)]
    eventually(lambda: len(texts) == PREPARING)
    waiting = [ask(f"hold, waiting {number}") for number in range(3)]
    eventually(lambda: made.application.guard.active == 1 + PREPARING + 3)
    for _ in range(20):
        assert next(iter(stream)).choices, "others' tokens go on"
    assert made.get("/health").status_code == 200
    refused = made.post(PATH, {"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"]
    for raw in waiting:
        raw.close()
    eventually(lambda: made.application.guard.active == 1 + PREPARING)
    going.set()
    for raw in reading:
        assert raw.recv(2**16).startswith(b"HTTP/1.1 200 ")
        raw.close()
    assert made.post(PATH, {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert len(texts) == PREPARING, "the prompts of those who left were not read"
    stream.close()


def test_structures_that_compile_slowly_hold_up_no_other_prompts(live, monkeypatch, eventually):
    compiling, going = [], threading.Event()

    def compile(self, structure):
        compiling.append(structure)
        assert going.wait(60)
        raise ApiError(400, "it can't be compiled")

    monkeypatch.setattr(ServedEngine, "compile", compile)
    made, statuses = live(max_queue=1), []

    def ask():
        statuses.append(made.post(PATH, {"prompt": "a", "guided_regex": "a+", "max_tokens": 1}).status_code)

    asking = [threading.Thread(target=ask) for _ in range(COMPILING + 1)]
    for number, thread in enumerate(asking):
        thread.start()
        eventually(lambda number=number: made.application.guard.active == number + 1)
        eventually(lambda number=number: len(compiling) == min(number + 1, COMPILING))
    assert made.post(PATH, {"prompt": "a", "max_tokens": 1}).status_code == 200
    too_long = made.post(PATH, {"prompt": [5] * 70_000, "guided_regex": "a+"})
    assert too_long.json()["error"]["code"] == "context_length_exceeded", "it is told before it would wait"
    refused = made.post(PATH, {"prompt": "a", "guided_regex": "a+"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    going.set()
    for thread in asking:
        thread.join(60)
    assert statuses == [400] * (COMPILING + 1)
