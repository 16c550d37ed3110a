"""Finds a recipe's recovery and its options, and refuses what it can't train, before any work."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.models.config import ModelConfig
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.options import checked_options
from quantkit.quantization.planning.layers import PlanRow
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.recovery.base import Recovery
from quantkit.quantization.recovery.scaled import refuses
from quantkit.quantization.recovery.windows import refuses_text
from quantkit.quantization.specs import RecoverySpec
from quantkit.quantization.transforms.apply import resolve as resolve_transforms
from quantkit.support.errors import RecipeError


def resolve(spec: RecoverySpec) -> tuple[Recovery, MethodOptions]:
    """The recovery with its options. Raises UsageError for an unknown one, RecipeError for options."""
    recovery: Recovery = registry("recoveries").get(spec.name)
    return recovery, checked_options(f"recovery {spec.name}", recovery.options, spec.options)


def check(recipe: Recipe, rows: Sequence[PlanRow], config: ModelConfig) -> None:
    """Raise RecipeError if the recipe has a recovery that can't train what the plan makes, UsageError if it
    names an unknown one.

    Args:
        recipe: with its calibration filled in.
        rows: of the plan.
        config: the model's.
    """
    if recipe.recover is None:
        return
    recovery, _ = resolve(recipe.recover)
    if (why := _refusal(recipe, rows, config)) is not None:
        raise RecipeError(f"recipe {recipe.name!r} can't be recovered by {recovery.name}", why=why,
                          next="leave 'recover' out of the recipe")


def _refusal(recipe: Recipe, rows: Sequence[PlanRow], config: ModelConfig) -> str | None:
    inside = [row for row in rows if row.layer is not None and row.spec is not None]
    if not inside:
        return "no Linear of a decoder layer is quantized"
    if config.experts is not None:
        return "a layer of experts sends each token another way in training than in the original"
    changing = [transform.name for transform, _ in resolve_transforms(recipe.transforms) if transform.layer]
    if changing:
        return f"transform {changing[0]} changes layers and their norms while they are measured"
    for row in inside:
        assert row.spec is not None
        if (why := refuses(row.spec, row.shape)) is not None:
            return f"{row.name}: {why}"
    return None if recipe.calibration is None else refuses_text(recipe.calibration)
