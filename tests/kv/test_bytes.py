"""A budget in bytes is what a sequence takes, whatever the codec."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.build import build_policy
from quantkit.kv.page_pool import PAGE
from quantkit.kv.spec import parse_kv
from quantkit.support.errors import UsageError

POLICIES = ("window(SIZE)", "window(SIZE, sinks=70)", "snapkv(SIZE, window=8)", "pyramidkv(SIZE, window=8)",
            "adakv(SIZE)", "expected(SIZE)", "tova(SIZE, interval=20)", "h2o(SIZE, interval=20)")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("codec", ["none", "int8", "int4", "int2(residual_length=0, sinks=0)", "rotation(3)",
                                   "int4(residual_length=100, sinks=70)"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_than_that_is_taken_and_not_much_less(feeder, policy, codec):
    size = 600_000
    kv = f"{policy.replace('SIZE', '0.6MB')}+{codec}"
    one = feeder(kv)
    number = one.cache.add()
    for phase in ("prefill", "prefill_end"):
        one.feed([number], [1500], phase)
    most = 0  # what the policy watched of the prompt is gone with the first token of the answer
    for _ in range(70 if one.cache.policy.decode_interval else 64):
        one.feed([number], [1], "decode")
        most = max(most, one.cache.used_bytes)
    page = sum(pages.page_bytes for pages in one.cache.layers[0].store.all)
    assert size - 4 * page * one.layers * one.kv_heads < most <= size


@pytest.mark.parametrize("unit", ["300000B", "300kb", "0.3MB", "292.96875KiB"])
def test_units(feeder, unit):
    assert feeder(f"snapkv({unit})").cache.policy == feeder("snapkv(0.3MB)").cache.policy


def test_twice_the_bits_half_the_tokens(feeder):
    budgets = [feeder(f"snapkv(1MB)+{codec}").cache.policy.budget for codec in ("none", "bf16")]
    assert budgets[0] * 1.9 < budgets[1] < budgets[0] * 2.1


@pytest.mark.parametrize("kv", ["snapkv(1kB)", "window(100B)+int8", "h2o(20kB)"])
def test_too_little_says_so(feeder, kv):
    with pytest.raises(UsageError, match="too small"):
        feeder(kv)


@pytest.mark.parametrize("kv", ["snapkv(12parsec)", "snapkv(0MB)", "window(many)"])
def test_what_is_no_size_is_refused_before_there_is_a_cache(kv):
    with pytest.raises(UsageError, match="can't be made"):
        build_policy(parse_kv(kv))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("codec", ["none", "int4", "int8(residual_length=64, sinks=512)",
                                   "int4(residual_length=64, sinks=512)"])
@pytest.mark.parametrize("policy", ["snapkv(SIZE, window=8)", "h2o(SIZE, interval=20)", "window(SIZE)"])
def test_windows_of_the_models_own_count_too(feeder, policy, codec):
    """One of two layers looks at 300 tokens only, and holds them and as many as wait to be given back."""
    one = feeder(f"{policy.replace('SIZE', '0.9MB')}+{codec}", model_type="gemma3_text", sliding_window=300,
                 sliding_window_pattern=2, query_pre_attn_scalar=32, hidden_activation="gelu_pytorch_tanh")
    assert one.config.sliding_windows == (300, None)
    number, most = one.cache.add(), 0
    for phase in ("prefill", "prefill_end"):
        one.feed([number], [1500], phase)
    for _ in range(300):
        one.feed([number], [1], "decode")
        most = max(most, one.cache.used_bytes if one.cache.policy.decode_interval else 0)
    assert most <= 900_000
    assert min(one.cache.slots(number)[1]) > 300


def test_too_little_says_how_much_there_is_at_least(feeder):
    with pytest.raises(UsageError) as caught:
        feeder("snapkv(1kB)")
    least = int(caught.value.why.split(" bytes")[0].split()[-1].replace(",", ""))
    assert feeder(f"snapkv({least}B)").cache.policy.budget >= 1
    with pytest.raises(UsageError):
        feeder(f"snapkv({least - 1}B)")


CODECS = ("none", "bf16", "int8", "fp8")


@pytest.mark.sampled(2)
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
