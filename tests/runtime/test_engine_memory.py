"""An engine whose KV cache has a fixed size: requests wait for room, and what never fits is refused."""

from __future__ import annotations

import pytest

from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError

pytestmark = pytest.mark.usefixtures("short_chunks")
LONG = Sampling(max_tokens=30, ignore_eos=True)


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
