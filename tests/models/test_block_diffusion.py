"""Block diffusion on backbones that there are: a token sees all of its block, and the blocks before."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.support.errors import UnsupportedModelError
from quantkit.testing import tiny_model

BASES = {"sdar": "qwen3", "a2d-qwen3": "qwen3", "a2d-qwen2": "qwen2", "a2d-llama": "llama"}
SIZES = {"sdar": 4, "a2d-qwen3": 32, "a2d-qwen2": 8, "a2d-llama": 16}
MASK = 299


def diffusing(folder, family, size, **keys):
    """A tiny model of a family that writes blocks."""
    if BASES[family] in ("qwen2", "llama"):  # whose heads are as wide as the hidden size says
        keys = {"num_attention_heads": 2, "num_key_value_heads": 1} | keys
    return tiny_model(folder, family, block_size=size, **keys)


def staircase(length, size):
    """Who sees whom, for transformers: 0 where a token sees another, else −inf."""
    block = torch.arange(length) // size
    return torch.where(block[None] <= block[:, None], 0.0, -torch.inf)[None, None]


@pytest.mark.parametrize("family", BASES)
@torch.inference_mode()
def test_logits_are_those_of_a_staircase_in_transformers(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="the oracle (extra: transformers)")
    size = SIZES[family]
    folder = diffusing(tmp_path / "m", family, size, dtype="float32", num_hidden_layers=3)
    plain = json.loads((folder / "config.json").read_text()) | {"model_type": BASES[family]}
    for key in ("block_size", "mask_token_id", "architectures"):
        plain.pop(key)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(plain))
    (tmp_path / "plain" / "model.safetensors").symlink_to(folder / "model.safetensors")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain",
                                                               attn_implementation="eager")
    ids = torch.randint(4, 299, (1, 3 * size + 64), generator=torch.Generator().manual_seed(1))
    expected = oracle(ids, attention_mask=staircase(ids.shape[1], size)).logits
    loaded = load(str(folder))
    assert isinstance(loaded.model, CpuModel) and loaded.config.diffusion.block_size == size
    bound = 1e-4 * expected.abs().max()
    assert (loaded.model._model(ids) - expected).abs().max() < bound  # torch's operators, without a cache
    for kv, share in (("none", 1e-4), ("int8", 0.03), ("int4", 0.3)):
        most = share * expected.abs().max()
        cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
        numbers = [cache.add(), cache.add()]
        parts = []
        for part in ids.expand(2, -1).split([2 * size, size, ids.shape[1] - 3 * size], 1):
            parts.append(loaded.model(part, cache=Batch(cache, numbers)).float())
        logits = torch.cat(parts, 1)
        assert torch.equal(logits[0], logits[1]) and (logits[:1] - expected).abs().max() < most
        by_operation = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
        number = by_operation.add()
        single = loaded.model._model(ids, cache=Batch(by_operation, [number]))
        assert (single - expected).abs().max() < most


@pytest.mark.parametrize("family", ["sdar", "a2d-qwen3"])
@torch.inference_mode()
def test_a_window_is_the_same_in_the_kernel_and_in_torch(tmp_path, family):
    """It reaches back from a token itself, not from its block's end."""
    loaded = load(str(diffusing(tmp_path / "m", family, SIZES[family], dtype="float32")))
    ids = torch.randint(4, 299, (1, 128), generator=torch.Generator().manual_seed(1))
    results = []
    for model in (loaded.model, loaded.model._model):
        cache = KVCache(loaded.config, parse_kv("window(40, sinks=2)"), loaded.dtype)
        number = cache.add()
        results.append(torch.cat([model(part, cache=Batch(cache, [number])) for part in ids.split(64, 1)], 1))
    plain = loaded.model._model(ids)
    assert (results[0] - results[1]).abs().max() < 1e-4 * plain.abs().max()
    assert (results[0] - plain).abs().max() > 0.1 * plain.abs().max()


def test_a_block_may_be_written_again(tmp_path):
    """A canvas is taken back as often as it is denoised, and leaves no trace."""
    loaded = load(str(diffusing(tmp_path / "m", "sdar", 4, dtype="float32")))
    ids = torch.randint(4, 299, (1, 16), generator=torch.Generator().manual_seed(1)).tolist()[0]
    for kv in ("none", "int4"):
        cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
        number = cache.add()
        loaded.model.forward([ids[:8]], Batch(cache, [number]), [0])
        for canvas in ([MASK] * 4, [ids[8], MASK, MASK, ids[11]]):
            batch = Batch(cache, [number], "decode", tentative=[0])
            loaded.model.forward([canvas], batch, [4])
            batch.accept(0, 0)
        batch = Batch(cache, [number], "decode", tentative=[0])
        logits = loaded.model.forward([ids[8:16]], batch, [4])
        fresh = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
        single = fresh.add()
        loaded.model.forward([ids[:8]], Batch(fresh, [single]), [0])
        again = loaded.model.forward([ids[8:16]], Batch(fresh, [single], "decode"), [4])
        assert torch.equal(logits, again)


@pytest.mark.parametrize(("change", "words"), [
    ({"block_size": None}, "block_size"), ({"mask_token_id": None}, "mask_token_id"),
    ({"use_sliding_window": True}, "use_sliding_window"), ({"block_size": 0}, "block_size"),
    ({"block_size": 48}, "divide 64"), ({"mask_token_id": 300}, "vocabulary"),
    ({"noise_schedule": 1}, "noise_schedule")])
def test_configs_are_read_strictly(tmp_path, change, words):
    folder = diffusing(tmp_path / "m", "a2d-qwen3", 32)
    config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(UnsupportedModelError, match=words):
        parse_config(config)
