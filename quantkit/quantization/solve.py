"""Quantizes and packs one Linear, in this process or on a cluster."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

import torch

from quantkit.checkpoint.manifest import FEW_TOKENS, LayerRow
from quantkit.executor.base import Executor, Item
from quantkit.formats.base import Format, QuantizedTensor
from quantkit.formats.finite import squares
from quantkit.formats.spec import QuantSpec
from quantkit.memory.quantize import batch_groups
from quantkit.models.architecture import EXPERT
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, rotate_hessian
from quantkit.ops.packing import with_one_outer
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.quantization.methods import parts
from quantkit.quantization.methods.base import LayerStats, Method
from quantkit.quantization.methods.grid import require_finite
from quantkit.quantization.methods.static_inputs import with_input_factor
from quantkit.quantization.planning.layers import PlanRow
from quantkit.quantization.planning.plan import with_own_head
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.transforms.apply import transformed
from quantkit.quantization.transforms.base import LayerTensors
from quantkit.sources.base import ModelSource, SourceIdentity, release
from quantkit.sources.open import open_source
from quantkit.support.errors import QuantkitError, SourceError


@dataclasses.dataclass(frozen=True)
class ModelOrigin:
    """A model, for a process that has to open it itself.

    Attributes:
        uri, revision: its name.
        recipe: that is applied to it.
        identity: what was planned; another is refused.
    """

    uri: str
    revision: str | None
    recipe: Recipe
    identity: SourceIdentity | None = None

    def __hash__(self) -> int:
        return hash((self.uri, self.revision, self.recipe.name))

    def open(self) -> ModelSource:
        """The model as the recipe sees it. Raises SourceError if there is none."""
        source = open_source(self.uri, self.revision)
        try:
            if self.identity is not None and source.identity() != self.identity:
                raise _another(self.uri, "model")
            return with_own_head(self.recipe, transformed(self.recipe.transforms, source))
        except BaseException:
            source.close()
            raise


Solved = tuple[QuantizedTensor, LayerRow]


def solve(plans: Sequence[PlanRow], dtype: torch.dtype,
          *tensors_and_stats: torch.Tensor | LayerStats | None) -> list[Solved]:
    """Linears by their method, in their format, and their rows of the manifest.

    Args:
        plans: what is to be done: one, or several that differ in their names only.
        dtype: in which the model stores them.
        tensors_and_stats: their weights ``[out, in]``, of any floating dtype, which aren't written to; then
            as many statistics of their inputs, ``None`` if the method needs none.

    Raises:
        QuantkitError: of method or format, with a Linear's name.
    """
    exacts = [item for item in tensors_and_stats[:len(plans)] if isinstance(item, torch.Tensor)]
    stats = [item if isinstance(item, LayerStats) else None for item in tensors_and_stats[len(plans):]]
    plan, spec = plans[0], plans[0].spec
    assert plan.method and plan.format and spec
    method: Method = registry("methods").get(plan.method)
    form: Format = registry("formats").get(plan.format)
    options = method.options(**plan.options)
    device = _place(spec, stats)
    stats = [stat and stat.to(device) for stat in stats]
    if spec.rotation:
        stats = [stat and _rotated(stat) for stat in stats]
    results: list[tuple[QuantizedTensor, float, tuple[str, ...]]] = []
    blamed = everyone = plan.name if len(plans) == 1 else f"{plan.name} … {plans[-1].name}"
    try:
        if plan.layer is None and parts.rows_at_once(spec, plan.shape) < plan.shape[0]:
            results = [parts.solve(exact, method, form, stat, spec, options)
                       for exact, stat in zip(exacts, stats, strict=True)]
        else:
            exacts = [exact.to(device).float() for exact in exacts]
            for plan, exact in zip(plans, exacts, strict=True):
                blamed = plan.name
                require_finite(exact)
            blamed = everyone
            if spec.rotation:
                exacts = [apply_hadamard(exact) for exact in exacts]
            codes_together = method.run_together(exacts, stats, spec, options)
            for exact in exacts:
                codes = with_input_factor(codes_together.pop(0), stats[len(results)])
                result, notes = packing.pack(form, codes, dtype), codes.notes
                del codes
                off = squares(packing.dequantize(form, result).sub_(exact)) / max(squares(exact), 1e-60)
                packing.require_finite_error(form, off)
                results.append((result.to(torch.device("cpu")), off ** 0.5, notes))
    except QuantkitError as error:
        raise type(error)(f"{blamed}: {error.what}", why=error.why, next=error.next) from error
    rows = []
    for plan, (_, off, notes), stat in zip(plans, results, stats, strict=True):
        tokens = None
        if stat is not None:
            tokens, notes = stat.tokens, stat.notes + _few(plan.name, stat) + notes
        rows.append(plan.recorded(error=off, tokens=tokens, notes=notes))
    return [(result, row) for (result, _, _), row in zip(results, rows, strict=True)]


def solve_rows(rows: Sequence[PlanRow], layer: LayerTensors, needs: Container[str],
               executor: Executor) -> Iterator[Solved]:
    """Quantized Linears in order; statistics are taken out of ``layer`` and go with their last user.

    Args:
        rows: the plan's, of one unit or a part of it.
        layer: their weights and statistics.
        needs: names of those whose methods need statistics.
        executor: where they are solved.
    """
    groups = batch_groups(rows, needs)
    waiting: dict[str, Solved] = {}
    solved = itertools.chain.from_iterable(executor.map(solve, _unsolved(groups, layer, executor)))
    for names in fused([row for row in rows if row.method]):
        while not waiting.keys() >= set(names):
            solution = next(solved)
            waiting[solution[1].name] = solution
        yield from _with_one_outer([waiting.pop(name) for name in names])


def fused(rows: Sequence[PlanRow]) -> list[list[str]]:
    """Names of Linears in order, those together that see the same input and whose scales are multiples of a
    number of the tensor's, which engines want to be one for all of them."""
    groups: list[list[str]] = []
    last = None
    for row in rows:
        assert row.spec is not None
        key = (row.shares, row.format) if row.spec.scale_dtype == "e4m3" else None
        if key is not None and key == last:
            groups[-1].append(row.name)
        else:
            groups.append([row.name])
        last = key
    return groups


