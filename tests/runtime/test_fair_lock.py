"""Engines that share a device: they take turns, one step each."""

import itertools
import threading
import time

from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.engine import Engine, FairLock
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import LEAST


def test_two_engines_take_turns_and_give_the_same_tokens(small, prompt_of, monkeypatch):
    forward = CpuModel.forward

    def as_slow_as_a_real_one(self, *given):
        time.sleep(0.002)
        return forward(self, *given)

    monkeypatch.setattr(CpuModel, "forward", as_slow_as_a_real_one)
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    alone = Engine(small)
    whole = alone.submit(prompt_of(20), sampling)
    while alone.step():
        pass
    lock, order, ended = FairLock(), [], [threading.Event(), threading.Event()]
    engines = [Engine(small, lock=lock) for _ in range(2)]
    requests = [engine.submit(prompt_of(20), sampling, on_token=lambda info, index=index: order.append(index),
                              on_done=lambda request, index=index: ended[index].set())
                for index, engine in enumerate(engines)]
    for engine in engines:
        engine.start()
    assert all(event.wait(60) for event in ended)
    for engine in engines:
        engine.close()
    assert [request.result.token_ids for request in requests] == [whole.result.token_ids] * 2
    both = order[order.index(1 - order[0]):]
    both = both[:len(both) - both[::-1].index(1 - both[-1])]  # until one has ended
    changes = sum(one != other for one, other in itertools.pairwise(both))
    assert len(both) > 20 and changes >= 0.8 * len(both), "one engine went on while the other waited"


def test_a_prompt_is_read_in_small_chunks_beside_another_engine_s_answers(small, prompt_of):
    lock, sampling = FairLock(), Sampling(max_tokens=1)
    other = Engine(small, lock=lock)
    reads = []
    for decodes in (False, True):
        lock.decodes(other, decodes)
        engine = Engine(small, lock=lock, max_itl=1e9)
        engine.submit(prompt_of(200), sampling)
        chunks, before = [], 0
        while engine.step():
            chunks.append(engine.stats()["prompt_tokens"] - before)
            before += chunks[-1]
        reads.append(chunks)
    assert reads == [[200], [LEAST, 2 * LEAST, 4 * LEAST, 200 - 7 * LEAST]]


def test_an_engine_says_whether_its_requests_decode(small, prompt_of):
    lock, heard, waits = FairLock(), [], threading.Event()
    engine, other = (Engine(small, lock=lock) for _ in range(2))

    def listen(info):
        heard.append(lock.is_decoding_elsewhere(other))
        if len(heard) == 5:
            waits.set()

    engine.submit(prompt_of(5), Sampling(max_tokens=5, ignore_eos=True), on_token=listen)
    engine.start()
    assert waits.wait(60) and engine.drain(60)
    engine.close()
    assert heard[1:] == [True] * 4 and not lock.is_decoding_elsewhere(other)
