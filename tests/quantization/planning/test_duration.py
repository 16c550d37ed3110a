"""The estimate of a run's time follows its work, and says nothing of what it can't know."""

import pytest

from quantkit.models.architecture import linear_slots, parse_config
from quantkit.quantization.planning import duration, steps
from quantkit.quantization.planning.duration import OPENING, SLOWEST, expected_seconds, operations
from quantkit.quantization.planning.plan import make_plan
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.sources.base import TensorInfo
from quantkit.sources.open import open_source
from tests.helpers import shapes


def plan(name: str | Recipe, model: str = "synthetic:llama-8b?seed=0&layers=2"):
    source = open_source(model)
    try:
        return make_plan(load_recipe(name) if isinstance(name, str) else name, source)
    finally:
        source.close()


class Sized(shapes.Source):
    """The shapes of a model that has been quantized with a clock beside it."""

    def __init__(self, **settings) -> None:
        super().__init__(tied=True)
        self.settings = {"max_position_embeddings": 2048, "vocab_size": 49152} | settings

    def tensors(self):
        config = parse_config(self.config())
        sizes = {f"{slot.name}.weight": (slot.out_features, slot.in_features)
                 for slot in linear_slots(config)}
        sizes |= {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
                  "model.norm.weight": (config.hidden_size,)}
        for index in range(config.num_layers):
            sizes |= {f"model.layers.{index}.{norm}.weight": (config.hidden_size,)
                      for norm in ("input_layernorm", "post_attention_layernorm")}
        return {name: TensorInfo(name, size, self.dtype) for name, size in sizes.items()}


SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3}
LARGE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
         "num_key_value_heads": 2}


@pytest.mark.parametrize(("settings", "name", "effort", "rate", "seconds"), [
    (SMALL, "nf4", None, 5e10, 6), (SMALL, "int8", None, 2e11, 2.8), (SMALL, "int4-rtn", None, 2e11, 2.6),
    (LARGE, "int4-rtn", None, 4.3e11, 24.5), (SMALL, "int4", None, 4.3e11, 39),
    (LARGE, "int4", None, 4.3e11, 650), (LARGE, "int4", "fast", 4.3e11, 154)])
def test_what_was_measured_is_within_the_range(settings, name, effort, rate, seconds, monkeypatch):
    """135M parameters on a core with AVX2 and on one and two with AVX-512, and 1.5B on two with AVX-512."""
    monkeypatch.setattr(steps, "native_bf16", lambda: rate > 1e11)
    expected = expected_seconds(make_plan(load_recipe(name, effort), Sized(**settings)), rate)
    assert expected is not None and expected.least <= seconds <= expected.most


def test_rounding_takes_a_small_part_of_what_solving_takes():
    fast, slow = (expected_seconds(plan(name), 1e11) for name in ("int4-rtn", "int4"))
    assert 0 < 20 * fast.least < slow.least


def test_it_follows_layers_tokens_and_the_machine():
    recipe = load_recipe("int4")
    low, high = expected_seconds(plan(recipe), 1e11)
    assert 0 < low < high < 10 * low
    twice = expected_seconds(plan(recipe), 2e11)
    assert twice.most == pytest.approx((high + SLOWEST * OPENING) / 2, rel=0.05)
    more = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"windows": 48})})
    assert low < expected_seconds(plan(more), 1e11)[0] < 2 * low
    four, six = (expected_seconds(plan(recipe, f"synthetic:llama-8b?seed=0&layers={layers}"), 1e11)[0]
                 for layers in (4, 6))
    assert 1.6 * low < four and six - four == pytest.approx(four - low, rel=0.02)
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
    monkeypatch.setattr(duration, "KNOWN_TRANSFORMS", {"smoothquant"})
    assert expected_seconds(plan("int4-awq"), 1e11) is None


def test_the_machine_is_measured():
    assert operations() > 1e8
