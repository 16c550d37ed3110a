"""Transforms from recipe to generated text, on tiny models: found, checked, resumed, exact."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import load
from quantkit.runtime.verify import verify
from quantkit.sources.open import open_source
from quantkit.support.errors import RecipeError, Stopped, UsageError
from quantkit.testing import tiny_model
from tests.helpers.folders import contents

RECIPE = """
name: changed
transforms: [TRANSFORMS]
calibration: {windows: 8, window: 64}
rules:
  - {match: lm_head, optional: true}
  - {match: "*.up_proj", optional: true}
  - match: "*"
    method: METHOD
    spec: {SPEC}
"""
INT8 = "bits: 8, granularity: {strategy: channel}"
CASES = {"awq": ("awq", "rtn", INT8), "awq gptq": ("awq", "gptq", INT8),
         "smoothquant": ("smoothquant", "rtn", f"{INT8}, activations: token"),
         "few steps": ("{name: awq, options: {steps: 4}}", "autoround", INT8)}
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def recipe(folder, case):
    transforms, method, spec = CASES[case]
    path = folder / "changed.yaml"
    path.write_text(RECIPE.replace("TRANSFORMS", transforms).replace("METHOD", method).replace("SPEC", spec))
    return str(path)


def far(a, b):
    """How far a token's logits are apart, of their size: the median, since some go to another expert."""
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).median())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "phi3"])
def test_the_checkpoint_does_what_the_model_does(tmp_path, family, case):
    """Kept layers, norms, biases and routers have been changed too; in 8 bits little is lost."""
    tiny = tiny_model(tmp_path / "tiny", family, dtype="float32")
    out = quantize(str(tiny), recipe(tmp_path, case), tmp_path / "out").out
    assert verify(out).ok
    made, original = load(str(out), dtype="float32"), load(str(tiny), dtype="float32")
    rounded = 0.08 if CASES[case][0] == "smoothquant" else 0.03
    with torch.no_grad():
        assert 0 < far(made.model(IDS), original.model(IDS)) < rounded
    names = json.loads((out / "quantkit.json").read_bytes())["recipe"]["transforms"]
    assert [one["name"] for one in names] == [t for t in ("awq", "smoothquant") if t in CASES[case][0]]


@pytest.mark.parametrize("case", ["awq gptq", "smoothquant"])
def test_stopped_and_run_again_it_ends_with_the_same_bytes(tmp_path, case, stop_at):
    """The second layer is measured behind the first one's changed norms, also after a stop."""
    tiny, path = tiny_model(tmp_path / "tiny", "qwen2"), recipe(tmp_path, case)
    whole = quantize(str(tiny), path, tmp_path / "whole").out

    with pytest.raises(Stopped):
        quantize(str(tiny), path, tmp_path / "out", progress=stop_at("layer 1"))
    again = quantize(str(tiny), path, tmp_path / "out")
    assert again.resumed >= 1
    assert contents(again.out) == contents(whole)


def test_a_data_free_method_is_measured_where_a_transform_asks(tmp_path):
    source = open_source(str(tiny_model(tmp_path / "tiny")))
    plans = {case: make_plan(load_recipe(recipe(tmp_path, case)), source) for case in CASES}
    assert plans["smoothquant"].calibrated and not plans["smoothquant"].weighed
    assert plans["awq"].calibrated and plans["awq"].weighed
    assert set(plans["awq"].measured) == {row.name for row in plans["awq"].rows if row.method}
    assert plans["awq"].peak_bytes > plans["smoothquant"].peak_bytes


def test_what_is_written_wrongly(tmp_path):
    tiny = str(tiny_model(tmp_path / "tiny"))
    for transforms, error, said in (("awk", UsageError, "did you mean 'awq'"),
                                    ("{name: awq, options: {stepz: 3}}", RecipeError, "steps"),
                                    ("{name: awq, options: {steps: 0}}", RecipeError, "greater than"),
                                    ("{nam: awq}", RecipeError, "name"), ("3", RecipeError, "transforms")):
        path = tmp_path / "wrong.yaml"
        text = RECIPE.replace("TRANSFORMS", transforms).replace("METHOD", "rtn").replace("SPEC", INT8)
        path.write_text(text)
        with pytest.raises(error) as caught:
            quantize(tiny, str(path), tmp_path / "out")
        assert said in str(caught.value) + str(caught.value.why)
        assert not list(tmp_path.glob("out*"))


NF4 = "kind: nf, bits: 4, granularity: {strategy: block, size: 64}"


@pytest.mark.parametrize(("transforms", "method", "spec", "said"), [
    ("smoothquant", "rtn", INT8, ("transform smoothquant", "activations", "int8 channel sym", "awq")),
    ("awq, smoothquant", "gptq", INT8, ("transform smoothquant", "activations")),
    ("awq", "nf4", NF4, ("transform awq", "int or fp", "nf4 b64"))])
def test_a_transform_that_would_change_nothing_is_refused(tmp_path, transforms, method, spec, said):
    path = tmp_path / "idle.yaml"
    path.write_text(RECIPE.replace("TRANSFORMS", transforms).replace("METHOD", method).replace("SPEC", spec))
    with pytest.raises(RecipeError, match="would change nothing") as caught:
        quantize(str(tiny_model(tmp_path / "tiny")), str(path), tmp_path / "out")
    assert all(one in f"{caught.value.what} {caught.value.why}" for one in said)
    assert not list(tmp_path.glob("out*"))


def test_one_layer_is_enough_for_a_transform(tmp_path):
    path = tmp_path / "mixed.yaml"
    rule = f"rules:\n  - {{match: '*.q_proj', method: rtn, spec: {{{INT8}, activations: token}}}}"
    path.write_text(RECIPE.replace("TRANSFORMS", "smoothquant").replace("METHOD", "rtn").replace(
        "SPEC", INT8).replace("rules:", rule))
    assert make_plan(load_recipe(str(path)), open_source(str(tiny_model(tmp_path / "tiny")))).calibrated


def test_a_recipe_without_any_is_written_as_before():
    assert "transforms" not in load_recipe("int4").snapshot()
