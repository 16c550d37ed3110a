"""Checkpoints as others read them: transformers loads what was saved, unmodified, and computes the same.

Models of two families are quantized by each shipped layout. compressed-tensors and bitsandbytes
then dequantize the files on their own; their weights must equal ours bit for bit.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from quantkit.checkpoint.engines import check_engine
from quantkit.checkpoint.open import open_checkpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.dtypes import resolve
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.sources.open import open_source
from quantkit.testing import tiny_model

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: oracle)")

BOUND = 1e-4
"""In float32, for logits of a few units: both sides add the same numbers in another order."""
FAMILIES = {
    "llama-tied": ("llama", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
}
GPTQ, RTN = "method: gptq", "method: rtn"
INTS = {
    "int8-channel": (RTN, "{bits: 8, granularity: {strategy: channel}}"),
    "int8-g32": (RTN, "{bits: 8, granularity: {strategy: group, size: 32}}"),
    "int4-rtn-g32": (RTN, "{bits: 4, granularity: {strategy: group, size: 32}}"),
    "int4-rtn-g64": (RTN, "{bits: 4, granularity: {strategy: group, size: 64}}"),
    "int4-gptq-g64": (GPTQ, "{bits: 4, granularity: {strategy: group, size: 64}}"),
    "int3-gptq-g64": (GPTQ, "{bits: 3, granularity: {strategy: group, size: 64}}"),
    "int2-asym-g64": (GPTQ, "{bits: 2, symmetric: false, granularity: {strategy: group, size: 64}}"),
    "int4-asym-g64": (GPTQ, "{bits: 4, symmetric: false, granularity: {strategy: group, size: 64}}"),
}
EIGHT = {
    "w8a8": (RTN, "{bits: 8, granularity: {strategy: channel}, activations: token}"),
    "w8a8-gptq-tensor": (GPTQ, "{bits: 8, granularity: {strategy: tensor}, activations: token}"),
    "fp8": (RTN, "{kind: fp, bits: 8, granularity: {strategy: channel}, activations: token}"),
    "fp8-weights": (RTN, "{kind: fp, bits: 8, granularity: {strategy: channel}}"),
    "fp8-weights-gptq-tensor": (GPTQ, "{kind: fp, bits: 8, granularity: {strategy: tensor}}"),
}
MIXED = """
rules:
  - {match: lm_head, optional: true}
  - {match: "*.1.mlp.down_proj"}
  - {match: "*.self_attn.*", method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
  - {match: "*", method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
"""
MIXED_LAYOUTS = """
rules:
  - {match: lm_head, optional: true, method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
  - {match: "*.down_proj", method: rtn, spec: {kind: fp, bits: 8, granularity: {strategy: channel}}}
  - {match: "*.self_attn.*", method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
  - {match: "*.gate_proj", method: rtn,
     spec: {bits: 8, granularity: {strategy: channel}, activations: token}}
  - {match: "*", method: rtn, spec: {kind: fp, bits: 8, granularity: {strategy: channel}, activations: token}}
"""


@pytest.fixture(params=FAMILIES, ids=str, scope="module")
def models(request, tmp_path_factory):
    """The same family in both dtypes: bfloat16 is what people have, float32 is where logits are sharp."""
    family, keys = FAMILIES[request.param]
    return {dtype: tiny_model(tmp_path_factory.mktemp(dtype) / request.param, family, dtype=dtype, **keys)
            for dtype in ("bfloat16", "float32")}


@pytest.fixture(scope="module")
def make(models, tmp_path_factory):
    """``make(name, dtype)`` → the model of that dtype quantized by that layout."""

    def quantized(name: str, dtype: str):
        folder = tmp_path_factory.mktemp(name)
        recipe = folder / "recipe.yaml"
        method, spec = (INTS | EIGHT).get(name, ("", ""))
        written = {"mixed": MIXED, "mixed-layouts": MIXED_LAYOUTS}.get(name)
        recipe.write_text(written or "calibration: {windows: 4, window: 32}\nrules:\n"
                          "  - {match: lm_head, optional: true}\n"
                          f"  - {{match: '*', {method}, spec: {spec}}}\n")
        given = str(recipe) if method or written else for_transformers(name)
        return quantize(str(models[dtype]), given, folder / "out").out

    return quantized


def for_transformers(name: str) -> Recipe:
    """A shipped recipe, as ``--for transformers`` has it."""
    return load_recipe(name).model_copy(update={"engine": "transformers"})


def theirs(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, attn_implementation="eager", output_loading_info=True, **options)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], f"{key}: {info[key]}"
    return loaded.eval()


def our_weights(folder) -> dict[str, torch.Tensor]:
    """Dequantized, in the dtype of the model, by layer."""
    with Checkpoint.open(folder) as checkpoint:
        return {row.name: registry("formats").get(row.format).dequantize(packed).to(packed.dtype)
                for row in checkpoint.manifest.layers
                if (packed := checkpoint.quantized(row.name)) is not None}


def same_weights(folder, hf) -> None:
    found = dict(hf.named_modules())
    for layer, weight in our_weights(folder).items():
        assert found[layer].weight.dtype == weight.dtype
        assert torch.equal(found[layer].weight, weight), layer


def ids() -> torch.Tensor:
    return torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_agree(folder, hf, most: float = 1.0) -> None:
    """For at least the share ``most`` of the tokens, and nearly for the others."""
    ours = load(str(folder), dtype="float32").model(ids())
    expected = hf(ids()).logits.float()
    assert expected.std() > 0.5, "logits too flat to tell models apart"
    apart = (ours - expected).abs().amax(-1)
    assert (apart <= BOUND).float().mean() >= most
    assert (ours - expected).norm() <= 0.02 * expected.norm()


# -- compressed-tensors


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", INTS)
def test_compressed_tensors(make, name, dtype):
    """Decompressing at loading is asked for: the one way by which transformers takes zero points.

    A mixed recipe is not tried: transformers 5.23 then reads every layer by the first group's scheme.
    """
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = make(name, dtype)
    hf = theirs(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    same_weights(folder, hf)
    if dtype == "float32":
        logits_agree(folder, hf)


@pytest.mark.parametrize("other", [
    "symmetric: false, granularity: {strategy: group, size: 32}", "granularity: {strategy: channel}"])
def test_zero_points_among_several_schemes_load_by_no_option(tmp_path, other):
    """What ``verify --for transformers`` says of them. If this fails, it can say something better."""
    (tmp_path / "r.yaml").write_text(
        f"rules:\n  - {{match: '*down_proj', method: rtn, spec: {{bits: 8, {other}}}}}\n"
        "  - {match: '*', method: rtn, spec: {bits: 4, symmetric: false, "
        "granularity: {strategy: group, size: 32}}}\n")
    model = tiny_model(tmp_path / "model", dtype="float32")
    folder = quantize(str(model), str(tmp_path / "r.yaml"), tmp_path / "out").out
    ids = torch.arange(5, 25)[None]
    expected = load(str(folder), dtype="float32").model(ids)
    for options in ({}, {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}):
        try:
            wrong = (theirs(folder, **options)(ids).logits - expected).abs().max() > 0.1
        except RuntimeError:
            wrong = True
        assert wrong


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in INTS if "asym" not in name] + ["mixed"])
def test_compressed_tensors_without_any_option(make, name, dtype):
    """What a user types: ``from_pretrained(folder)``; decompression happens at the first forward."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = make(name, dtype)
    hf = theirs(folder)
    with torch.no_grad():
        assert hf(ids()).logits.dtype == getattr(torch, dtype)
    same_weights(folder, hf)
    if dtype == "float32":
        logits_agree(folder, hf)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["int8", "int4-rtn"])
@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe", "gemma2", "gemma3_text"])
def test_fused_projections_and_experts_load_as_they_are(tmp_path, family, recipe):
    """transformers holds all experts of a layer in one tensor, and reads our files of one Linear each."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = quantize(str(tiny_model(tmp_path / "model", family, dtype="float32")), for_transformers(recipe),
                      tmp_path / "out").out
    logits_agree(folder, theirs(folder))


@pytest.fixture
def scales_of_engines(monkeypatch):
    """int8 tokens with the scale ``max / 127``, that of vLLM's kernels and ours; compressed-tensors simulates
    ``max / 127.5``, which no kernel has. Everything else stays its own. e4m3 is left alone."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward",
                                  reason="compressed-tensors is not installed (extra: oracle)")
    theirs = forward.compute_dynamic_scales_and_zp

    def dynamic(value, args, *rest, **more):
        scale, zero = theirs(value, args, *rest, **more)
        return (value.abs().amax(-1, keepdim=True) / 127 if args.type == "int" else scale), zero

    monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", dynamic)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*EIGHT, "mixed-layouts"])
def test_eight_bits_and_activations(make, scales_of_engines, name, dtype):
    """What a user types. transformers leaves compressed-tensors to round activations in the forward pass. A
    quotient beside a half, which float32's last bit decides, may go either way, and changes what follows."""
    folder = make(name, dtype)
    hf = theirs(folder)
    with torch.no_grad():
        assert hf(ids()).logits.dtype == getattr(torch, dtype)
    same_weights(folder, hf)
    if dtype == "float32":
        logits_agree(folder, hf, most=0.5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EIGHT)
def test_eight_bits_decompressed_at_loading(make, name):
    """Activations are then left alone, so only weights can be compared."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = make(name, "bfloat16")
    hf = theirs(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    same_weights(folder, hf)


# -- bitsandbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["nf4", "nf4-nested"])
def test_bitsandbytes_reads_our_files(make, name, dtype):
    """By their own reader of files, without transformers."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    folder = make(name, dtype)
    with Checkpoint.open(folder) as checkpoint:
        for layer, weight in our_weights(folder).items():
            parts = {suffix: t.clone() for suffix, t in checkpoint.quantized(layer).tensors.items()}
            packed = parts.pop("weight")
            state = functional.QuantState.from_dict(
                {suffix.removeprefix("weight."): t for suffix, t in parts.items()}, torch.device("cpu"))
            got = functional.dequantize_4bit(packed, state)
            assert got.dtype == weight.dtype and torch.equal(got, weight), layer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["nf4", "nf4-nested"])
def test_transformers_reads_our_bitsandbytes_files(make, name, dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed: transformers wants it for this")
    folder = make(name, dtype)
    hf = theirs(folder)
    found = dict(hf.named_modules())
    for layer, weight in our_weights(folder).items():  # before any forward: that repacks on a CPU
        packed = found[layer].weight
        assert packed.dtype == torch.uint8
        assert torch.equal(functional.dequantize_4bit(packed.data, packed.quant_state), weight), layer
    if dtype == "float32":
        logits_agree(folder, hf)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_makes_the_same_weights_of_a_real_model(smollm2, nested):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    method, form = registry("methods").get("nf4"), registry("formats").get("bnb-nf4")
    source = open_source(smollm2)
    try:
        for layer in ("model.layers.0.self_attn.k_proj", "model.layers.17.mlp.down_proj"):
            weight = source.tensor(f"{layer}.weight").clone()
            spec = resolve(QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64),
                                     scale_dtype="float32", nested=nested), weight.dtype)
            codes = method.run(weight.float(), None, spec, method.options())
            packed = form.pack(codes, weight.dtype)
            theirs_packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4",
                                                            compress_statistics=nested)
            assert torch.equal(packed.tensors["weight"], theirs_packed), layer
            expected = functional.dequantize_4bit(theirs_packed, state)
            assert torch.equal(form.dequantize(packed).to(weight.dtype), expected), layer
    finally:
        source.close()


