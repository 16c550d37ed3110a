"""How much time a run may take: ``effort: fast`` or ``best`` in a recipe, or ``--effort``.

An effort is resolved when a recipe is loaded, into the calibration and the options that a recipe could also
name itself. So plan, manifest and the identity by which a stopped run is gone on with say what was done. It
is kept in the recipe besides, which makes runs of different efforts different runs even where nothing else
differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from quantkit.plugins.manager import registry

if TYPE_CHECKING:
    from quantkit.quantization.methods.base import Method
    from quantkit.quantization.recipe import Candidate, Recipe

Effort = Literal["fast", "default", "best"]
Choice = TypeVar("Choice", bound="Candidate")
FAST_WINDOWS = 12
"""Windows of calibration text at most, when a run shall be fast."""
BEST_TIMES = 3
"""How many times as many windows calibrate, when the result shall be the best."""
EQUAL_TOKENS = {"importance": "equal"}
"""Spares the walks forward and backward that weigh tokens."""


def with_effort(recipe: Recipe, effort: Effort) -> Recipe:
    """The recipe with an effort resolved.

    Args:
        recipe: a recipe in which no other effort has been resolved.
        effort: ``default`` changes nothing. ``fast`` counts all tokens the same, takes at most
            :data:`FAST_WINDOWS` windows, and gives every method the options that it calls
            :attr:`~quantkit.quantization.methods.base.Method.quick`, whatever the recipe says there. ``best``
            takes :data:`BEST_TIMES` as many windows, and weighs tokens by as many more.
    """
    changes: dict[str, Any] = {"effort": effort}
    calibration = recipe.calibration
    if effort == "fast":
        changes |= {"rules": tuple(map(_quick, recipe.rules)),
                    "candidates": tuple(map(_quick, recipe.candidates))}
        if calibration is not None:
            windows = min(calibration.windows, FAST_WINDOWS)
            changes["calibration"] = calibration.model_copy(update=EQUAL_TOKENS | {"windows": windows})
    elif effort == "best" and calibration is not None:
        more = {name: BEST_TIMES * getattr(calibration, name) for name in ("windows", "importance_windows")}
        changes["calibration"] = calibration.model_copy(update=more)
    return recipe.model_copy(update=changes)


def _quick(choice: Choice) -> Choice:
    """The same by the quickest options of its method; a method that isn't there is refused when a plan is
    made."""
    methods = registry("methods")
    if choice.method is None or choice.method not in methods:
        return choice
    method: Method = methods.get(choice.method)
    return choice.model_copy(update={"options": {**choice.options, **method.quick}})
