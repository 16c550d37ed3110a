"""Source × recipe → checkpoint, end to end on tiny models: the same bytes every time, or a clear refusal."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.plugins.manager import registry
from quantkit.quantization import run as module
from quantkit.quantization.calibration.data import prepare
from quantkit.quantization.calibration.importance import weighed_windows
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import CalibrationSpec, load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import CalibrationError, CheckpointError, SourceError, Stopped
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

RECIPES = ["int8", "int8-gptq", "int5-asym", "int4", "int4-asym", "int4-rtn", "int3", "int2", "nf4",
           "nf4-nested", "w8a8", "fp8"]
SMALL = CalibrationSpec(windows=4, window=32)
FEW = CalibrationSpec(windows=16, window=64)
GPTQ = """
calibration: {windows: 4, window: 32}
rules:
  - {match: lm_head, optional: true}
  - match: "*"
    method: gptq
    spec: {bits: 4, granularity: {strategy: group, size: 32}}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Two layers, tied embeddings."""
    return tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Three layers with biases, a head of its own."""
    return tiny_model(tmp_path_factory.mktemp("models") / "deep", "qwen2", num_hidden_layers=3,
                      tie_word_embeddings=False)


@pytest.fixture(scope="module")
def gptq_recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "small.yaml"
    path.write_text(GPTQ)
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(deep, gptq_recipe, tmp_path_factory):
    """The bytes of a calibrated run that nothing stops."""
    return contents(quantize(str(deep), gptq_recipe, tmp_path_factory.mktemp("whole") / "out").out)


