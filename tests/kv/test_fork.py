"""A fork holds what its origin did, and neither sees what the other does afterwards."""

import re

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.reread import finish_prompt
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

LARGE = re.compile(r"^(\w+)\([0-9.]+")
SETTINGS = ["none", "int8", "int4", "window(20, sinks=3)+int8", "snapkv(0.5, window=8)",
            "tova(30, interval=7)"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("fork") / "m", head_dim=32)), dtype="float32")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    one = load(str(tiny_model(tmp_path_factory.mktemp("served") / "m", head_dim=32)))
    assert one.fallback_reason is None
    return one


def feed(model, cache, row, ids, phase, before=()):
    """``before``: tokens of the prompt that were fed before these."""
    ends = phase == "prefill_end"
    with torch.inference_mode():
        batch = Batch(cache, [row], phase, defers=ends)
        logits = model.model(ids[None], batch.next_positions(len(ids)), batch)[0]
        for _ in finish_prompt(model.model, batch, [*map(int, before), *ids.tolist()]) if ends else ():
            pass
    return logits


@pytest.mark.parametrize("kv", SETTINGS)
def test_both_go_on_as_if_alone(model, kv):
    random = torch.Generator().manual_seed(3)
    prompt, left, right = (torch.randint(4, 300, (n,), generator=random) for n in (130, 16, 16))
    cache = KVCache(model.config, parse_kv(kv), torch.float32)
    row = cache.add()
    feed(model, cache, row, prompt, "prefill_end")
    other = cache.fork(row)
    assert (cache.seen(other), cache.slots(other)) == (130, cache.slots(row))
    got = [[feed(model, cache, where, ids[i:i + 1], "decode") for i in range(16)]
           for where, ids in ((row, left), (other, right))]
    for ids, logits in zip((left, right), got):
        alone = KVCache(model.config, parse_kv(kv), torch.float32)
        own = alone.add()
        feed(model, alone, own, prompt, "prefill_end")
        for i, expected in enumerate(logits):
            assert torch.equal(feed(model, alone, own, ids[i:i + 1], "decode"), expected)


def held(cache):
    """Bytes of pages in use."""
    return sum(pages.used * pages.page_bytes for pages in cache.pools)


@pytest.mark.parametrize("kv", ["int8", "int4", "rotation(3)/int8", "snapkv(90, window=8)+int4"])
def test_pages_are_shared_until_one_writes_to_them(model, kv):
    cache = KVCache(model.config, parse_kv(kv), torch.float32)
    row = cache.add()
    feed(model, cache, row, torch.arange(4, 304) % 256, "prefill_end")
    before = held(cache)
    other, copied = cache.fork(row), cache.fork(row, shared=False)
    assert held(cache) == 2 * before, "one of both is a copy"
    cache.free([copied])
    assert held(cache) == before
    last = sum(store.all[-1].page_bytes * cache.heads for store in [layer.store for layer in cache.layers])
    feed(model, cache, row, torch.tensor([5]), "decode")
    assert held(cache) == before + last, "only the page that was written to is another"
    feed(model, cache, other, torch.arange(70), "prefill_end")
    cache.free([row])
    alone = KVCache(model.config, parse_kv(kv), torch.float32)
    own = alone.add()
    feed(model, alone, own, torch.arange(4, 304) % 256, "prefill_end")
    feed(model, alone, own, torch.arange(70), "prefill_end")
    assert held(cache) == held(alone) and cache.slots(other) == alone.slots(own)
    cache.free([other])
    assert cache.allocated_bytes == 0
    with pytest.raises(KeyError):
        cache.fork(row)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", [*SETTINGS, "int4", "rotation(2)", "window(70)+int4"])
def test_any_number_of_forks_in_any_order(model, served, kv, dtype):
    """Sequences fork, go on and end; each reads what it would have if it had been fed alone. In bfloat16 by
    the kernels."""
    random = torch.Generator().manual_seed(7)
    model = model if dtype == "float32" else served
    cache, histories = KVCache(model.config, parse_kv(kv), model.dtype), {}

    def draw(most):
        return int(torch.randint(most, (1,), generator=random))

    def alone(history):
        one = KVCache(model.config, parse_kv(kv), model.dtype)
        own = one.add()
        return [feed(model, one, own, ids, phase) for ids, phase in history][-1]

    for _ in range(40):
        what = draw(6)
        if not histories or (what == 0 and len(histories) < 5):
            histories[cache.add()] = []
        row = list(histories)[draw(len(histories))]
        if what == 1 and len(histories) > 2:
            cache.free([row])
            del histories[row]
        elif what == 2 and len(histories) < 5:
            histories[cache.fork(row)] = list(histories[row])
        else:
            ids = torch.randint(4, 250, (1 + draw(90),), generator=random)
            phase = "decode" if histories[row] else "prefill_end"
            got = feed(model, cache, row, ids, phase)
            histories[row].append((ids, phase))
            assert torch.equal(got, alone(histories[row]))
    cache.free(list(histories))
    assert cache.allocated_bytes == 0


@pytest.mark.parametrize("kv", [*SETTINGS, "int4", "window(70)+int4", "pyramidkv(60, window=8)", "adakv(0.5)",
                                "h2o(50, interval=20)", "expected(0.5)+rotation(3)", "kvzip(0.5)"])
def test_a_beginning_is_shared_until_a_policy_dropped_of_it(model, kv):
    """Two texts that share 140 tokens: the second reads what it would if it had been fed alone."""
    random = torch.Generator().manual_seed(11)
    first, rest, other = (torch.randint(4, 250, (n,), generator=random) for n in (140, 60, 75))
    cache = KVCache(model.config, parse_kv(kv), torch.float32)
    row = cache.add()
    feed(model, cache, row, first, "prefill")
    early = cache.fork(row)
    assert cache.reusable(row)
    feed(model, cache, row, rest, "prefill_end", first)
    rows = [early]
    if cache.policy.keeps_all:
        assert cache.reusable(row)
        rows.append(cache.fork(row))
    else:
        assert not cache.reusable(row) and not cache.reusable(cache.fork(row))
        large = KVCache(model.config, parse_kv(LARGE.sub(r"\1(500", kv)), torch.float32)
        own = large.add()
        feed(model, large, own, first, "prefill_end")
        assert large.slots(own) == [(140,) * large.heads] * 2, "nothing is dropped"
        assert not large.reusable(own)
    for start, number in zip((first, torch.cat((first, rest))), rows):
        alone = KVCache(model.config, parse_kv(kv), torch.float32)
        own = alone.add()
        feed(model, alone, own, first, "prefill")
        if len(start) > 140:
            feed(model, alone, own, rest, "prefill")
        for ids, phase in ((other, "prefill_end"), (other[:1], "decode")):
            got = feed(model, cache, number, ids, phase, start)
            assert torch.equal(got, feed(model, alone, own, ids, phase, start))
        assert cache.slots(number) == alone.slots(own)


def test_a_fork_for_which_there_is_no_memory_leaves_nothing(model, monkeypatch):
    cache = KVCache(model.config, parse_kv("int8"), torch.float32)
    row = cache.add()
    feed(model, cache, row, torch.arange(4, 304) % 256, "prefill_end")

    def fails(*given):
        raise MemoryError

    monkeypatch.setattr(cache.layers[-1].store, "fork", fails)
    with pytest.raises(MemoryError):
        cache.fork(row)
    assert cache.numbers == (row,)
    cache.free([row])
    assert held(cache) == 0