# -- embeddings and heads


OUTSIDE = """
calibration: {{windows: 4, window: 32}}
rules:
  - {{match: 're:model\\.embed_tokens|lm_head', method: {method}, spec: {outside}}}
  - {{match: '*', method: rtn, spec: {inside}}}
"""
G32 = "{bits: 4, granularity: {strategy: group, size: 32}}"
CHANNEL8 = "{bits: 8, granularity: {strategy: channel}}"


@pytest.fixture
def outside(models, tmp_path):
    """``outside(method, outside, inside)`` → a float32 model with embedding and head quantized."""
    def make(method: str, outside: str, inside: str = G32):
        path = tmp_path / "outside.yaml"
        path.write_text(OUTSIDE.format(method=method, outside=outside, inside=inside))
        return quantize(str(models["float32"]), str(path), tmp_path / "out").out

    return make


def test_transformers_dequantizes_embeddings_and_heads(outside, models):
    """Where all layers share a scheme, the embedding that is the head too as well: ``verify`` says so."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = outside("rtn", G32)
    hf = theirs(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    same_weights(folder, hf)
    if hf.config.tie_word_embeddings:
        assert hf.lm_head.weight is hf.model.embed_tokens.weight
    logits_agree(folder, hf)


def test_transformers_refuses_a_compressed_embedding(outside):
    """What ``verify --for transformers`` says; when this fails, it has learnt it, and the rule can go."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    folder = outside("rtn", G32)
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
        theirs(folder)
    with open_checkpoint(folder) as opened:
        failed = [check for check in check_engine("transformers", opened) if check.status == "failed"]
    assert [check.name for check in failed] == ["embedding"] and "dequantize=True" in failed[0].detail


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_quantized_head_alone_loads_as_it_is(models, tmp_path, method):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra: oracle)")
    path = tmp_path / "head.yaml"
    path.write_text("calibration: {windows: 4, window: 32}\nrules:\n"
                    f"  - {{match: lm_head, method: {method}, spec: {G32}}}\n"
                    f"  - {{match: '*', method: rtn, spec: {CHANNEL8}}}\n")
    folder = quantize(str(models["float32"]), str(path), tmp_path / "out").out
    hf = theirs(folder)
    with torch.no_grad():
        hf(ids())
    same_weights(folder, hf)
    logits_agree(folder, hf)


