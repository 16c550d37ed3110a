"""Export: every layout to every other, the same levels and scales, or a refusal that leaves nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.engines import check_engine
from quantkit.checkpoint.manifest import Manifest
from quantkit.checkpoint.open import open_checkpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.export.layouts import InexactError, export, repack
from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, QuantkitError, SpecError, UsageError
from quantkit.testing import tiny_model

IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))
SPECS = {
    "int8": "{bits: 8, granularity: {strategy: channel}}",
    "int4": "{bits: 4, granularity: {strategy: group, size: 32}}",
    "int4-asym": "{bits: 4, symmetric: false, granularity: {strategy: group, size: 32}}",
    "int3": "{bits: 3, granularity: {strategy: group, size: 32}}",
    "int2-asym": "{bits: 2, symmetric: false, granularity: {strategy: group, size: 64}}",
}
PAIRS = [("int8", "gptq"), ("int8", "gptq-v2"), ("int8", "bnb-int8"), ("int4", "gptq"), ("int4", "gptq-v2"),
         ("int4", "awq"), ("int4-asym", "gptq"), ("int4-asym", "gptq-v2"), ("int4-asym", "awq"),
         ("int3", "gptq"), ("int2-asym", "gptq-v2"), ("int4", "mlx"), ("int3", "mlx")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """``made(name)`` → a checkpoint of the tiny model, pack-quantized unless a format is given."""
    folder, done = tmp_path_factory.mktemp("made"), {}

    def call(name: str, form: str = "pack-quantized"):
        if (name, form) not in done:
            recipe = folder / f"{name}-{form}.yaml"
            recipe.write_text("rules:\n  - {match: lm_head}\n  - {match: '*.1.mlp.down_proj'}\n"
                              f"  - {{match: '*', method: rtn, format: {form}, spec: {SPECS[name]}}}\n")
            done[name, form] = quantize(str(tiny), str(recipe), folder / f"{name}-{form}").out
        return done[name, form]

    return call


def weights(folder) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as opened:
        return {row.name: registry("formats").get(row.format).dequantize(packed)
                for row in opened.layers if (packed := opened.quantized(row.name)) is not None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_there_and_back(made, tmp_path, name, to):
    first = made(name)
    result = export(str(first), to, tmp_path / "out")
    assert result.out == tmp_path / "out" and not (tmp_path / "out.partial").exists()
    before, after = weights(first), weights(result.out)
    assert len(after) == 13 and before.keys() == after.keys()
    assert all(torch.equal(before[layer], after[layer]) for layer in before)
    assert verify(result.out).ok
    stored, original = load_file(result.out / "model.safetensors"), load_file(first / "model.safetensors")
    for layer in ("lm_head", "model.layers.1.mlp.down_proj"):
        assert torch.equal(stored[f"{layer}.weight"], original[f"{layer}.weight"])
    assert stored.keys() >= {n for n in original if "norm" in n or "bias" in n or "embed" in n}
    assert torch.equal(load(str(result.out), dtype="float32").model(IDS),
                       load(str(first), dtype="float32").model(IDS))
    again = export(str(result.out), "pack-quantized", tmp_path / "back").out
    if name != "int4" or to != "awq":  # symmetric weights come back from AWQ with zero points of 8
        back = load_file(again / "model.safetensors")
        assert back.keys() == original.keys() and all(torch.equal(back[n], original[n]) for n in back)


def test_the_manifest_says_where_it_came_from(made, tmp_path):
    first = made("int4")
    manifest = Manifest.from_bytes((first / "quantkit.json").read_bytes())
    assert b'"exported"' not in (first / "quantkit.json").read_bytes()
    out = export(str(first), "gptq", tmp_path / "out").out
    told = Manifest.from_bytes((out / "quantkit.json").read_bytes())
    assert told.source == manifest.source and told.recipe == manifest.recipe
    assert (told.exported.uri, told.exported.quant_method) == ("int4-pack-quantized", "compressed-tensors")
    assert told.exported.formats == ("pack-quantized",)
    import hashlib

    digest = hashlib.sha256((first / "quantkit.json").read_bytes()).hexdigest()
    assert told.exported.manifest_sha256 == digest
    assert {row.method for row in told.layers if row.spec} == {"rtn"}
    assert [row.error for row in told.layers] == [row.error for row in manifest.layers]
    assert json.loads((out / "quantize_config.json").read_text()) == json.loads(
        (out / "config.json").read_text())["quantization_config"]
    assert str(tmp_path) not in (out / "quantkit.json").read_text()


def test_another_tools_checkpoint_becomes_ours(made, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(made("int4", "gptq"), theirs)
    (theirs / "quantkit.json").unlink()
    out = export(str(theirs), "gptq-v2", tmp_path / "out").out
    told = Manifest.from_bytes((out / "quantkit.json").read_bytes())
    assert told.exported.manifest_sha256 is None and told.exported.quant_method == "gptq"
    assert set(told.source.files) >= {"model.safetensors", "config.json"} and told.source.uri == "theirs"
    before, after = weights(theirs), weights(out)
    assert all(torch.equal(before[layer], after[layer]) for layer in before) and verify(out).ok


@pytest.mark.parametrize(("name", "to", "said"), [
    ("int8", "awq", "holds 4 bits"), ("int4", "bnb-int8", "channel"), ("int3", "bnb-nf4", "NF4"),
    ("int2-asym", "awq", "holds 4 bits")])
def test_what_a_layout_can_not_say_is_refused_before_any_work(made, tmp_path, name, to, said):
    with pytest.raises(SpecError, match=said) as caught:
        export(str(made(name)), to, tmp_path / "out")
    assert caught.value.next and list(tmp_path.iterdir()) == []


def test_scales_that_float16_does_not_hold_are_refused_and_nothing_is_left(made, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(made("int4"), first)
    (first / "quantkit.json").unlink()
    stored = load_file(first / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    stored[name][3, 1] = 1e-7
    save_file(stored, first / "model.safetensors", {"format": "pt"})
    with pytest.raises(InexactError, match=r"layers\.1\.mlp\.up_proj has scales that float16") as caught:
        export(str(first), "gptq", tmp_path / "out")
    assert "1 of 256" in caught.value.why and "format: gptq" in caught.value.next
    assert [p.name for p in tmp_path.iterdir()] == ["first"]


def test_half_precision_scales_do_not_fit_bfloat16_layouts(made, tmp_path):
    with pytest.raises(InexactError, match="bfloat16 doesn't hold exactly"):
        export(str(made("int4", "gptq")), "pack-quantized", tmp_path / "out")


def test_zero_points_need_a_place():
    spec = QuantSpec(bits=8, symmetric=False, granularity=Granularity(strategy="channel"),
                     scale_dtype="float16")
    codes = Codes(spec, torch.randint(0, 256, (4, 8), dtype=torch.uint8), torch.ones(4, 1),
                  torch.full((4, 1), 128, dtype=torch.uint8))
    narrow = spec.model_copy(update={"symmetric": True, "scale_dtype": "float32"})
    form = registry("formats").get("bnb-int8")
    middle = registry("formats").get("gptq-v2").pack(
        Codes(spec, codes.codes.repeat(8, 8), torch.ones(32, 1), torch.full((32, 1), 128, dtype=torch.uint8)),
        torch.float16)
    assert torch.equal(form.unpack(repack("q", middle, form, narrow)).codes, codes.codes.repeat(8, 8))
    other = registry("formats").get("gptq-v2").pack(
        Codes(spec, codes.codes.repeat(8, 8), torch.ones(32, 1), torch.full((32, 1), 127, dtype=torch.uint8)),
        torch.float16)
    with pytest.raises(InexactError, match="has zero points"):
        repack("q", other, form, narrow)


def test_asymmetric_weights_do_not_become_symmetric(made, tmp_path, tiny):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rules:\n  - {match: '*', method: rtn, spec: {bits: 8, symmetric: false, "
                      "granularity: {strategy: channel}}}\n")
    out = quantize(str(tiny), str(recipe), tmp_path / "asym").out
    with pytest.raises(InexactError, match="has zero points"):
        export(str(out), "bnb-int8", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damage_gets_no_new_hash(made, tmp_path, name):
    first = tmp_path / "first"
    shutil.copytree(made("int8"), first)
    data = (first / name).read_bytes()
    at = data.rindex(b"0") if name.endswith(".json") else len(data) - 1
    (first / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    with pytest.raises(CheckpointError, match="damaged"):
        export(str(first), "gptq", tmp_path / "out")


def test_a_stopped_export_goes_on_to_the_same_bytes(made, tmp_path):
    from quantkit.support.errors import Stopped

    whole = export(str(made("int8")), "gptq", tmp_path / "whole").out

    def stop(event) -> None:
        if event.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(Stopped, match="1 of 3 units"):
        export(str(made("int8")), "gptq", tmp_path / "out", progress=stop)
    out = export(str(made("int8")), "gptq", tmp_path / "out").out
    for file in whole.iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


def test_usage(made, tiny, tmp_path):
    with pytest.raises(UsageError, match="is not quantized"):
        export(str(tiny), "gptq", tmp_path / "out")
    with pytest.raises(QuantkitError, match="'gptqq'"):
        export(str(made("int8")), "gptqq", tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        export(str(made("int8")), "gptq", tmp_path / "there")


def test_a_recipe_names_the_layout(made):
    """quantize with ``format: gptq``: scales of float16, the levels chosen for them."""
    for name, form in (("int4", "gptq"), ("int4-asym", "awq"), ("int8", "bnb-int8"), ("int3", "gptq-v2")):
        out = made(name, form)
        assert verify(out).ok
        told = Manifest.from_bytes((out / "quantkit.json").read_bytes())
        assert {(row.format, row.spec.scale_dtype) for row in told.layers if row.spec} == {
            (form, "float32" if form == "bnb-int8" else "float16")}
        assert load(str(out)).fallback_reason is None


def test_zero_points_whose_products_have_no_place_do_not_become_minima(made, tmp_path):
    """A bfloat16 scale times 7 needs more digits than bfloat16 has."""
    with pytest.raises(InexactError, match="has zero points, for which format mlx has no place") as caught:
        export(str(made("int4-asym")), "mlx", tmp_path / "out")
    assert "minimum: true" in caught.value.next and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("zero", [0, 2, 8])
def test_zero_points_become_minima_and_come_back_where_that_is_exact(zero):
    group = Granularity(strategy="group", size=32)
    spec = QuantSpec(bits=4, symmetric=False, granularity=group, scale_dtype="bfloat16")
    levels = torch.arange(128, dtype=torch.uint8).view(2, 64) % 16
    scale = torch.tensor([[0.5, 0.0078125], [1.9921875, 3.0]])
    codes = Codes(spec, levels, scale, torch.full((2, 2), zero, dtype=torch.uint8))
    plain, mlx = registry("formats").get("pack-quantized"), registry("formats").get("mlx")
    packed = plain.pack(codes, torch.bfloat16)
    moved = repack("q", packed, mlx, spec.model_copy(update={"minimum": True}))
    assert torch.equal(moved.tensors["biases"].float(), -zero * scale)
    assert torch.equal(mlx.dequantize(moved), plain.dequantize(packed))
    back = repack("q", moved, plain, spec)
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    narrow = spec.model_copy(update={"symmetric": True})
    if zero == 8:
        assert torch.equal(plain.dequantize(repack("q", moved, plain, narrow)), plain.dequantize(packed))
    else:
        with pytest.raises(InexactError, match="has zero points"):
            repack("q", moved, plain, narrow)


def test_minima_that_are_no_whole_steps_go_nowhere():
    group = Granularity(strategy="group", size=32)
    spec = QuantSpec(bits=4, symmetric=False, minimum=True, granularity=group, scale_dtype="bfloat16")
    mlx, plain = registry("formats").get("mlx"), registry("formats").get("pack-quantized")
    wide = spec.model_copy(update={"minimum": False})
    for minimum in (-0.75, 0.5, -8.0):  # half a step, above zero, more than 15 steps below
        codes = Codes(spec, torch.zeros(1, 32, dtype=torch.uint8), torch.full((1, 1), 0.5),
                      minimum=torch.full((1, 1), minimum))
        with pytest.raises(InexactError, match="has minima"):
            repack("q", mlx.pack(codes, torch.bfloat16), plain, wide)


# -- heads and embeddings


OUTSIDE = """rules:
  - {{match: 'model.embed_tokens', {embedding}}}
  - {{match: lm_head, {head}}}
  - {{match: '*', method: rtn, spec: {layers}}}
