"""The model calls of serving: cut anywhere, they give what one call gives."""


import pytest
import torch

from quantkit.evaluation.quality.feed import TeacherForcedModel, finite, force, likeliest, prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv, split_settings
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError
from quantkit.testing import tiny_model


@pytest.mark.parametrize("kv", ["none", "int8", "window(24, sinks=3)", "tova(30, interval=7)"])
def test_tokens_that_are_forced_in_parts_are_read_like_one_by_one(tiny, kv):
    loaded = load(str(tiny), dtype="float32")
    ids = torch.randint(4, 300, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    with torch.inference_mode():
        for parts in ([60], [13, 1, 46], [1] * 60):
            cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
            row = cache.add()
            rows = []
            done = 0
            prefill(loaded, cache, row, ids[:40])
            for count in parts:
                rows.append(force(loaded, cache, row, ids[40 + done:40 + done + count], done))
                done += count
            found.append((torch.cat(rows), cache.slots(row)))
    for rows, held in found[1:]:
        assert (rows - found[0][0]).abs().max() < 1e-4 and held == found[0][1]


def test_a_prompt_in_two_parts_is_one(loaded):
    ids = torch.randint(4, 300, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        spec = parse_kv("snapkv(0.5, window=8)")
        whole, cut = (KVCache(loaded.config, spec, loaded.dtype) for _ in range(2))
        one, other = whole.add(), cut.add()
        logits = prefill(loaded, whole, one, ids)
        prefill(loaded, cut, other, ids[:50], ends=False)
        assert cut.slots(other) == [(50, 50)] * loaded.config.num_layers, "the prompt isn't over"
        assert (prefill(loaded, cut, other, ids[50:]) - logits).abs().max() < 1e-4
        assert cut.slots(other) == whole.slots(one) == [(45, 45)] * loaded.config.num_layers


def test_what_is_not_finite_is_no_answer(loaded):
    good = torch.tensor([0.0, 3.0, -torch.inf])
    assert likeliest(loaded, good) == 1 and finite(loaded, good) is good
    for bad in (torch.nan, torch.inf):
        with pytest.raises(QuantkitError, match="not finite"):
            likeliest(loaded, torch.tensor([0.0, bad]))


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
    got = exact.model.logits(forced.hidden(window))
    cache = KVCache(exact.config, parse_kv(kv), exact.dtype)
    row, alone = cache.add(), []
    batch = Batch(cache, [row], "prefill_end")
    exact.model(window[None, :60], batch.next_positions(60), batch)
    for token in window[60:]:
        batch = Batch(cache, [row], "decode")
        alone.append(exact.model(token[None, None], batch.next_positions(), batch)[0, 0])
    assert (got - torch.stack(alone)).abs().max() < 1e-4
    assert forced.kv_bytes >= cache.used_bytes > 0 and forced.kv_bytes_per_token == cache.bytes_per_token


def test_lists_of_settings():
    assert split_settings("none, int8,window(512, sinks=4)+int4") == [
        "none", "int8", "window(512, sinks=4)+int4"]
