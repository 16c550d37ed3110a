"""The cache's bytes: those of what is stored, constant under a window, fewer after an eviction."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.page_pool import PAGE

CODECS = ("none", "bf16", "int8", "fp8")


@pytest.mark.parametrize("codec", CODECS)
def test_a_window_takes_the_same_memory_however_long(feeder, codec):
    one = feeder(f"window(100, sinks=4)+{codec}")
    number, sizes = one.cache.add(), []
    for _ in range(4):
        one.feed([number], [500])
        sizes.append(one.cache.allocated_bytes)
    one.feed([number], [10], "prefill_end")
    for _ in range(300):
        one.feed([number], [1], "decode")
        sizes.append(one.cache.allocated_bytes)
    assert one.cache.seen(number) == 2310 and set(one.cache.slots(number)) == {(103 + 300 % 64,) * 2}
    pages = {size / (one.layers * one.kv_heads * one.cache.layers[0].store.pages.page_bytes)
             for size in sizes}
    assert pages <= {2, 3} and len(set(sizes[:4])) == 1
    assert max(sizes[-128:-64]) == max(sizes[-64:])


@pytest.mark.parametrize("codec", CODECS)
def test_what_snapkv_drops_is_given_back(feeder, codec):
    one = feeder(f"snapkv(0.25)+{codec}")
    number = one.cache.add()
    one.feed([number], [1000])
    before = one.cache.allocated_bytes - one.cache.sequence(number).tracked_bytes
    one.feed([number], [24], "prefill_end")
    assert set(one.cache.slots(number)) == {(256, 256)}
    assert one.cache.allocated_bytes == before // 4 == one.cache.used_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("codec", "of_one"), [("none", None), ("bf16", 32 * 2), ("int8", 32 + 2),
                                               ("fp8", 32 + 2)])
def test_bytes_per_token_are_what_is_stored(feeder, codec, of_one, dtype):
    one = feeder(codec, dtype=dtype)
    of_one = of_one or 32 * dtype.itemsize
    assert one.cache.bytes_per_token == one.layers * one.kv_heads * 2 * of_one
    number = one.cache.add()
    done = one.feed([number], [PAGE])
    assert one.cache.allocated_bytes == PAGE * one.cache.bytes_per_token
    assert all(out.dtype == dtype and torch.isfinite(out).all() for *_, out in done)
    one.feed([number], [1], "decode")
    one.feed([number], [1], "decode")
