"""A prompt that begins like another one, which is being read: it waits for that part and takes it up."""

import random

import pytest

from quantkit.kv.spec import parse_kv
from quantkit.runtime import engine as module
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import PATIENCE
from quantkit.testing import tiny_model

CHUNK = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that runs as a program."""
    return load(str(tiny_model(tmp_path_factory.mktemp("waiting") / "tiny", "qwen3",
                               max_position_embeddings=2048)))


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", CHUNK)


def text(shared, more, seed):
    """Tokens that all such texts begin with, and others behind them."""
    common, rest = random.Random(0), random.Random(seed)
    return [*(common.randrange(4, 300) for _ in range(shared)),
            *(rest.randrange(4, 300) for _ in range(more))]


def test_who_waited_for_a_state_takes_it_before_it_is_gone(model):
    """Many states of a long prompt come after the one that another prompt waited for."""
    cache = Engine(model, kv=parse_kv("int4")).cache
    state_bytes = 128 * (cache.bytes_per_token + cache.residual_bytes_per_token)
    engine = Engine(model, kv=parse_kv("int4"), max_itl=1.0, prefix_cache=4 * state_bytes)
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    long = text(128, 1200, 1)
    short = text(128, 20, 2)
    requests = [engine.submit(prompt, sampling, priority=place) for place, prompt in enumerate((long, short))]
    while engine.step():
        pass
    assert [request.result.cached_tokens for request in requests] == [0, 128]
    late = engine.submit(short, sampling)
    while engine.step():
        pass
    assert late.result.cached_tokens == 0, "by now it is"


@pytest.mark.parametrize("kv", ["none", "int4"])
def test_who_waits_for_a_long_prompt_s_beginning_goes_on_when_that_is_read(model, kv):
    engine, sampling = Engine(model, kv=parse_kv(kv), prefix_cache=None), Sampling(max_tokens=1)
    long = engine.submit(text(256, 900, 1), sampling)
    engine.step()
    short = engine.submit(text(256, 20, 2), sampling)
    engine.step()
    assert long.kv.computed_tokens == 2 * CHUNK and short.kv.computed_tokens <= CHUNK
    engine.step()
    assert short.done and short.result.cached_tokens == 256 and not long.done
    later = engine.submit(text(256, 20, 3), sampling)
    engine.step()
    assert later.done and later.result.cached_tokens == 256 and not long.done
    engine.close()


def test_who_waits_gives_its_place_to_what_it_waits_for(model):
    """Though others of its priority keep coming, and what it waits for has a lower one."""
    engine, sampling = Engine(model, prefix_cache=None, max_batch=32), Sampling(max_tokens=1)
    long = engine.submit(text(512, 900, 1), sampling, priority=1)
    engine.step()
    waits = engine.submit(text(512, 20, 2), sampling)
    for step in range(10 * PATIENCE):  # some of the others come first
        for seed in range(2):
            engine.submit(text(0, CHUNK, 10 + 2 * step + seed), sampling)
        engine.step()
    assert waits.done and waits.result.cached_tokens == 512 and long.kv.computed_tokens == 512
    while engine.step():
        pass
    assert long.done
    engine.close()


def test_a_prompt_begins_with_what_was_read_of_another_before_it_came(model):
    engine, sampling = Engine(model, prefix_cache=None), Sampling(max_tokens=1)
    long = engine.submit(text(256, 900, 1), sampling)
    for _ in range(3):
        engine.step()
    short = engine.submit(text(256, 20, 2), sampling)
    engine.step()
    assert short.done and short.result.cached_tokens == 256 and not long.done
    engine.close()