def _with_one_outer(solved: Sequence[Solved]) -> list[Solved]:
    packed = with_one_outer([result for result, _ in solved])
    return [(result, row) for result, (_, row) in zip(packed, solved, strict=True)]


def solve_stages(rows: Sequence[PlanRow], layer: LayerTensors, needs: Mapping[str, Collection[str]],
                 executor: Executor, runner: LayerRunner, on: bool) -> Iterator[Solved]:
    """A decoder layer's Linears in order, each stage measured behind those before it as they are stored.

    Args:
        rows: of the layer, which is the runner's next.
        layer: their weights.
        needs: statistics that their methods need, by name.
        executor: where they are solved.
        runner: measures; its hidden states go on from stage to stage.
        on: also through the last one.

    Raises:
        NonFiniteError: while measuring; sample, layer and tensor are named.
        QuantkitError: of method or format, with the Linear's name.
    """
    for stage in runner.stages(runner.next):
        stage_rows = [row for row in rows if row.name in stage.linears and row.method]
        names = [row.name for row in stage_rows]
        wanted = {name: needs[name] for name in names if name in needs}
        layer.stats.update(runner.measure_stage(stage, wanted))
        runner.forget(names)
        solved = list(solve_rows(stage_rows, layer, needs, executor))
        if on or not stage.last:
            runner.advance_stage(stage, {row.name: result for result, row in solved})
        yield from solved


def _unsolved(groups: Iterable[tuple[PlanRow, ...]], layer: LayerTensors,
              executor: Executor) -> Iterator[Item]:
    last, put = None, None
    for group in groups:
        stats = []
        for row in group:
            layer_stats = layer.stats.pop(row.name, None)
            if layer_stats is not last:  # Linears that share statistics follow each other
                last, put = layer_stats, None if layer_stats is None else executor.put(layer_stats)
            stats.append(put)
        yield group[0].name, (group, *layer.weights([f"{row.name}.weight" for row in group]), *stats)


def _place(spec: QuantSpec, stats: Sequence[LayerStats | None]) -> torch.device:
    """Where the statistics are, an unreached expert's aside; trellises are solved by kernels for CPUs."""
    cpu = torch.device("cpu")
    return cpu if spec.kind == "trellis" else next(
        (stat.device for stat in stats if stat and stat.device != cpu), cpu)


def _rotated(stats: LayerStats) -> LayerStats:
    hessian, drift = stats.hessian, stats.drift
    return dataclasses.replace(stats, hessian=None if hessian is None else rotate_hessian(hessian),
                               drift=None if drift is None else rotate_hessian(drift, symmetric=False))


def solve_data_free(origin: ModelOrigin, plans: tuple[PlanRow, ...]) -> list[Solved]:
    """Linears whose methods need no statistics, of a model that is opened here: one tensor at a time.

    Raises:
        SourceError: the model is not the one that was planned.
        QuantkitError: of method or format, with the Linear's name.
    """
    source = _opened(origin)
    results: list[Solved] = []
    for plan in plans:
        name = f"{plan.name}.weight"
        info = source.tensors().get(name)
        if info is None or (tuple(info.shape), f"torch.{plan.dtype}") != (plan.shape, str(info.dtype)):
            raise _another(origin.uri, name)
        weight = source.tensor(name)
        results += solve([plan], weight.dtype, weight, None)
        del weight
        release(source)
    groups = fused(plans)
    for names in groups:
        results += _with_one_outer(results[:len(names)])
        del results[:len(names)]
    return results


def _another(uri: str, what: str) -> SourceError:
    return SourceError(f"{uri} has another {what} where a worker opened it",
                       why="the model must be the same for all processes",
                       next="give a path that all nodes share, or a model on the hub with its commit")


@functools.lru_cache(maxsize=1)
def _opened(origin: ModelOrigin) -> ModelSource:
    return origin.open()


def _few(name: str, stats: LayerStats) -> tuple[str, ...]:
    """A note on an expert that the router hardly ever chose."""
    if EXPERT not in name or stats.tokens >= FEW_TOKENS:
        return ()
    return (f"only {stats.tokens} calibration tokens reached this expert",)


def stored_weight(plan: PlanRow, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The packed weight of a finished unit, from all of the unit's tensors by full name."""
    assert plan.format and plan.spec
    prefix = f"{plan.name}."
    unit_tensors = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    unit_tensors.pop("bias", None)
    return QuantizedTensor(plan.format, plan.spec, plan.shape, getattr(torch, plan.dtype), unit_tensors)
