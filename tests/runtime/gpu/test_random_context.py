"""A cache that is filled with random numbers is read as if a text of that length had been."""

import pytest
import torch

from quantkit.evaluation.speed import decoding
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.ops import gpu
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

LENGTH = 150


@pytest.mark.parametrize("kv", [
    "none", "int8/int4",
    *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("int8", "int4", "fp8", "rotation(4)"))])
def test_a_step_after_it_reads_what_a_prompt_would_have_left(tmp_path, monkeypatch, kv):
    monkeypatch.setattr(gpu, "SIMULATE", True)
    monkeypatch.setattr(decoding, "STEP", 64)
    folder = tiny_model(tmp_path / "m", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                        head_dim=32, dtype="float32")
    model = load(str(folder)).model
    cache = KVCache(model.config, parse_kv(kv), model.dtype, model.device)
    read, filled = cache.add(LENGTH + 2), cache.add(LENGTH + 2)
    model(torch.arange(LENGTH)[None] % 50, cache=Batch(cache, [read], "prefill_end"))
    decoding.fill_at_random(cache, filled, LENGTH)
    assert cache.slots(filled) == cache.slots(read) and cache.seen(filled) == LENGTH
    assert cache.bytes_of(filled) == cache.bytes_of(read)
    assert cache.step_bytes(filled) == cache.step_bytes(read)
    logits = torch.stack([model(torch.tensor([[7]]), cache=Batch(cache, [filled], "decode"))[0, 0].clone()
                          for _ in range(2)])
    assert logits.isfinite().all() and not torch.equal(logits[0], logits[1])
