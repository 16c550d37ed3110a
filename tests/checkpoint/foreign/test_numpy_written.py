"""GPTQ and AWQ checkpoints written by NumPy: the same logits as the model they stand for, or an error that
says what to do."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.open import open_checkpoint
from quantkit.plugins.manager import registry
from quantkit.runtime.loader import load
from quantkit.support.errors import CheckpointError, QuantkitError

Q = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(5))


def same_logits(theirs, plain) -> None:
    ours, expected = (load(str(one), dtype="float32") for one in (theirs, plain))
    assert expected.model(IDS).std() > 0.5
    assert (ours.model(IDS) - expected.model(IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("change", [
    {}, {"checkpoint_format": "gptq_v2"}, {"bits": 8, "group_size": -1}, {"bits": 8, "sym": False},
    {"bits": 2, "group_size": 64}, {"bits": 3}, {"sym": False},
    {"sym": False, "checkpoint_format": "gptq_v2"},
    {"desc_act": True, "static_groups": True}, {"checkpoint_format": None, "format": "gptq"}], ids=str)
def test_gptq(write, gptq, change) -> None:
    config = {**gptq, **change}
    theirs, plain = write(config)
    same_logits(theirs, plain)
    with open_checkpoint(theirs) as opened:
        row = opened.layers[0]
        assert (row.method, row.spec.bits, row.spec.symmetric) == ("gptq", config["bits"], config["sym"])
        assert opened.manifest is None and opened.layers[-1].spec is None
    assert load(str(theirs)).label.startswith(f"gptq int{config['bits']}")


@pytest.mark.parametrize("change",
                         [{}, {"group_size": -1}, {"version": "GEMM", "modules_to_not_convert": ["lm_head"]},
                                    {"bits": None, "group_size": None, "w_bit": 4, "q_group_size": 64}],
                         ids=str)
def test_awq(write, awq, change) -> None:
    config = {k: v for k, v in {**awq, **change}.items() if v is not None or k == "modules_to_not_convert"}
    theirs, plain = write(config)
    same_logits(theirs, plain)
    assert load(str(theirs)).label.startswith("awq int4")


def test_awq_as_gptqmodel_writes_it(write, awq) -> None:
    """Of symmetric weights it says that there are no zero points, and stores them."""
    def change(tensors) -> None:
        for name in [n for n in tensors if n.endswith(".scales")]:
            tensors[name] = tensors[name].to(torch.float32)

    same_logits(*write({**awq, "zero_point": False}, change=change))


def test_awq_scales_of_a_bfloat16_model(write, awq) -> None:
    def narrow(tensors) -> None:
        tensors[f"{Q}.scales"] = tensors[f"{Q}.scales"].to(torch.bfloat16)

    theirs, _ = write(awq, change=narrow)
    with open_checkpoint(theirs) as opened:
        form = registry("formats").get("awq")
        assert torch.equal(form.unpack(opened.quantized(Q)).scale.T.to(torch.bfloat16),
                           load_file(theirs / "model.safetensors")[f"{Q}.scales"])


@pytest.mark.parametrize("value", [1e-30, 70000.0, 1.0001, float("nan")])
def test_awq_scales_that_float16_lacks_are_refused(write, awq, value) -> None:
    def change(tensors) -> None:
        tensors[f"{Q}.scales"] = tensors[f"{Q}.scales"].to(torch.float32).fill_(value)

    assert "float16" in str(refused(write(awq, change=change)[0]))


def test_kernels_run_them_as_they_run_ours(write, gptq) -> None:
    theirs, plain = write(gptq)
    loaded = load(str(theirs), dtype="bfloat16")
    assert loaded.fallback_reason is None
    assert {one.weight.name for one in loaded.model.linears().values()} == {"cpu-int4", "cpu-bf16"}
    expected = load(str(plain), dtype="float32").model(IDS)
    assert (loaded.model(IDS) - expected).norm() / expected.norm() < 0.05


def test_kept_layers_and_layers_of_their_own_kind(write, gptq) -> None:
    down = "model.layers.1.mlp.down_proj"
    same_logits(*write({**gptq, "dynamic": {f"-:.*{down}": {}}}, keep=("lm_head", down)))


def test_no_g_idx_and_biases_of_zero(write, gptq) -> None:
    def change(tensors) -> None:
        for name in [n for n in tensors if n.endswith("g_idx")]:
            del tensors[name]
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)

    same_logits(*write(gptq, change=change))


def refused(folder) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        load(str(folder))
    assert caught.value.next
    return caught.value


@pytest.mark.parametrize(("change", "said"), [
    ({"format": "gptq_v2"}, "other zero points"),
    ({"checkpoint_format": "marlin"}, "checkpoint_format"), ({"bits": 5}, "holds 2, 3, 4 or 8"),
    ({"adapter": {"name": "lora"}}, "'adapter'"), ({"rotation": "hadamard"}, "'rotation'"),
    ({"new_key": 1}, "'new_key'"), ({"pack_dtype": "int16"}, "pack_dtype"), ({"group_size": 0}, "group_size"),
    ({"dynamic": {"+:.*": {"adapter": 1}}}, "'dynamic'"), ({"dynamic": {"-:(": {}}}, "regular expression"),
    ({"dynamic": {"-:.*q_proj": {}}}, "'dynamic' says that it isn't"), ({"sym": 1}, "'sym'"),
    ({"quant_method": "hqq"}, "'hqq'"), ({"quant_method": "gptqq"}, "did you mean 'gptq'"),
    ({"quant_method": None}, "doesn't say how"),
    ({"quant_method": "quantkit"}, "quantkit.json is missing")], ids=str)
def test_what_gptq_configs_are_refused(write, gptq, change, said) -> None:
    import json

    theirs, _ = write(gptq)
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] |= change
    (theirs / "config.json").write_text(json.dumps(config))
    assert said in str(refused(theirs))


@pytest.mark.parametrize(("change", "said"), [
    ({"version": "gemv"}, "'version'"), ({"zero_point": 0}, "'zero_point'"), ({"w_bit": 8}, "'w_bit'"),
    ({"backend": "llm-awq"}, "'backend'"),
    ({"modules_to_not_convert": ["self_attn"]}, "modules_to_not_convert"),
    ({"exotic": True}, "'exotic'"), ({"modules_to_not_convert": "lm_head"}, "list of names")], ids=str)
def test_what_awq_configs_are_refused(write, awq, change, said) -> None:
    import json

    theirs, _ = write(awq)
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] |= change
    (theirs / "config.json").write_text(json.dumps(config))
    assert said in str(refused(theirs))


def test_inputs_out_of_order_are_refused(write, gptq) -> None:
    def change(tensors) -> None:
        tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0)

    error = refused(write({**gptq, "desc_act": True}, change=change)[0])
    assert Q in error.what and "desc_act" in error.what and "desc_act: false" in error.next


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop(f"{Q}.scales"), "has no scales"),
    (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].float()}), "q_proj.scales"),
    (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:, :8].contiguous()}), "q_proj.qweight"),
    (lambda t: t[f"{Q}.scales"].fill_(torch.inf), "not finite"),
    (lambda t: t["model.norm.weight"].fill_(torch.nan), "'model.norm.weight' of"),
    (lambda t: t[f"{Q}.bias"].fill_(torch.nan), "q_proj.bias' of"),
    (lambda t: t[f"{Q}.qzeros"].fill_(0), "middle level"),
    (lambda t: t.update({f"{Q}.extra": torch.zeros(2)}), "nothing uses"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(128)}), "nothing uses"),
    (lambda t: t.pop("model.norm.weight"), "lacks the tensor"),
    (lambda t: t.pop(f"{Q}.qweight"), "no plain weight")])
def test_damaged_tensors_are_refused(write, gptq, change, said) -> None:
    assert said in str(refused(write(gptq, change=change)[0]))


def test_a_foreign_checkpoint_is_not_quantized_again(write, gptq, tmp_path) -> None:
    from quantkit.quantization.run import quantize

    with pytest.raises(QuantkitError, match="already quantized"):
        quantize(str(write(gptq)[0]), "int8", tmp_path / "out")


def test_a_revision_makes_no_sense(write, gptq) -> None:
    with pytest.raises(QuantkitError, match="makes no sense"):
        load(str(write(gptq)[0]), revision="main")


def test_ours_without_its_manifest_reads_all_the_same(tmp_path, tiny) -> None:
    """What a copy that lost quantkit.json, or another tool with the same layout, looks like."""
    from quantkit.quantization.recipe import load_recipe
    from quantkit.quantization.run import quantize

    for name in ("int8", "int4-rtn", "nf4", "nf4-nested"):
        # bitsandbytes' layout has no place for an embedding of integers
        engine = "transformers" if name.startswith("nf4") else "quantkit"
        recipe = load_recipe(name).model_copy(update={"engine": engine})
        out = quantize(str(tiny), recipe, tmp_path / name).out
        expected = load(str(out), dtype="float32").model(IDS)
        (out / "quantkit.json").unlink()
        assert torch.equal(load(str(out), dtype="float32").model(IDS), expected), name


def test_nothing_else_is_opened(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        open_checkpoint(tmp_path / "nowhere")
