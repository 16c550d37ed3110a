"""A whole model through our own kernels gives what torch's operators give."""

import pytest
import torch

from quantkit.evaluate.worker import kernels
from quantkit.kv.cache import KVCache
from quantkit.kvspec import parse_kv
from quantkit.ops import gpu
from quantkit.quantize import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

PROMPT, STEPS = 66, 3


@pytest.fixture
def simulated(monkeypatch):
    """Switches the kernels on, in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels run on it instead")
    return lambda: monkeypatch.setattr(gpu, "SIMULATE", True)


@pytest.fixture
def folder(tmp_path):
    # a layer and a head each: the interpreter takes milliseconds for every program of a grid
    return tiny_model(tmp_path / "m", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                      head_dim=32, dtype="float32")


def logits(folder, kv, device="cpu", dtype="float32"):
    model = load(str(folder), dtype=dtype, device=device)
    cache = KVCache(model.config, parse_kv(kv), model.dtype, model.model.device)
    ids = torch.randint(4, 300, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(0)).to(device)
    row, found = cache.add(), []
    batch = cache.batch([row], "prefill_end")
    found.append(model.model(ids[:, :PROMPT], batch.next_positions(PROMPT), batch))
    for at in range(PROMPT, PROMPT + STEPS):
        batch = cache.batch([row], "decode")
        found.append(model.model(ids[:, at:at + 1], batch.next_positions(), batch))
    return torch.cat(found, 1), model


@pytest.mark.parametrize("kv", ["none", "int8", "window(16, sinks=2)+int8", "snapkv(0.5, window=4)",
                                "int4"])
@torch.inference_mode()
def test_every_way_to_keep_the_cache(folder, simulated, kv):
    plain, _ = logits(folder, kv)
    simulated()
    ours, _ = logits(folder, kv)
    assert plain.std() > 0.1 and (ours - plain).abs().max() < 5e-5


@pytest.mark.parametrize(("recipe", "kernel"), [("int8", "triton-w8a16"), ("int4-rtn", "triton-w4a16"),
                                                ("nf4", "triton-nf4")])
@torch.inference_mode()
def test_every_kind_of_weight(folder, simulated, tmp_path, recipe, kernel):
    quantize(str(folder), recipe, tmp_path / "out")
    plain, _ = logits(tmp_path / "out", "none")
    simulated()
    ours, model = logits(tmp_path / "out", "none")
    assert all(kernel in names for names in kernels(model).values())
    assert (ours - plain).abs().max() < 5e-4 * plain.abs().max()


def test_without_a_gpu_they_decline(folder):
    model = load(str(folder), dtype="float32", device="cpu")
    assert gpu.norm_declines("cpu", model.dtype, 64) == "runs on cuda, not cpu"
    assert [one.kernel for one in gpu.choices("cpu", model.dtype, 64, 32, 2)] == ["torch"] * 4


@pytest.mark.parametrize(("change", "words"), [
    ({"dtype": torch.float64}, "float64"), ({"dtype": torch.float32}, "16-bit"),
    ({"dim": 30}, "4 divides"), ({"dim": 512}, "256"),
    ({"group": 32}, "16 query heads"), ({"codec": "int4"}, "not int4"),
    ({"pages": torch.float16}, "float16")])
def test_what_the_cache_kernels_decline_on_a_gpu(change, words):
    query = {"device": "cuda", "dtype": torch.bfloat16, "dim": 128, "group": 4, "codec": "int8",
             "pages": torch.int8}
    assert gpu.kv_declines(**query) is None
    assert words in gpu.kv_declines(**query | change)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "nf4"])
@pytest.mark.parametrize("kv", ["none", "int8", "window(16, sinks=2)+int8", "snapkv(0.5, window=4)"])
@torch.inference_mode()
def test_on_a_gpu(folder, monkeypatch, tmp_path, recipe, kv):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    quantize(str(folder), recipe, tmp_path / "out")
    ours, model = logits(tmp_path / "out", kv, "cuda", "bfloat16")
    assert all("triton" in name for names in kernels(model).values() for name in names)
    monkeypatch.setattr(gpu, "unavailable", lambda *query: "switched off")
    plain, _ = logits(tmp_path / "out", kv, "cuda", "bfloat16")
    assert (ours - plain).abs().max() < 0.05 * plain.abs().max()
