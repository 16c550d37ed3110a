"""Models with experts through our own kernels give what torch's operators give, in any company."""

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.ops import gpu
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.quantization.run import quantize
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import experts
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import load
from quantkit.runtime.memory import scratch
from quantkit.runtime.memory import weights as weight_memory
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from tests.runtime.cpu.test_experts import MIXED

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "dtype": "float32"}


@pytest.fixture
def simulated(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels run on it instead")
    return lambda: monkeypatch.setattr(gpu, "SIMULATE", True)


@torch.inference_mode()
def logits(folder, kv="none"):
    """Of a prompt, then of a few tokens one by one."""
    loaded = load(str(folder), dtype="float32", device="cpu")
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype, loaded.model.device)
    ids = torch.randint(4, 300, (1, 43), generator=torch.Generator().manual_seed(0))
    row, parts = cache.add(), []
    for start, end, phase in ((0, 40, "prefill_end"), *((at, at + 1, "decode") for at in range(40, 43))):
        parts.append(loaded.model(ids[:, start:end], cache=Batch(cache, [row], phase)).clone())
    return torch.cat(parts, 1), loaded


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["none", "int4-rtn", "int8", "nf4", "nvfp4-datafree",
                                    "mxfp4-datafree", "w8a8", "fp8", "fp8-block"])
def test_every_kind_of_weight(tmp_path, simulated, family, recipe):
    """Of sizes that fill no tile."""
    size = "moe_intermediate_size" if family.startswith("qwen") else "intermediate_size"
    folder = tiny_model(tmp_path / "m", family, **SMALL, **{size: 192})
    if recipe != "none":
        quantize(str(folder), recipe, tmp_path / "out")
        folder = tmp_path / "out"
    plain, before = logits(folder)
    simulated()
    ours, loaded = logits(folder)
    assert isinstance(loaded.model, GpuModel) and not isinstance(before.model, GpuModel)
    assert loaded.fallback_reason is None
    # a level of an activation may be the other of two neighbors, and a token may get another expert then
    allowed = 0.05 if recipe in ("w8a8", "fp8", "fp8-block") else 1e-4
    assert plain.std() > 0.1 and (ours - plain).abs().max() < allowed * plain.abs().max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["int8", "window(20, sinks=2)+int4", "h2o(40)", "snapkv(0.5, window=4)"])
def test_scores_of_no_key_count_for_every_cache(tmp_path, simulated, kv):
    folder = tiny_model(tmp_path / "m", "gpt_oss", **SMALL)
    plain, _ = logits(folder, kv)
    simulated()
    ours, loaded = logits(folder, kv)
    assert isinstance(loaded.model, GpuModel)
    assert (ours - plain).abs().max() < 2e-4 * plain.abs().max()


def test_tokens_are_the_same_alone_and_in_a_batch(tmp_path, simulated):
    folder = tiny_model(tmp_path / "m", "qwen3_moe", **SMALL)
    simulated()
    loaded = load(str(folder), dtype="float16", device="cpu")
    prompts = [list(range(4, 4 + count)) for count in (3, 40, 17)]

    def answers(batch):
        engine = Engine(loaded, max_batch=batch)
        submitted = [engine.submit(prompt, Sampling(max_tokens=4, ignore_eos=True, temperature=0.8, seed=at))
                     for at, prompt in enumerate(prompts)]
        while engine.step():
            pass
        return [request.result.token_ids for request in submitted]

    assert answers(3) == answers(1)


@pytest.mark.parametrize(("recipe", "reason"), [("mxfp4-a4", "rounded to 4 bits"), ("mixed", "alike")])
def test_experts_that_no_product_takes(tmp_path, simulated, recipe, reason):
    folder = tiny_model(tmp_path / "m", "mixtral", **SMALL)
    if recipe == "mixed":
        recipe = str(tmp_path / "mixed.yaml")
        (tmp_path / "mixed.yaml").write_text(MIXED)
    quantize(str(folder), recipe, tmp_path / "out")
    before = load(str(tmp_path / "out"), dtype="float32", device="cpu")
    quantized = {name: linear.weight.quantized for name, linear in before.model.linears().items()
                 if isinstance(linear.weight, QuantizedWeight)}
    assert reason in experts.reason_against(before.config, quantized)
    simulated()
    assert not isinstance(load(str(tmp_path / "out"), dtype="float32", device="cpu").model, GpuModel)


def test_their_memory_is_known_before(tmp_path, simulated):
    folder = tiny_model(tmp_path / "m", "mixtral", **SMALL, intermediate_size=256, hidden_size=128)
    simulated()
    model = load(str(folder), dtype="float16", device="cpu").model
    counted = weight_memory.gpu_weight_bytes(model.config, torch.float16, {}, torch.device("cpu"))
    layer = model._program._layers[0]
    assert layer.experts.step_bytes < layer.experts.nbytes
    assert model.weight_bytes <= counted < 1.1 * model.weight_bytes  # q, k and v share tiles
    least = model.config.experts.count * 2 * 256 * 128
    assert scratch.packing_bytes(model.config) >= scratch.PACKING * least
    assert model._program.prompts.nbytes == scratch.dequantized_bytes(model.config, torch.float16)