"""


def with_outside(folder, embedding: str, head: str, layers: str):
    folder.mkdir()
    source = tiny_model(folder / "model", "qwen2", tie_word_embeddings=False, vocab_size=304)
    rules = (f"method: rtn, spec: {SPECS[one]}" if one else "method: null" for one in (embedding, head))
    (folder / "recipe.yaml").write_text(OUTSIDE.format(
        **dict(zip(("embedding", "head"), rules, strict=True)), layers=SPECS[layers]))
    return quantize(str(source), str(folder / "recipe.yaml"), folder / "out").out


@pytest.mark.parametrize("to", ["gptq", "gptq-v2", "awq", "bnb-int8"])
def test_a_quantized_head_goes_to_other_layouts(tmp_path, to):
    name = "int8" if to == "bnb-int8" else "int4"
    first = with_outside(tmp_path / "first", "", name, name)
    out = export(str(first), to, tmp_path / "out").out
    before, after = weights(first), weights(out)
    assert "lm_head" in after and all(torch.equal(after[name], one) for name, one in before.items())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] in ("gptq", "awq", "bitsandbytes") and config.get("lm_head") is (
        None if to == "bnb-int8" else True)
    assert torch.equal(load(str(out)).model(IDS), load(str(first)).model(IDS))


@pytest.mark.parametrize(("to", "name"), [("gptq", "int4"), ("awq", "int4-asym"), ("bnb-int8", "int8")])
def test_an_embedding_is_decoded_for_layouts_of_linears(tmp_path, to, name):
    first = with_outside(tmp_path / "first", name, name, name)
    result = export(str(first), to, tmp_path / "out")
    assert verify(result.out).ok
    with Checkpoint.open(first) as checkpoint:
        packed = checkpoint.quantized("model.embed_tokens")
    weight = load_file(result.out / "model.safetensors")["model.embed_tokens.weight"]
    values = registry("formats").get(packed.format).dequantize(packed)
    assert weight.dtype == packed.dtype and torch.equal(weight, values.to(packed.dtype))


@pytest.mark.parametrize(("engine", "decoded"), [
    ("vllm", ()), ("transformers", ("model.embed_tokens",))])
def test_what_an_engine_reads_only_plain_is_decoded_for_it(tmp_path, engine, decoded):
    first = with_outside(tmp_path / "first", "int8", "int8", "int4")
    result = export(str(first), "pack-quantized", tmp_path / "out", engine=engine)
    assert result.decoded == decoded and verify(result.out).ok
    with Checkpoint.open(result.out) as checkpoint:
        assert not any(check.status == "failed" for check in check_engine(engine, checkpoint))


def test_bits_that_an_engine_has_not_are_stored_in_eight(tmp_path):
    (tmp_path / "recipe.yaml").write_text("""rules:
  - {match: lm_head, optional: true}
  - {match: "*.down_proj", method: rtn, spec: {bits: 6, granularity: {strategy: group, size: 32}}}
  - {match: "*", method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
""")
    model = str(tiny_model(tmp_path / "tiny"))
    first = quantize(model, str(tmp_path / "recipe.yaml"), tmp_path / "first").out
    same = export(str(first), "pack-quantized", tmp_path / "same")
    assert {row.spec.bits for row in same.rows if row.spec} == {4, 6}
    result = export(str(first), "pack-quantized", tmp_path / "out", engine="vllm")
    bits = {row.name.rpartition(".")[2]: row.spec.bits for row in result.rows if row.spec}
    assert bits.pop("down_proj") == 8 and set(bits.values()) == {4} and verify(result.out).ok
    assert torch.equal(load(str(result.out), dtype="float32").model(IDS),
                       load(str(first), dtype="float32").model(IDS))
    with Checkpoint.open(result.out) as checkpoint:
        assert not any(check.status == "failed" for check in check_engine("vllm", checkpoint))


def test_bits_that_a_layout_has_not_are_stored_in_eight_or_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text("""rules:
  - {match: lm_head, optional: true}
  - {match: "*", method: rtn, spec: {bits: 6, granularity: {strategy: group, size: 32}}}
""")
    model = str(tiny_model(tmp_path / "tiny"))
    first = quantize(model, str(tmp_path / "recipe.yaml"), tmp_path / "first").out
    result = export(str(first), "gptq", tmp_path / "out")
    assert {row.spec.bits for row in result.rows if row.spec} == {8}
    assert torch.equal(load(str(result.out), dtype="float32").model(IDS),
                       load(str(first), dtype="float32").model(IDS))
    with pytest.raises(SpecError) as caught:
        export(str(first), "awq", tmp_path / "awq")
    assert "8" not in caught.value.why.splitlines()[0]


def test_zero_points_are_left_out_where_an_engine_has_none(tmp_path):
    first = with_outside(tmp_path / "first", "", "int8", "int4-asym")
    result = export(str(first), "pack-quantized", tmp_path / "out", engine="transformers")
    kept = {row.name: row.spec.label() for row in result.rows if row.spec}
    assert kept.pop("lm_head") == "int8 channel sym" and set(kept.values()) == {"int5 g32 sym"}
    assert verify(result.out).ok
    assert torch.equal(load(str(result.out), dtype="float32").model(IDS),
                       load(str(first), dtype="float32").model(IDS))
    with Checkpoint.open(result.out) as checkpoint:
        assert not any(check.status == "failed" for check in check_engine("transformers", checkpoint))


def test_an_engine_that_refuses_the_linears_is_named(tmp_path):
    first = with_outside(tmp_path / "first", "int4", "int8", "int3")
    with pytest.raises(SpecError, match="vllm wouldn't load") as caught:
        export(str(first), "pack-quantized", tmp_path / "out", engine="vllm")
    assert "3" in caught.value.why and "--for vllm" in caught.value.next


def test_mlx_has_a_place_for_a_mix_with_a_tied_embedding(tmp_path):
    tied, group = tiny_model(tmp_path / "tied"), "{bits: 8, granularity: {strategy: group, size: 64}}"
    (tmp_path / "recipe.yaml").write_text(
        f"rules:\n  - {{match: model.embed_tokens, method: rtn, spec: {group}}}\n"
        f"  - {{match: '*', method: rtn, spec: {SPECS['int4']}}}\n")
    first = quantize(str(tied), str(tmp_path / "recipe.yaml"), tmp_path / "first").out
    out = export(str(first), "mlx", tmp_path / "out").out
    assert verify(out).ok
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32, "bits": 4, "mode": "affine",
        "model.embed_tokens": {"group_size": 64, "bits": 8, "mode": "affine"}}
    assert torch.equal(load(str(out)).model(IDS), load(str(first)).model(IDS))


def test_an_embedding_among_pack_quantized_layers_is_packed_again(tmp_path):
    first = with_outside(tmp_path / "first", "int8", "int4", "int4")
    out = export(str(first), "pack-quantized", tmp_path / "out").out
    again, before = (load_file(folder / "model.safetensors") for folder in (out, first))
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], one) for name, one in before.items())
    assert verify(out).ok


def test_an_embedding_that_is_the_head_and_unlike_the_layers_is_decoded(tmp_path):
    tied = tiny_model(tmp_path / "tied")
    (tmp_path / "recipe.yaml").write_text(
        f"rules:\n  - {{match: model.embed_tokens, method: rtn, spec: {SPECS['int8']}}}\n"
        f"  - {{match: '*', method: rtn, spec: {SPECS['int4']}}}\n")
    first = quantize(str(tied), str(tmp_path / "recipe.yaml"), tmp_path / "first").out
    result = export(str(first), "pack-quantized", tmp_path / "out")
    assert result.decoded == ("model.embed_tokens",)
    config = json.loads((result.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_rotated_inputs_are_named(tmp_path):
    source = tiny_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(
        "rules:\n  - {match: lm_head, optional: true}\n  - {match: '*', method: rtn, spec: {bits: 4, "
        "rotation: hadamard, granularity: {strategy: channel}}}\n")
    first = quantize(str(source), str(tmp_path / "recipe.yaml"), tmp_path / "first").out
    with pytest.raises(SpecError, match="no words for inputs that are rotated") as caught:
        export(str(first), "pack-quantized", tmp_path / "out")
    assert "q_proj has a rotation" in caught.value.why


@pytest.mark.parametrize("to", ["gptq", "bnb-int8"])
def test_layouts_of_weights_alone_refuse_rounded_inputs(tmp_path, to):
    source = tiny_model(tmp_path / "model")
    first = quantize(str(source), "w8a8", tmp_path / "first").out
    with pytest.raises(SpecError) as caught:
        export(str(first), to, tmp_path / "out")
    assert "is for weights alone" in caught.value.why and not (tmp_path / "out").exists()


def test_squares_go_to_deepseeks_layout_and_back(tiny, tmp_path):
    """From bfloat16 scales to float32 ones, which are rounded back without loss."""
    recipe = tmp_path / "squares.yaml"
    recipe.write_text("rules: [{match: lm_head}, {match: '*', method: rtn, spec: {kind: fp, bits: 8, "
                      "granularity: {strategy: tile, size: 48}, activations: group}}]")
    made = quantize(str(tiny), str(recipe), tmp_path / "made").out
    there = export(str(made), "fine-grained-fp8", tmp_path / "there").out
    back = export(str(there), "float-quantized", tmp_path / "back").out
    expected = load(str(made)).model(IDS)
    assert torch.equal(load(str(there)).model(IDS), expected)
    assert torch.equal(load(str(back)).model(IDS), expected)
    with open_checkpoint(there) as opened:
        assert opened.config()["quantization_config"]["quant_method"] == "fp8"