@pytest.mark.parametrize("kind", [CHANNEL8, G32], ids=["int8", "int4"])
def test_compressed_tensors_decompresses_an_embedding(outside, kind):
    """Their library on its own, without transformers: module and scheme in, the same rows out."""
    compressors = pytest.importorskip("compressed_tensors.compressors",
                                      reason="compressed-tensors is not installed (extra: oracle)")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    folder = outside("rtn", kind, CHANNEL8)
    with Checkpoint.open(folder) as checkpoint:
        packed = checkpoint.quantized("model.embed_tokens")
    size = packed.spec.granularity.size
    scheme = QuantizationScheme(targets=["Embedding"], weights=QuantizationArgs(
        num_bits=packed.spec.bits, strategy="group" if size else "channel", group_size=size))
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    table = torch.nn.Embedding.from_pretrained(compressor.decompress(dict(packed.tensors), scheme)["weight"])
    rows = registry("formats").get("pack-quantized").rows(packed, ids().flatten())
    assert torch.equal(table(ids()).flatten(0, 1), rows.to(table.weight.dtype))


def test_what_they_wrote_of_an_embedding_is_read(outside, models):
    """Our files without our manifest are any tool's: the class ``Embedding`` in a group says it."""
    folder = outside("rtn", G32)
    before = load(str(folder), dtype="float32").model(ids())
    (folder / "quantkit.json").unlink()
    with open_checkpoint(folder) as opened:
        assert opened.layers[0].name == "model.embed_tokens" and opened.layers[0].spec.bits == 4
    assert torch.equal(load(str(folder), dtype="float32").model(ids()), before)