def changed(folder: Path, to: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a model with some tensors replaced; ``__`` in a keyword is a dot."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    new = {name.replace("__", "."): value for name, value in tensors.items()}
    save_file(load_file(folder / "model.safetensors") | new, to / "model.safetensors",
              metadata={"format": "pt"})
    return to


# -- what is made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", ["llama", "deep"])
def test_every_shipped_recipe(name, model, request, tmp_path):
    folder = request.getfixturevalue(model)
    seen = []
    result = quantize(str(folder), name, tmp_path / "out", calibration=SMALL, progress=seen.append)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    kept = [] if name not in ("w8a8", "fp8") else ["model.embed_tokens", "lm_head"]  # for other engines
    units = layers + (not kept)
    assert result.out == tmp_path / "out" and verify(result.out).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    # forward, and backward, which tells of its end too
    walks = [(i, layers) for i in range(layers)] + [(i, layers) for i in range(layers + 1)]
    weighing = walks if result.plan.calibrated else []
    steps = [at for at, _ in groupby(seen, lambda event: (event.phase.name, event.done, event.total))]
    assert [at[1:] for at in steps] == weighing + [(i, units + 1) for i in range(units + 2)]

    written = json.loads((result.out / "config.json").read_text())
    method = written["quantization_config"]["quant_method"]
    tied = config["tie_word_embeddings"]
    said = not name.startswith("nf4") and (kept or not tied or name.startswith("int8"))
    assert method == ("compressed-tensors" if said else "quantkit")
    assert written.items() >= config.items()
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (result.out / side).read_bytes() == (folder / side).read_bytes()

    with Checkpoint.open(result.out) as checkpoint:
        manifest = checkpoint.manifest
        assert manifest.layers == result.rows and result.fallbacks == ()
        assert [row.name for row in result.rows] == [row.name for row in result.plan.rows]
        assert [row.bytes for row in result.rows] == [row.bytes_after for row in result.plan.rows]
        assert sum(info.nbytes for info in checkpoint.infos.values()) == result.plan.disk_bytes
        assert (manifest.calibration is not None) == result.plan.calibrated
        original = load_file(folder / "model.safetensors")
        quantized = {row.name for row in result.rows if row.method is not None}
        assert quantized.isdisjoint(kept)
        assert {f"{row}.weight" for row in quantized} | {
            key for key in original if checkpoint.has(key)} == original.keys()
        for other in original.keys() - {f"{row}.weight" for row in quantized}:
            assert torch.equal(checkpoint.tensor(other), original[other])
        form = registry("formats")
        for row in result.rows:
            if row.name in kept:
                assert row.method is None and row.error is None
                continue
            packed = checkpoint.quantized(row.name)
            stored, exact = form.get(row.format).dequantize(packed), original[f"{row.name}.weight"].float()
            assert packed.nbytes == row.bytes
            assert row.error == pytest.approx(float((stored - exact).norm() / exact.norm()), rel=1e-4)
            # solvers trade distance of weights for distance of outputs: wider than rounding
            solved = {"int8": 0.02, "int8-gptq": 0.02, "int4": 0.25, "int4-asym": 0.25, "int3": 0.5,
                      "int2": 1.0}.get(name, 0.15)
            rounded = {8: 0.02, 6: 0.04}.get(row.spec.bits, 0.15)
            assert 0 < row.error < (solved if "layers" in row.name else rounded)


def test_embeddings_that_a_file_repeats_are_stored_once(llama, tmp_path):
    table = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    twice = changed(llama, tmp_path / "twice", lm_head__weight=table.clone())
    for recipe in ("int8", "w8a8"):
        with Checkpoint.open(quantize(str(twice), recipe, tmp_path / recipe).out) as checkpoint:
            assert checkpoint.has("model.embed_tokens.weight") == (recipe == "w8a8")
            assert not [name for name in checkpoint.infos if name.startswith("lm_head")]


@pytest.mark.parametrize("name", ["int4", "nf4-nested"])
def test_two_runs_give_the_same_bytes(llama, tmp_path, name):
    first = quantize(str(llama), name, tmp_path / "a", calibration=SMALL)
    second = quantize(str(llama), name, tmp_path / "b", calibration=SMALL)
    assert contents(first.out) == contents(second.out)
    if name == "int4":
        other = quantize(str(llama), name, tmp_path / "c", calibration=SMALL.model_copy(update={"seed": 1}))
        assert contents(other.out)["model.safetensors"] != contents(first.out)["model.safetensors"]


def test_a_mixed_recipe_keeps_and_quantizes_as_it_says(deep, tmp_path):
    path = tmp_path / "mixed.yaml"
    path.write_text("""
rules:
  - {match: "*.v_proj"}
  - {match: lm_head, method: rtn, spec: {bits: 8, granularity: {strategy: channel}}}
  - {match: "*", method: rtn, spec: {bits: 4, granularity: {strategy: group, size: 32}}}
""")
    result = quantize(str(deep), str(path), tmp_path / "out")
    assert {row.name.rpartition(".")[2]: row.spec.bits if row.spec else 16 for row in result.rows} == {
        "q_proj": 4, "k_proj": 4, "v_proj": 16, "o_proj": 4, "gate_proj": 4, "up_proj": 4, "down_proj": 4,
        "lm_head": 8}
    assert verify(result.out).ok


def test_the_summary_is_plain_data(llama, tmp_path):
    summary = quantize(str(llama), "int8", tmp_path / "out").to_dict()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["resumed_units"] == 0 and len(summary["layers"]) == 1 + 14


# -- stopped and run again


@pytest.mark.parametrize("label", ["layer 0", "layer 1", "layer 2", "embeddings and head",
                                   "assembling and rereading"])
def test_a_stopped_run_resumes_to_the_same_bytes(deep, gptq_recipe, undisturbed, tmp_path, label, stop_at):
    done = ["layer 0", "layer 1", "layer 2", "embeddings and head", "assembling and rereading"].index(label)
    with pytest.raises(Stopped, match=f"{done} of 4 units are kept") as caught:
        quantize(str(deep), gptq_recipe, tmp_path / "out", progress=stop_at(label))
    assert caught.value.exit_code == 75 and "same command" in caught.value.next
    assert not (tmp_path / "out").exists()
    result = quantize(str(deep), gptq_recipe, tmp_path / "out")
    assert result.resumed == done and len(result.rows) == 22
    assert contents(result.out) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_finished_unit_is_neither_measured_nor_solved_again(deep, gptq_recipe, tmp_path,
                                                              monkeypatch, stop_at):
    with pytest.raises(Stopped):
        quantize(str(deep), gptq_recipe, tmp_path / "out", progress=stop_at("layer 2"))
    measured, advanced, runner = [], [], module.LayerRunner

    class Watched(runner):
        def measure_stage(self, stage, wanted=None):
            measured.append(stage.index)
            return super().measure_stage(stage, wanted)

        def advance_stage(self, stage, replaced, changed=None):
            advanced.append(stage.index)
            super().advance_stage(stage, replaced, changed)

    monkeypatch.setattr(module, "LayerRunner", Watched)
    quantize(str(deep), gptq_recipe, tmp_path / "out")
    assert (measured, advanced) == ([2] * 4, [0] * 4 + [1] * 4 + [2] * 3)


def test_a_run_with_every_layer_done_computes_nothing(deep, gptq_recipe, tmp_path, monkeypatch, stop_at):
    with pytest.raises(Stopped):
        quantize(str(deep), gptq_recipe, tmp_path / "out", progress=stop_at("embeddings and head"))
    monkeypatch.setattr(module.LayerRunner, "__init__", lambda *given: pytest.fail("it computes"))
    assert quantize(str(deep), gptq_recipe, tmp_path / "out").resumed == 3


def test_another_run_does_not_take_over(deep, gptq_recipe, tmp_path, stop_at):
    with pytest.raises(Stopped):
        quantize(str(deep), gptq_recipe, tmp_path / "out", progress=stop_at("layer 1"))
    with pytest.raises(CheckpointError, match="another run"):
        quantize(str(deep), "int8", tmp_path / "out")


# -- refused before any work


def test_something_at_out_is_refused_before_the_source_is_opened(llama, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(module.ModelOrigin, "open", lambda self: pytest.fail("the source was opened"))
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(str(llama), "int8", tmp_path / "out")


def test_calibration_needs_a_tokenizer_that_fits(llama, gptq_recipe, tmp_path):
    model = changed(llama, tmp_path / "model")
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SourceError, match=r"tokenizer\.json can't be read"):
        quantize(str(model), gptq_recipe, tmp_path / "out")
    (model / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"the model has no tokenizer\.json"):
        quantize(str(model), gptq_recipe, tmp_path / "out")
    small = tiny_model(tmp_path / "small", vocab_size=40)
    with pytest.raises(CalibrationError, match="the model knows 40"):
        quantize(str(small), gptq_recipe, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


# -- values


@pytest.mark.parametrize("recipe", ["int8", "nf4", "int4"])
@pytest.mark.parametrize(("name", "value"), [
    ("model.layers.1.self_attn.q_proj.weight", "nan"), ("model.layers.1.input_layernorm.weight", "inf"),
    ("model.embed_tokens.weight", "nan"), ("model.norm.weight", "-inf")])
def test_values_that_are_not_finite_are_named(llama, tmp_path, recipe, name, value):
    weight = load_file(llama / "model.safetensors")[name]
    weight.view(-1)[3] = float(value)
    model = changed(llama, tmp_path / "model", **{name.replace(".", "__"): weight})
    with pytest.raises(SourceError) as caught:
        quantize(str(model), recipe, tmp_path / "out", calibration=SMALL)
    error = caught.value
    assert error.what == f"tensor {name!r} of {model / 'model.safetensors'} has values that are not finite"
    assert error.why.startswith(f"1 of {weight.numel()} ") and error.next
    assert not (tmp_path / "out").exists()
    if "norm" in name:
        assert not (tmp_path / "out.partial").exists(), "what stays as it is was looked at before any work"


def test_a_window_whose_activations_overflow_is_named_with_its_line(llama, tmp_path):
    """Weights are finite; a letter that one line of the data has is in a direction that overflows."""
    original = load_file(llama / "model.safetensors")
    letter = json.loads((llama / "tokenizer.json").read_text())["model"]["vocab"]["Z"]
    table, out = original["model.embed_tokens.weight"], original["model.layers.0.self_attn.o_proj.weight"]
    table[:, 7], out[7] = 0, 0
    table[letter, 7] = 10
    wide = {}
    for part in ("gate_proj", "up_proj"):
        weight = original[f"model.layers.0.mlp.{part}.weight"]
        weight[:, 7] = 1e30
        wide[f"model__layers__0__mlp__{part}__weight"] = weight
    model = changed(llama, tmp_path / "model", model__embed_tokens__weight=table,
                    model__layers__0__self_attn__o_proj__weight=out, **wide)
    lines = [f"a{'Z' if i == 2 else 'b'}c def ghi jkl mno pqr stu vwx yz. " * 3 for i in range(8)]
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    spec = SMALL.model_copy(update={"text": str(data), "windows": 8, "packing": "documents"})

    def refused(**changes) -> str:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(CalibrationError, match=r"input of model\.layers\.0\.mlp\.down_proj") as caught:
            quantize(str(model), "int4", out, calibration=spec.model_copy(update=changes))
        assert "(lines.jsonl line 3)" in caught.value.what
        assert "every weight there is finite" in caught.value.why and not out.exists()
        return caught.value.what

    number = int(re.search(r"calibration window (\d)", refused(importance="equal"))[1])
    some = next(count for count in range(2, 8) if number in weighed_windows(8, count)[1:])
    for count in (8, some):  # its place among the windows that are weighed isn't its number
        assert f"calibration window {number} (" in refused(importance_windows=count)


def test_gptq_serves_its_inputs_better_than_rounding(llama, tmp_path):
    """The loss that matters is that of outputs; weights themselves end up farther away."""
    results = {name: quantize(str(llama), name, tmp_path / name, calibration=FEW)
               for name in ("int4", "int4-rtn")}
    hf = json.loads((llama / "config.json").read_text())
    original, config = load_file(llama / "model.safetensors"), parse_config(hf)
    model = CausalLM(config, Weights(original.__getitem__, original.__contains__, torch.float32))
    form, loss = registry("formats").get("pack-quantized"), dict.fromkeys(results, 0.0)
    inputs: dict[str, torch.Tensor] = {}
    first = {name: layer for name, layer in model.linears().items() if name.startswith("model.layers.0.")}
    for name, layer in first.items():
        layer.observer = lambda x, name=name: inputs.__setitem__(name, x.flatten(0, 1))
    source = open_source(str(llama))
    plan = make_plan(results["int4"].plan.recipe, source)
    tokens = prepare(plan.calibration, source, plan.widest_hessian).tokens
    model(tokens)
    # q, k and v of layer 0: their inputs are exactly those that calibration saw
    for recipe, result in results.items():
        with Checkpoint.open(result.out) as checkpoint:
            for name in [n for n in first if n.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")]:
                error = form.dequantize(checkpoint.quantized(name)) - original[f"{name}.weight"].float()
                loss[recipe] += float((inputs[name] @ error.T).square().sum())
    assert loss["int4"] < 0.8 * loss["int4-rtn"]


def test_the_predicted_peak_is_at_least_what_a_layer_takes(llama):
    plan = make_plan(load_recipe("int4"), open_source(str(llama)))
    layer = sum(4 * r.shape[0] * r.shape[1] + r.bytes_after for r in plan.rows if r.layer == 0)
    assert plan.peak_bytes > layer + plan.recipe.calibration.windows * plan.recipe.calibration.window * 64 * 4
