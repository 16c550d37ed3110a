"""Teacher forcing through a cache reads what decoding reads."""

import pytest
import torch

from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv, split_settings
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model


@pytest.fixture
def exact(tmp_path):
    with torch.inference_mode():
        yield load(str(tiny_model(tmp_path / "wide", head_dim=32)), dtype="float32")


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "window(24, sinks=3)", "window(24)+int8",
                                "snapkv(0.5, window=8)", "tova(30, interval=7)",
                                "tova(30, interval=100)+int4"])
def test_chunks_equal_one_token_at_a_time(exact, kv):
    window = torch.randint(4, 300, (150,), generator=torch.Generator().manual_seed(1))
    forced = TeacherForcedModel(exact, parse_kv(kv), 60)
    got = forced.logits(window)
    cache = KVCache(exact.config, parse_kv(kv), exact.dtype)
    row, alone = cache.add(), []
    batch = Batch(cache, [row], "prefill_end")
    exact.model(window[None, :60], batch.next_positions(60), batch)
    for token in window[60:]:
        batch = Batch(cache, [row], "decode")
        alone.append(exact.model(token[None, None], batch.next_positions(), batch)[0, 0])
    assert (got - torch.stack(alone)).abs().max() < 1e-4
    assert forced.kv_bytes >= cache.used_bytes > 0 and forced.kv_bytes_per_token == cache.bytes_per_token


def test_without_compression_it_is_the_plain_model(exact):
    window = torch.randint(4, 300, (90,), generator=torch.Generator().manual_seed(2))
    got = TeacherForcedModel(exact, parse_kv("none"), 40).logits(window)
    assert (got - exact.model(window[None])[0, 40:]).abs().max() < 1e-4


def test_lists_of_settings():
    assert split_settings("none, int8,window(512, sinks=4)+int4") == [
        "none", "int8", "window(512, sinks=4)+int4"]
