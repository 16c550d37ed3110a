"""Efforts: what they change in a recipe, that a manifest says it, and that runs of two don't mix."""

from __future__ import annotations

import pytest

from quantkit.checkpoint.reader import read_manifest
from quantkit.quantization.effort import FAST_WINDOWS, with_effort
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.run import quantize
from quantkit.support.errors import CheckpointError, RecipeError, Stopped
from quantkit.testing import tiny_model

RECIPE = """
calibration: {windows: 4, window: 32, importance_windows: 2}
rules:
  - {match: lm_head, optional: true}
  - match: "*"
    method: gptq
    spec: {bits: 4, granularity: {strategy: group, size: 32}}
    options: {descent_passes: 6, damp: 0.1}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_fast_takes_the_quickest_options_and_leaves_the_others(recipe):
    fast, default = load_recipe(recipe, "fast"), load_recipe(recipe)
    assert default.effort == "default" and "effort" not in default.snapshot()
    assert fast.effort == fast.snapshot()["effort"] == "fast"
    options = fast.rules[1].options
    assert options["damp"] == 0.1 and options["descent_passes"] == options["refit"] == 0
    assert options["compare"] is False and fast.rules[0] == default.rules[0]
    assert fast.rules[1].spec == default.rules[1].spec
    assert with_effort(fast, "fast") == fast


def test_fast_takes_few_windows_unless_more_are_asked_for():
    many = load_recipe("int4", "fast").calibration
    assert many is not None and many.windows == FAST_WINDOWS < load_recipe("int4").calibration.windows
    assert load_recipe("int8", "fast").rules == load_recipe("int8").rules
    assert load_recipe("mixed", "fast").candidates[0].spec == load_recipe("mixed").candidates[0].spec


def test_best_calibrates_on_more_and_changes_nothing_else(recipe):
    best, default = load_recipe(recipe, "best"), load_recipe(recipe)
    assert (best.calibration.windows, best.calibration.importance_windows) == (12, 6)
    assert best.rules == default.rules and best.snapshot()["effort"] == "best"
    assert load_recipe("int8", "best").calibration is load_recipe("int8").calibration is None


def test_a_recipe_may_say_its_effort(tmp_path, recipe):
    path = tmp_path / "fast.yaml"
    path.write_text(f"effort: fast\n{RECIPE}")
    assert load_recipe(str(path)).rules == load_recipe(recipe, "fast").rules
    assert load_recipe(str(path), "default").rules == load_recipe(recipe).rules
    path.write_text(f"effort: furious\n{RECIPE}")
    with pytest.raises(RecipeError, match="effort"):
        load_recipe(str(path))


def test_a_method_that_is_not_there_is_refused_by_the_plan_and_not_here(tmp_path):
    path = tmp_path / "strange.yaml"
    path.write_text(RECIPE.replace("gptq", "nosuch"))
    assert load_recipe(str(path), "fast").rules[1].options == {"descent_passes": 6, "damp": 0.1}


def test_the_manifest_says_the_effort_and_what_it_meant(model, recipe, tmp_path):
    result = quantize(model, recipe, tmp_path / "out", effort="fast")
    snapshot = read_manifest(result.out).recipe
    assert snapshot["effort"] == "fast" and snapshot["rules"][1]["options"]["descent_passes"] == 0
    assert all(row.options["descent_passes"] == 0 for row in result.plan.rows if row.method)
    again = quantize(model, load_recipe(recipe), tmp_path / "again", effort="fast")
    assert (again.out / "model.safetensors").read_bytes() == (result.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("first", "second"), [("default", "fast"), ("fast", "best")])
def test_a_run_of_another_effort_does_not_take_over(model, recipe, tmp_path, stop_at, first, second):
    with pytest.raises(Stopped):
        quantize(model, recipe, tmp_path / "out", effort=first, progress=stop_at("layer 1"))
    with pytest.raises(CheckpointError, match="another run"):
        quantize(model, recipe, tmp_path / "out", effort=second)
    assert quantize(model, recipe, tmp_path / "out", effort=first).resumed == 1


def test_efforts_differ_even_where_nothing_else_does(model, tmp_path, stop_at):
    """Rounding has no quicker options."""
    with pytest.raises(Stopped):
        quantize(model, "int8", tmp_path / "out", progress=stop_at("layer 1"))
    with pytest.raises(CheckpointError, match="another run"):
        quantize(model, "int8", tmp_path / "out", effort="fast")
