"""Families whose mathematics isn't known here, calibrated through transformers' modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.outline import outline_of
from quantkit.quantization.calibration.module_blocks import ModuleBlocks
from quantkit.quantization.calibration.module_runner import ModuleRunner
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.run import quantize
from quantkit.sources.open import open_source
from quantkit.support.errors import RecipeError
from quantkit.testing.tiny import tiny_tokenizer

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="these families are transformers' (extra: oracle)")

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
         "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}
FAMILIES = {
    "smollm3": {},  # some layers without positions
    "qwen3_5_moe_text": EXPERTS | {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                   "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "gemma4_text": {"num_kv_shared_layers": 1, "global_head_dim": 16, "vocab_size_per_layer_input": 512,
                    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                    "hidden_size_per_layer_input": 16},  # another layer's keys, an embedding for each layer
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 64, "intermediate_size": 32}}  # all experts at once

OTHER = {"granitemoe": EXPERTS}
"""Whose experts' Linears have names of their own."""


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    return build(request.param, tmp_path / "model")


def build(model_type: str, folder: Path):
    """A random model of transformers, in float32, and its folder, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        model_type, **SIZES | {**FAMILIES, **OTHER}[model_type]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(8, 500, (rows, 24), generator=torch.Generator().manual_seed(1))


def recipe(method: str = "gptq", **changes) -> Recipe:
    """4 bits in groups of 16."""
    rule = {"match": "model.layers.*", "method": method,
            "spec": {"bits": 4, "granularity": {"strategy": "group", "size": 16}}}
    return Recipe.model_validate({"name": method, "rules": [rule], "calibration": {
        "text": "random", "windows": 24, "window": 64}} | changes)


def layers(model) -> torch.nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def test_layers_leave_what_the_model_does(model):
    whole, folder = model
    seen = []
    for layer in layers(whole):
        layer.register_forward_hook(lambda module, inputs, output: seen.append(
            output if torch.is_tensor(output) else output[0]))
    with torch.no_grad():
        whole(input_ids=tokens(), use_cache=False)
    source = open_source(str(folder))
    outline = outline_of("m", source.config(), source.tensors())
    blocks, passed = ModuleBlocks(source, outline, torch.device("cpu")), None
    blocks.prepare(tokens())
    for index, expected in enumerate(seen):
        blocks.load(index)
        passed = blocks.run(index, tokens(), passed)
        states = passed.outputs if torch.is_tensor(passed.outputs) else passed.outputs[0]
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_statistics_are_those_of_what_enters_each_linear(tmp_path):
    whole, folder = build("smollm3", tmp_path / "model")
    inputs = {}
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output, name=name: inputs.update(
                {name: args[0]}))
    with torch.no_grad():
        whole(input_ids=tokens(), use_cache=False)
    source = open_source(str(folder))
    outline = outline_of("m", source.config(), source.tensors())
    with Spill(None) as states:
        runner = ModuleRunner(source, outline, tokens(), states, torch.device("cpu"))
        for index in range(outline.num_layers):
            stages = runner.stages(index)
            assert [sorted(name.rpartition(".")[2] for name in stage.linears) for stage in stages] == [
                ["k_proj", "q_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
            assert [stage.last for stage in stages] == [False, False, False, True]
            for stage in stages:
                stats = runner.measure_stage(stage, {name: {"hessian"} for name in stage.linears})
                assert len({id(each) for each in stats.values()}) == 1  # they share their input
                for name, each in stats.items():
                    rows = inputs[name].flatten(0, 1)
                    assert each.tokens == len(rows) and each.hessian is not None
                    torch.testing.assert_close(each.hessian, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-4)
                    torch.testing.assert_close(each.largest, rows.abs().amax(0), rtol=1e-4, atol=1e-5)
                runner.advance_stage(stage, {})


def test_calibrated_is_closer_than_rounded(model, tmp_path):
    from transformers import AutoModelForCausalLM

    whole, folder = model
    with torch.no_grad():
        exact = whole(input_ids=tokens(8), use_cache=False).logits.log_softmax(-1)
    divergences = {}
    for method in ("rtn", "gptq"):
        result = quantize(str(folder), recipe(method), tmp_path / method)
        assert not result.fallbacks
        loaded = AutoModelForCausalLM.from_pretrained(result.out, dtype=torch.float32).eval() if (
            whole.config.model_type != "gemma4_text") else plain(result.out, folder, tmp_path / "plain")
        with torch.no_grad():
            got = loaded(input_ids=tokens(8), use_cache=False).logits.log_softmax(-1)
        divergences[method] = float((exact.exp() * (exact - got)).sum(-1).mean())
    assert divergences["gptq"] < 0.97 * divergences["rtn"]


def plain(out: Path, original: Path, to: Path):
    """The quantized model dequantized by us, in transformers."""
    import shutil

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from quantkit.plugins.manager import registry

    to.mkdir(exist_ok=True)
    with Checkpoint.open(out) as checkpoint:
        packed = {row.name for row in checkpoint.layers if row.spec}
        kept = {name: checkpoint.tensor(name).clone() for name in checkpoint.infos
                if name.rpartition(".")[0] not in packed}
        for name in packed:
            weight = checkpoint.quantized(name)
            assert weight is not None
            kept[f"{name}.weight"] = registry("formats").get(weight.format).dequantize(weight)
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(original / "config.json", to / "config.json")
    return AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "llama4_text", "granitemoe"])
def test_tokens_of_each_expert_are_counted(family, tmp_path):
    _, folder = build(family, tmp_path / "model")
    result = quantize(str(folder), recipe(), tmp_path / "out")
    reached = [row.tokens for row in result.rows if ".layers.1." in row.name and row.name.endswith(
        ".gate_proj") and ".experts." in row.name]
    assert len(reached) == 8 and min(reached) > 0
    chosen = json.loads((folder / "config.json").read_text())["num_experts_per_tok"]
    assert sum(reached) == 24 * 64 * chosen


def test_an_expert_without_tokens_is_rounded_and_told(tmp_path):
    _, folder = build("qwen3_5_moe_text", tmp_path / "model")
    result = quantize(str(folder), recipe(calibration={
        "text": "random", "windows": 1, "window": 8}), tmp_path / "out")
    unreached = [row for row in result.rows if ".experts." in row.name and row.tokens == 0]
    assert unreached
    assert all("only 0 calibration tokens reached this expert" in row.notes for row in unreached)


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, resumed_run):
    _, folder = build("gemma4_text", tmp_path / "model")
    made = resumed_run(str(folder), recipe(), "layer 2")
    assert made.resumed == 2 and made.plan.outline_record.calibrated.startswith("transformers 5")


def test_nothing_of_the_folder_is_run(tmp_path, monkeypatch):
    _, folder = build("smollm3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        config.setdefault("auto_map", {})[name] = "evil.Evil"
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_TRUST_REMOTE_CODE", "1")
    quantize(str(folder), recipe(), tmp_path / "out")
    assert not (tmp_path / "ran").exists() and not any("evil" in name for name in sys.modules)


@pytest.mark.parametrize(("change", "why"), [
    ({"model_type": "unheard_of"}, "no language model of type"),
    ({"num_attention_heads": "many"}, "transformers can't build this model"),
    ({"hidden_size": 96}, "doesn't fit")])
def test_what_transformers_cannot_run_is_refused(change, why, tmp_path):
    _, folder = build("smollm3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RecipeError, match="can't be calibrated through transformers") as caught:
        quantize(str(folder), recipe(), tmp_path / "out")
    assert why in str(caught.value.why) and "int4-rtn" in str(caught.value.next)


def test_without_transformers_the_remedy_is_said(tmp_path, monkeypatch):
    _, folder = build("smollm3", tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RecipeError, match="can't be calibrated through transformers") as caught:
        make_plan(recipe(), open_source(str(folder)))
    assert "pip install 'transformers>=5'" in str(caught.value.next)


def test_experts_of_two_schemes_are_not_for_transformers(tmp_path):
    _, folder = build("qwen3_5_moe_text", tmp_path / "model")
    one = recipe("rtn").snapshot()["rules"][0]
    eight = one | {"layers": [-1], "spec": one["spec"] | {"bits": 8}}
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe("rtn", rules=[eight, one], **{"for": "transformers"}), open_source(str(folder)))
    assert "all experts of a model by one" in str(caught.value.why)
