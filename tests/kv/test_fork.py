"""A fork holds what its origin did, and neither sees what the other does afterwards."""

import pytest
import torch

from quantkit.kv.cache import KVCache
from quantkit.kvspec import parse_kv
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

SETTINGS = ["none", "int8", "int4", "window(20, sinks=3)+int8", "snapkv(0.5, window=8)",
            "tova(30, interval=7)"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("fork") / "m", head_dim=32)), dtype="float32")


def feed(model, cache, row, ids, phase):
    with torch.inference_mode():
        batch = cache.batch([row], phase)
        return model.model(ids[None], batch.next_positions(len(ids)), batch)[0]


@pytest.mark.parametrize("kv", SETTINGS)
def test_both_go_on_as_if_alone(model, kv):
    random = torch.Generator().manual_seed(3)
    prompt, left, right = (torch.randint(4, 300, (n,), generator=random) for n in (130, 16, 16))
    cache = KVCache(model.config, parse_kv(kv), torch.float32)
    row = cache.add()
    feed(model, cache, row, prompt, "prefill_end")
    other = cache.fork(row)
    assert (cache.seen(other), cache.held(other)) == (130, cache.held(row))
    got = [[feed(model, cache, where, ids[i:i + 1], "decode") for i in range(16)]
           for where, ids in ((row, left), (other, right))]
    for ids, logits in zip((left, right), got):
        alone = KVCache(model.config, parse_kv(kv), torch.float32)
        own = alone.add()
        feed(model, alone, own, prompt, "prefill_end")
        for i, expected in enumerate(logits):
            assert torch.equal(feed(model, alone, own, ids[i:i + 1], "decode"), expected)


def test_its_pages_are_its_own(model):
    cache = KVCache(model.config, parse_kv("int8"), torch.float32)
    row = cache.add()
    feed(model, cache, row, torch.arange(4, 104), "prefill_end")
    before = cache.used_bytes
    other = cache.fork(row)
    assert cache.used_bytes == 2 * before
    cache.free([row])
    assert cache.used_bytes == before and cache.seen(other) == 100
    cache.free([other])
    assert cache.used_bytes == 0
    with pytest.raises(KeyError):
        cache.fork(row)
