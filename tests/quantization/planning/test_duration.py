"""The estimate of a run's time follows its work, and says nothing of what it can't know."""

import pytest

from quantkit.quantization.planning import duration
from quantkit.quantization.planning.duration import expected_seconds, operations
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.sources.open import open_source


def plan(name: str | Recipe, model: str = "synthetic:llama-8b?seed=0&layers=2"):
    source = open_source(model)
    try:
        return make_plan(load_recipe(name) if isinstance(name, str) else name, source)
    finally:
        source.close()


def test_rounding_takes_a_small_part_of_what_solving_takes():
    (fast, _), (slow, _) = (expected_seconds(plan(name), 1e11) for name in ("int4-rtn", "int4"))
    assert 0 < 20 * fast < slow


def test_it_follows_layers_tokens_and_the_machine():
    recipe = load_recipe("int4")
    low, high = expected_seconds(plan(recipe), 1e11)
    assert 0 < low < high < 10 * low
    assert expected_seconds(plan(recipe), 2e11)[0] == pytest.approx(low / 2)
    more = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"windows": 48})})
    assert low < expected_seconds(plan(more), 1e11)[0] < 2 * low
    assert expected_seconds(plan(recipe, "synthetic:llama-8b?seed=0&layers=4"), 1e11)[0] == pytest.approx(
        2 * low, rel=0.01)
    assert expected_seconds(plan("trellis4"), 1e11)[0] > low


def test_the_scales_that_awq_tries_take_time():
    with_awq, without = load_recipe("int4-awq"), load_recipe("int4-awq").model_copy(update={"transforms": ()})
    assert expected_seconds(plan(with_awq), 1e11)[0] > 1.2 * expected_seconds(plan(without), 1e11)[0] > 0


@pytest.mark.parametrize("change", [
    {"calibration": {"text": "self"}}, {"rules": [{"match": "*", "method": "autoround", "spec": {
        "bits": 4, "granularity": {"strategy": "group", "size": 64}}}]}])
def test_nothing_is_said_of_what_was_not_measured(change):
    recipe = Recipe.model_validate(load_recipe("int4").snapshot() | change, strict=False)
    assert expected_seconds(plan(recipe), 1e11) is None


def test_nothing_is_said_of_another_transform(monkeypatch):
    monkeypatch.setattr(duration, "KNOWN_TRANSFORMS", {"rotate"})
    assert expected_seconds(plan("int4-awq"), 1e11) is None


def test_the_machine_is_measured():
    assert operations() > 1e8
