"""An engine whose KV cache has a fixed size: requests wait for room, and what never fits is refused."""

from __future__ import annotations

import pytest

from quantkit.kv.spec import parse_kv
from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError

pytestmark = pytest.mark.usefixtures("short_chunks")
LONG = Sampling(max_tokens=30, ignore_eos=True)


def tokens(engine, submit, sampling=LONG):
    submitted = [submit(engine, 230, sampling, seed)[0] for seed in range(3)]
    most = 0
    while engine.step():
        most = max(most, engine.stats()["running"])
    return [request.result.token_ids for request in submitted], most


@pytest.mark.parametrize("kv", ["none", "window(64)+int8"])
def test_requests_wait_for_room_and_give_the_same_tokens(small, submit, kv):
    free = Engine(small, kv=parse_kv(kv))
    whole, together = tokens(free, submit)
    one = Engine(small, kv=parse_kv(kv), max_batch=1, memory=10**12)
    size = one.cache.allocated_bytes if kv != "none" else 640 * one.cache.bytes_per_token
    tight = Engine(small, kv=parse_kv(kv), max_batch=3 if kv == "none" else 1, memory=size)
    before, moves = tight.cache.allocated_bytes, tight.cache.move_counter.count
    found, most = tokens(tight, submit)
    assert found == whole and together == 3 and most == (2 if kv == "none" else 1)
    assert tight.cache.allocated_bytes == before <= size and tight.cache.move_counter.count == moves
    assert tight.cache.used_bytes == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["window(70)+int4", "snapkv(0.5, window=16)+int4", "h2o(96, interval=8)",
                                "h2o(96, interval=8)+int4", "kvzip(0.5)+rotation(4)", "adakv(64)+int2"])
def test_what_a_policy_does_moves_nothing(small, submit, kv):
    free, longer = Engine(small, kv=parse_kv(kv)), Sampling(max_tokens=80, ignore_eos=True)
    whole, together = tokens(free, submit, longer)
    least = 1 << 16
    while True:  # the least memory that will do
        try:
            engine = Engine(small, kv=parse_kv(kv), max_batch=3, memory=least)
            engine.reservation.check(310)
            break
        except UsageError:
            least += least // 4
    moves = engine.cache.move_counter.count
    found, most = tokens(engine, submit, longer)
    assert found == whole and together == 3 >= most
    assert engine.cache.move_counter.count == moves and engine.cache.used_bytes == 0


def test_what_never_fits_is_refused_when_it_is_submitted(small, submit):
    engine = Engine(small, max_batch=1, memory=256 * Engine(small).cache.bytes_per_token)
    with pytest.raises(UsageError, match="260 tokens don't fit") as caught:
        submit(engine, 230, LONG)
    assert "256 tokens" in caught.value.why and not engine.step()
    request, ends = submit(engine, 200, LONG)
    while engine.step():
        pass
    assert ends == ["length"] and request.done


def test_those_that_end_early_give_their_room_back(small, submit):
    engine = Engine(small, max_batch=4, memory=256 * Engine(small).cache.bytes_per_token)
    first, ends = submit(engine, 150, LONG)
    second, _ = submit(engine, 150, LONG)
    engine.step()
    assert engine.stats()["running"] == 1 and engine.stats()["waiting"] == 1
    first.cancel()
    engine.step()
    assert ends == ["cancelled"] and engine.stats()["waiting"] == 0 and not second.done
    engine.close()
