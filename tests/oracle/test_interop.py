"""Checkpoints as transformers reads them: loaded unmodified, the same weights and the same logits."""

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.plugins import registry
from quantkit.quantize import quantize
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

transformers = pytest.importorskip("transformers", reason="the oracle: pip install 'quantkit[oracle]'")

pytestmark = pytest.mark.oracle
PACKED = ["int8", "int4", "int4-rtn"]
NF4 = ["nf4", "nf4-nested"]
ASYMMETRIC = ["int4-asym", "int3"]
FAMILIES = {"llama": {}, "qwen2": {"tie_word_embeddings": False}}
CALIBRATION = "calibration: {samples: 4, length: 64}\n"


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / request.param
    return tiny_model(folder, request.param, dtype="float32", **FAMILIES[request.param])


def checkpoint(source, tmp_path, recipe):
    """``source`` by a shipped recipe, calibrated on little text."""
    out, file = tmp_path / "out", tmp_path / "recipe.yaml"
    file.write_text(f"name: test\ndescription: a shipped recipe on little text\nextends: {recipe}\n"
                    + (CALIBRATION if recipe in ("int4", "int4-asym", "int3") else ""))
    quantize(str(source), str(file), out)
    return out


def theirs(out, **settings):
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **settings)
    return model.eval()


@torch.inference_mode()
def assert_same_logits(out, model, tolerance):
    """Relative to the largest logit."""
    ids = torch.arange(5, 69)[None]
    ours = load(str(out)).model(ids)
    other = model(ids).logits
    assert ours.dtype == torch.float32
    assert float((ours - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("recipe", PACKED)
def test_pack_quantized_loads_unmodified(source, tmp_path, recipe):
    pytest.importorskip("compressed_tensors", reason="the oracle: pip install 'quantkit[oracle]'")
    out = checkpoint(source, tmp_path, recipe)
    assert_same_logits(out, theirs(out), 1e-4)


@pytest.mark.parametrize("recipe", ASYMMETRIC)
def test_asymmetric_loads_dequantized(source, tmp_path, recipe):
    pytest.importorskip("compressed_tensors", reason="the oracle: pip install 'quantkit[oracle]'")
    out = checkpoint(source, tmp_path, recipe)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    assert_same_logits(out, theirs(out, quantization_config=config), 1e-4)


@pytest.mark.parametrize("recipe", NF4)
def test_nf4_loads_unmodified_with_the_same_weights(source, tmp_path, recipe):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the oracle: pip install 'quantkit[oracle]'")
    pytest.importorskip("accelerate", reason="transformers needs it to load bitsandbytes checkpoints")
    out = checkpoint(source, tmp_path, recipe)
    model = theirs(out)
    form = registry("formats").get("bnb-nf4")
    seen = 0
    with Checkpoint.open(out) as ours:
        for name, module in model.named_modules():
            if (packed := ours.quantized(name)) is None:
                continue
            plain = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(plain.float(), form.dequantize(packed)), name
            seen += 1
    assert seen == 14
    # they compute in bfloat16 here, as the checkpoint says: eight bits of mantissa
    assert_same_logits(out, model, 0.05)


def test_real_nf4_weights_are_those_of_bitsandbytes(smollm2):
    functional = pytest.importorskip("bitsandbytes.functional",
                                     reason="the oracle: pip install 'quantkit[oracle]'")
    from quantkit.sources.base import open_source
    from quantkit.spec import Granularity, QuantSpec

    method, form = registry("methods").get("nf4"), registry("formats").get("bnb-nf4")
    spec = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64),
                     scale_dtype="float32")
    source = open_source(smollm2)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        weight = source.tensor(name).float()
        packed = form.pack(method.run(weight, None, spec, method.options()), torch.float32)
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        assert torch.equal(packed.tensors["weight"].reshape(-1), codes.reshape(-1))
        assert torch.equal(form.dequantize(packed), functional.dequantize_4bit(codes, state))
    source.close()
