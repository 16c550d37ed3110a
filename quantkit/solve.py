"""Weights solved and packed: what a run repeats for every Linear, wherever that happens."""

from __future__ import annotations

import dataclasses
import functools

import torch

from quantkit.calibrate.runner import EXPERT
from quantkit.checkpoint.manifest import LayerRow
from quantkit.errors import QuantkitError, SourceError
from quantkit.formats.base import Format, QuantizedTensor
from quantkit.methods import parts
from quantkit.methods.base import LayerStats, Method
from quantkit.ops.rotation import rotate, rotate_form
from quantkit.plan import with_own_head
from quantkit.plugins import registry
from quantkit.recipe import Recipe
from quantkit.rows import PlanRow
from quantkit.sources.base import ModelSource, open_source, release
from quantkit.transforms.apply import transformed

FEW_TOKENS = 128
"""Of fewer an expert's Hessian says little."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A model, for a process that has to open it itself."""

    uri: str
    revision: str | None
    recipe: Recipe

    def __hash__(self) -> int:
        return hash((self.uri, self.revision, self.recipe.name))

    def open(self) -> ModelSource:
        """The model as the recipe sees it. Raises SourceError if there is none."""
        source = open_source(self.uri, self.revision)
        try:
            return with_own_head(self.recipe, transformed(self.recipe.transforms, source))
        except BaseException:
            source.close()
            raise


def solve(plan: PlanRow, exact: torch.Tensor, dtype: torch.dtype,
          stats: LayerStats | None) -> tuple[QuantizedTensor, LayerRow]:
    """One Linear by its method, in its format, and its row of the manifest.

    Args:
        plan: what is to be done.
        exact: ``[out, in]``, any floating dtype; not written to.
        dtype: in which the model stores it.
        stats: of the Linear's input, if its method needs them.

    Raises:
        QuantkitError: of method or format, with the Linear's name.
    """
    assert plan.method and plan.format and plan.spec
    method: Method = registry("methods").get(plan.method)
    form: Format = registry("formats").get(plan.format)
    options = method.options(**plan.options)
    if plan.spec.rotation and stats is not None and stats.hessian is not None:
        stats = dataclasses.replace(stats, hessian=rotate_form(stats.hessian))
    try:
        if plan.layer is None and parts.rows_at_once(plan.spec, plan.shape) < plan.shape[0]:
            result, loss, notes = parts.solve(exact, method, form, stats, plan.spec, options)
        else:
            exact = rotate(exact.float()) if plan.spec.rotation else exact.float()
            codes = method.run(exact, stats, plan.spec, options)
            result, notes = form.pack(codes, dtype), codes.notes
            del codes
            loss = float(form.dequantize(result).sub_(exact).norm() / exact.norm().clamp(min=1e-30))
    except QuantkitError as error:
        raise type(error)(f"{plan.name}: {error.what}", why=error.why, next=error.next) from error
    tokens = None
    if stats is not None:
        tokens, notes = stats.tokens, stats.notes + _few(plan.name, stats) + notes
    return result, LayerRow.of(plan, error=loss, tokens=tokens, notes=notes)


def solve_data_free(origin: Origin, plans: tuple[PlanRow, ...]) -> list[tuple[QuantizedTensor, LayerRow]]:
    """Linears whose methods need no statistics, of a model that is opened here: one tensor at a time.

    Raises:
        SourceError: the model is not the one that was planned.
        QuantkitError: of method or format, with the Linear's name.
    """
    source, made = _opened(origin), []
    for plan in plans:
        name = f"{plan.name}.weight"
        info = source.tensors().get(name)
        if info is None or (tuple(info.shape), f"torch.{plan.dtype}") != (plan.shape, str(info.dtype)):
            raise SourceError(f"{origin.uri} has another {name} where a worker opened it",
                              why="the model must be the same for all processes",
                              next="give a path that all nodes share, or a model on the hub with its commit")
        weight = source.tensor(name)
        made.append(solve(plan, weight, weight.dtype, None))
        del weight
        release(source)
    return made


@functools.lru_cache(maxsize=1)
def _opened(origin: Origin) -> ModelSource:
    return origin.open()


def _few(name: str, stats: LayerStats) -> tuple[str, ...]:
    """A note on an expert that the router hardly ever chose."""
    if EXPERT not in name or stats.tokens >= FEW_TOKENS:
        return ()
    return (f"only {stats.tokens} calibration tokens reached this expert",)
