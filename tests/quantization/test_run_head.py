"""The head by calibrated methods, and the embedding: measured, solved, stored once, resumed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.ops.hadamard import apply_hadamard
from quantkit.plugins.manager import registry
from quantkit.quantization import run as module
from quantkit.quantization import solve as module_of_solve
from quantkit.quantization.calibration.data import prepare
from quantkit.quantization.memory import rows_at_once
from quantkit.quantization.methods import gptq
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.rounding import RTN
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.quantization.solve import ModelOrigin
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.support.errors import SourceError, Stopped
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

G32 = "spec: {bits: 4, granularity: {strategy: group, size: 32}}"
INT8 = "method: rtn, spec: {bits: 8, granularity: {strategy: channel}}"
HEAD = f"""
calibration: {{windows: 8, window: 32}}
rules:
  - {{match: lm_head, method: gptq, {G32}}}
  - {{match: "*", method: gptq, {G32}}}
"""
RULES = {"gptq": f"{{match: model.embed_tokens, method: gptq, {G32}}}",
         "rtn": f"{{match: model.embed_tokens, {INT8}}}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {tied: tiny_model(tmp_path_factory.mktemp("models") / "model", "qwen2", tie_word_embeddings=tied)
            for tied in (True, False)}


@pytest.fixture
def recipe(tmp_path):
    """``recipe(*rules, …)`` → a file; layers go by gptq."""
    def write(*rules: str, layers: str = f'{{match: "*", method: gptq, {G32}}}',
              importance: str = "gradient") -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"calibration: {{windows: 8, window: 32, importance: {importance}}}\nrules:\n"
                        + "".join(f"  - {rule}\n" for rule in (*rules, layers)))
        return str(path)

    return write


# -- the head


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("importance", ["gradient", "equal"])
def test_the_head_serves_its_inputs_better_than_rounding(models, recipe, tmp_path, tied, importance):
    rule, keep = f"{{match: lm_head, method: gptq, {G32}}}", '{match: "*"}'
    solved = quantize(str(models[tied]), recipe(rule, layers=keep, importance=importance), tmp_path / "gptq")
    rounded = quantize(str(models[tied]), recipe(rule.replace("gptq", "rtn"), layers=keep), tmp_path / "rtn")
    assert verify(solved.out).ok and solved.rows[-1].tokens == 8 * 32
    original = load_file(models[tied] / "model.safetensors")
    exact = original["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    config = json.loads((models[tied] / "config.json").read_text())
    model = CausalLM(parse_config(config), Weights(original.__getitem__, original.__contains__,
                                                          torch.float32))
    entered = []
    model.head.observer = entered.append
    planned = _planned(models[tied], recipe(rule, layers=keep))
    model(prepare(planned[1].calibration, planned[0], planned[1].widest_hessian).tokens)
    rows = torch.cat([one.flatten(0, 1) for one in entered])
    loss = {}
    for name, result in (("gptq", solved), ("rtn", rounded)):
        with Checkpoint.open(result.out) as checkpoint:
            error = FORMAT.dequantize(checkpoint.quantized("lm_head")) - exact
        loss[name] = float((rows @ error.T).square().sum())
    assert loss["gptq"] < 0.85 * loss["rtn"]


def _planned(folder, recipe):
    loaded = load_recipe(recipe)
    source = ModelOrigin(str(folder), None, loaded).open()
    return source, make_plan(loaded, source)


def test_a_run_with_a_calibrated_head_resumes_to_the_same_bytes(models, tmp_path, stop_at):
    path = tmp_path / "head.yaml"
    path.write_text(HEAD)
    whole = contents(quantize(str(models[False]), str(path), tmp_path / "whole").out)
    assert contents(quantize(str(models[False]), str(path), tmp_path / "again").out) == whole
    for label in ("layer 1", "embeddings and head", "assembling and rereading"):
        with pytest.raises(Stopped):
            quantize(str(models[False]), str(path), tmp_path / "out", progress=stop_at(label))
    result = quantize(str(models[False]), str(path), tmp_path / "out")
    assert contents(result.out) == whole and result.resumed == 3


def test_a_head_of_nan_is_named(models, tmp_path, recipe):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in models[False].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][5] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"'model\.norm\.weight' of .* has values that are not finite"):
        quantize(str(broken), recipe(f"{{match: lm_head, method: gptq, {G32}}}", layers='{match: "*"}',
                                     importance="equal"), tmp_path / "out")


# -- the embedding


@pytest.mark.parametrize(("tied", "method"), [(True, "gptq"), (True, "rtn"), (False, "rtn")])
def test_the_embedding_is_stored_once_and_resumed(models, recipe, tmp_path, tied, method, stop_at):
    path = recipe(RULES[method], "{match: lm_head, optional: true}")
    seen = []
    result = quantize(str(models[tied]), path, tmp_path / "whole", progress=seen.append)
    whole, plan = contents(result.out), result.plan
    stored = load_file(result.out / "model.safetensors")
    assert sum(tensor.nbytes for tensor in stored.values()) == plan.disk_bytes
    assert not any(name == "model.embed_tokens.weight" for name in stored)
    assert any(name.startswith("lm_head") for name in stored) != tied
    assert json.loads(whole["config.json"])["tie_word_embeddings"] is tied
    assert [row.name for row in result.rows] == [row.name for row in plan.rows]
    assert [row.bytes for row in result.rows] == [row.bytes_after for row in plan.rows]
    assert verify(result.out).ok and (result.rows[0].tokens is None) == (method == "rtn")
    events = [event for event in seen if event.label != "what each token matters" and not event.detail]
    assert [event.done for event in events] == list(range(5)) and {event.total for event in events} == {4}
    labels = ["embedding", "layer 0", "layer 1", "embeddings and head"] if method == "rtn" else [
        "layer 0", "layer 1", "embedding", "embeddings and head"]
    assert [event.label for event in events][:4] == labels
    for done, label in enumerate(labels):
        with pytest.raises(Stopped, match=f"{done} of 4 units are kept"):
            quantize(str(models[tied]), path, tmp_path / "out", progress=stop_at(label))
    assert contents(quantize(str(models[tied]), path, tmp_path / "out").out) == whole


def test_layers_are_measured_behind_the_rounded_embedding(models, recipe, tmp_path, monkeypatch):
    """A coarse embedding changes what layers see; calibration must know."""
    tables, runner = [], module.LayerRunner

    class Watched(runner):
        def __init__(self, config, weights, tokens, importance=None, states=None, table=None, *rest):
            tables.append(table)
            super().__init__(config, weights, tokens, importance, states, table, *rest)

    monkeypatch.setattr(module, "LayerRunner", Watched)
    out = quantize(str(models[True]), recipe(RULES["rtn"]), tmp_path / "out").out
    (table,) = tables
    with Checkpoint.open(out) as checkpoint:
        stored = checkpoint.quantized("model.embed_tokens")
    assert torch.equal(FORMAT.dequantize(table), FORMAT.dequantize(stored))


def test_two_rules_in_a_tied_model_make_two_matrices(models, recipe, tmp_path):
    path = recipe(f"{{match: model.embed_tokens, method: rtn, {G32}}}", f"{{match: lm_head, {INT8}}}")
    result = quantize(str(models[True]), path, tmp_path / "out")
    kinds = {row.name: row.spec.bits for row in result.rows if not row.name.startswith("model.layers")}
    assert kinds == {"model.embed_tokens": 4, "lm_head": 8}
    assert json.loads((result.out / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = load(str(result.out))
    assert loaded.fallback_reason is None and torch.isfinite(loaded.model(torch.arange(4, 24)[None])).all()


def test_a_rule_for_both_is_one_matrix_where_they_are_one(models, recipe, tmp_path):
    rule = f"{{match: 're:model\\.embed_tokens|lm_head', {INT8}}}"
    names = {tied: [row.name for row in quantize(str(models[tied]), recipe(rule), tmp_path / str(tied)).rows
                    if not row.name.startswith("model.layers")] for tied in (True, False)}
    assert names == {True: ["model.embed_tokens"], False: ["model.embed_tokens", "lm_head"]}


def test_the_shipped_recipe(models, tmp_path):
    small = module.CalibrationSpec(windows=4, window=32)
    for tied in (True, False):
        result = quantize(str(models[tied]), "int4", tmp_path / str(tied), calibration=small)
        outside = {row.name: row.spec.label() for row in result.rows if "layers" not in row.name}
        assert outside == ({"model.embed_tokens": "int6 g64 asym"} if tied else
                           {"model.embed_tokens": "int4 g64 sym", "lm_head": "int6 g64 asym"})
        assert 4 < result.plan.bits_per_weight < 7 and verify(result.out).ok


# -- in parts


SPECS = {"int4": (gptq.METHOD, "pack-quantized", {"bits": 4, "granularity": ("group", 32)}),
         "int4-asym": (gptq.METHOD, "pack-quantized",
                       {"bits": 4, "symmetric": False, "granularity": ("group", 32)}),
         "int8": (RTN, "pack-quantized", {"bits": 8, "granularity": ("channel", None)}),
         "gptq layout": (gptq.METHOD, "gptq", {"bits": 4, "granularity": ("group", 32)}),
         "fp8": (RTN, "float-quantized", {"kind": "fp", "bits": 8, "granularity": ("channel", None)}),
         "trellis": (RTN, "trellis", {"kind": "trellis", "bits": 2, "window": 10,
                                             "granularity": ("channel", None), "rotation": "hadamard"})}


@pytest.mark.parametrize("name", SPECS)
def test_parts_are_what_the_whole_is(monkeypatch, name):
    method, layout, fields = SPECS[name]
    strategy, size = fields["granularity"]
    scales = "float16" if layout == "gptq" else "float32"
    spec = QuantSpec(**{**fields, "granularity": Granularity(strategy=strategy, size=size),
                        "scale_dtype": scales})
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(256, 64, generator=random), torch.randn(500, 64, generator=random)
    stats = LayerStats(500, x.T @ x / 500)
    form, options = registry("formats").get(layout), method.options()

    def solved(rows):
        monkeypatch.setattr("quantkit.quantization.memory.PART", rows * 64)
        assert rows_at_once(spec, (256, 64)) == rows
        packed = module_of_solve.solve_by_parts(weight, method, form, stats, spec, options)
        return packed.tensor, packed.error, packed.notes

    whole, loss, _ = solved(256)
    for rows in (64, 128, 192):
        packed, again, _ = solved(rows)
        assert again == pytest.approx(loss, rel=1e-4)
        levels = [form.unpack(one).codes for one in (packed, whole)]
        assert (levels[0] != levels[1]).float().mean() < 0.002, "sums in another order"
    exact = apply_hadamard(weight) if spec.rotation else weight
    assert loss == pytest.approx(float((form.dequantize(whole) - exact).norm() / exact.norm()), rel=1e-5)


def test_what_shares_a_scale_with_other_rows_stays_whole(monkeypatch):
    monkeypatch.setattr("quantkit.quantization.memory.PART", 64 * 64)
    tensor = QuantSpec(bits=8, granularity=Granularity(strategy="tensor"))
    across = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=4096))
    assert rows_at_once(tensor, (256, 64)) == 256
    assert rows_at_once(across, (256, 96)) == 256 and rows_at_once(across, (256, 64)) == 64


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_large_head_goes_in_parts(models, recipe, tmp_path, monkeypatch, method):
    path = recipe(RULES[method], "{match: lm_head, optional: true}", layers='{match: "*"}')
    whole = contents(quantize(str(models[True]), path, tmp_path / "whole").out)
    monkeypatch.setattr("quantkit.quantization.memory.PART", 64 * 64)
    seen, solve = [], module_of_solve.solve_by_parts
    monkeypatch.setattr(module_of_solve, "solve_by_parts",
                        lambda weight, *rest: seen.append(tuple(weight.shape)) or solve(weight, *rest))
    made = quantize(str(models[True]), path, tmp_path / "parts")
    assert seen == [(300, 64)] and verify(made.out).ok
    if method == "rtn":
        assert contents(made.out)["model.safetensors"] == whole["model.safetensors"]
    again = quantize(str(models[True]), path, tmp_path / "again")
    assert contents(again.out) == contents(made.out)
