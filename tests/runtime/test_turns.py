"""Engines that share a device."""

from __future__ import annotations

import itertools
import threading
import time

from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.turns import Turns


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
    turns, order, ended = Turns(), [], [threading.Event(), threading.Event()]
    engines = [Engine(small, turn=turns) for _ in range(2)]
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
