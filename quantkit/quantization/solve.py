"""Quantizes and packs Linears, in this process or on a cluster.

A weight with very many rows, such as the head of a large vocabulary, is solved some rows at a time. Rows
don't depend on one another: under one Hessian each has a loss of its own. What is in memory in float32 is a
part; of the rest there are codes, a byte a weight, until they are packed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.checkpoint.dequantized import open_weights
from quantkit.checkpoint.manifest import FEW_TOKENS, LayerRow
from quantkit.executor.base import Executor, Item
from quantkit.formats import e2m1, e4m3
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.finite import squares
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EXPERT
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, rotate_hessian
from quantkit.ops.packing import with_one_outer
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.runner import CalibrationRunner, StageT
from quantkit.quantization.memory import batch_groups, rows_at_once
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import check_finite
from quantkit.quantization.planning.plan import PlanRow
from quantkit.quantization.planning.steps import LayerProgress
from quantkit.quantization.recipe import Recipe
from quantkit.quantization.transforms.base import LayerTensors, check_transforms, transformed, with_own_head
from quantkit.sources.base import ModelSource, SourceIdentity, release
from quantkit.support.errors import CalibrationError, QuantkitError, SourceError

UNREACHED_FACTOR = 1.0
"""The input factor of an expert that no calibration token has reached."""


@dataclass(frozen=True)
class ModelOrigin:
    """A model, for a process that has to open it itself.

    Attributes:
        revision: the commit or tag of a hub model.
        recipe: the recipe that is applied to it.
        identity: the identity of the model that was planned; another one is refused.
    """

    uri: str
    revision: str | None
    recipe: Recipe
    identity: SourceIdentity | None = None

    def __hash__(self) -> int:
        return hash((self.uri, self.revision, self.recipe.name))

    def open(self) -> ModelSource:
        """The model as the recipe sees it. Raises SourceError if there is none."""
        source = open_weights(self.uri, self.revision)
        try:
            if self.identity is not None and source.identity() != self.identity:
                raise _another(self.uri, "model")
            check_transforms(self.recipe, source)
            return with_own_head(self.recipe, transformed(self.recipe.transforms, source))
        except BaseException:
            source.close()
            raise


Solved = tuple[QuantizedTensor, LayerRow]
"""A packed weight, and its row of the manifest."""


@dataclass(frozen=True)
class Packed:
    """A weight as it is stored.

    Attributes:
        tensor: the packed weight.
        error: ``‖W − Ŵ‖ / ‖W‖``.
        notes: every fallback taken, once.
    """

    tensor: QuantizedTensor
    error: float
    notes: tuple[str, ...]


def solve(plans: Sequence[PlanRow], dtype: torch.dtype,
          *tensors_and_stats: torch.Tensor | LayerStats | None) -> list[Solved]:
    """Quantize Linears by their method and pack them in their format.

    Args:
        plans: their rows of the plan: one, or several that differ in their names only.
        dtype: the dtype in which the model stores them.
        tensors_and_stats: their weights ``[out, in]``, of any floating dtype, which aren't written to; then
            as many statistics of their inputs, ``None`` if the method needs none.

    Raises:
        QuantkitError: of method or format, with a Linear's name.
    """
    weights = [item for item in tensors_and_stats[:len(plans)] if isinstance(item, torch.Tensor)]
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
    packed: list[Packed] = []
    blamed = everyone = plan.name if len(plans) == 1 else f"{plan.name} … {plans[-1].name}"
    try:
        if plan.layer is None and rows_at_once(spec, plan.shape) < plan.shape[0]:
            packed = [solve_by_parts(weight, method, form, stat, spec, options)
                      for weight, stat in zip(weights, stats, strict=True)]
        else:
            weights = [weight.to(device).float() for weight in weights]
            for plan, weight in zip(plans, weights, strict=True):
                blamed = plan.name
                check_finite(weight)
            blamed = everyone
            weights = [_exact(weight, spec) for weight in weights]
            batch = method.run_batch(weights, stats, spec, options)
            for weight, stat in zip(weights, stats, strict=True):
                codes = with_input_factor(batch.pop(0), stat)
                tensor, notes = packing.pack(form, codes, dtype), codes.notes
                del codes
                off = squares(packing.dequantize(form, tensor).sub_(weight)) / max(squares(weight), 1e-60)
                packing.check_finite_error(form, off)
                packed.append(Packed(tensor.to(torch.device("cpu")), off ** 0.5, notes))
    except QuantkitError as error:
        raise type(error)(f"{blamed}: {error.what}", why=error.why, next=error.next) from error
    return [(result.tensor, _recorded(plan, result, stat))
            for plan, result, stat in zip(plans, packed, stats, strict=True)]


def _recorded(plan: PlanRow, result: Packed, stats: LayerStats | None) -> LayerRow:
    if stats is None:
        return plan.recorded(error=result.error, notes=result.notes)
    notes = stats.notes
    if EXPERT in plan.name and stats.tokens < FEW_TOKENS:  # the router hardly ever chose it
        notes += (f"only {stats.tokens} calibration tokens reached this expert",)
    return plan.recorded(error=result.error, tokens=stats.tokens, notes=notes + result.notes)


def solve_by_parts(weight: torch.Tensor, method: Method, form: Format, stats: LayerStats | None,
                   spec: QuantSpec, options: MethodOptions) -> Packed:
    """Quantize and pack ``weight`` ``[out, in]``, of any floating dtype, some rows at a time; ``stats`` are
    rotated if the spec says so."""
    step = rows_at_once(spec, (weight.shape[0], weight.shape[1]))
    device = stats.device if stats else weight.device
    results = [method.run(_exact(part.to(device), spec), stats, spec, options).to(weight.device)
               for part in weight.split(step)]
    codes = Codes.joined(results, tuple(dict.fromkeys(note for result in results for note in result.notes)))
    del results
    codes = with_input_factor(codes, stats)
    packed = packing.pack(form, codes, weight.dtype)
    off = of = 0.0
    rows: Any = getattr(form, "rows", None)
    stored = packing.dequantize(form, packed) if rows is None else None
    for start in range(0, weight.shape[0], step):
        part = _exact(weight[start:start + step], spec)
        back = rows(packed, torch.arange(start, start + len(part))) if stored is None else stored[
            start:start + step]
        off += squares(back - part)
        of += squares(part)
    packing.check_finite_error(form, off)
    return Packed(packed, (off / max(of, 1e-60)) ** 0.5, codes.notes)


def _exact(part: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What is quantized, float32: rotated if the spec says so."""
    exact = part.float()
    return apply_hadamard(exact) if spec.rotation else exact


def with_input_factor(codes: Codes, stats: LayerStats | None) -> Codes:
    """The codes with ``input_factor``, if their spec has ``static_inputs``; else as they are.

    It is the one number of a Linear's inputs that NVFP4's activations need before a model runs. A token's
    groups get e4m3 scales as they come. What those are multiples of is the layer's, and found in calibration,
    so that the largest group has a scale near e4m3's largest number, 448.

    The number is the largest power of 2 with which the largest input keeps below e4m3's range. Larger inputs
    than calibration's are clipped, so a power of 2, rounded down, leaves them room, half a binade on average.

    Raises:
        CalibrationError: nothing was measured.
    """
    if not codes.spec.static_inputs:
        return codes
    if stats is None or stats.largest is None:
        raise CalibrationError(f"{codes.spec.label()} was given no sizes of its inputs",
                               why="its activations' scales are multiples of a number that is calibrated",
                               next="add a calibration section to the recipe")
    largest = stats.largest.max().reshape(1, 1)
    quotient = e2m1.LARGEST * e4m3.LARGEST / largest
    power = torch.ldexp(torch.ones_like(quotient), torch.frexp(quotient).exponent - 1)
    usable = (largest > 0) & torch.isfinite(quotient)
    factor = torch.where(usable, power, UNREACHED_FACTOR).to(codes.codes.device)
    return dataclasses.replace(codes, input_factor=factor)


def solve_rows(rows: Sequence[PlanRow], layer: LayerTensors, needs: Container[str],
               executor: Executor) -> Iterator[Solved]:
    """Quantized Linears in order; statistics are taken out of ``layer`` and go with their last user.

    Args:
        rows: the plan's rows of one unit, or some of them.
        layer: has their weights and statistics.
        needs: the names of those whose methods need statistics.
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
                 executor: Executor, runner: CalibrationRunner[StageT], advance: bool,
                 progress: LayerProgress) -> Iterator[Solved]:
    """A decoder layer's Linears in order, each stage measured behind those before it as they are stored.

    Args:
        rows: the plan's rows of the layer, which is the runner's next.
        layer: has their weights.
        needs: the statistics that their methods need, by name.
        runner: measures their inputs; its hidden states go on from stage to stage.
        advance: whether the hidden states also go through the last stage.
        progress: hears of each step.

    Raises:
        NonFiniteError: while measuring; sample, layer and tensor are named.
        QuantkitError: of method or format, with the Linear's name.
    """
    for stage in runner.stages(runner.next):
        stage_rows = [row for row in rows if row.name in stage.linears and row.method]
        names = [row.name for row in stage_rows]
        wanted = {name: needs[name] for name in names if name in needs}
        progress.measuring(names)
        layer.stats.update(runner.measure_stage(stage, wanted))
        progress.measured(names)
        runner.forget(names)
        solved = list(progress.solving(solve_rows(stage_rows, layer, needs, executor), names))
        if advance or not stage.last:
            runner.advance_stage(stage, {row.name: result for result, row in solved})
        progress.walked(names)
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


def stored_weight(plan: PlanRow, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The packed weight of a finished unit, from all of the unit's tensors by full name."""
    assert plan.format and plan.spec
    prefix = f"{plan.name}."
    unit_tensors = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    unit_tensors.pop("bias", None)
    return QuantizedTensor(plan.format, plan.spec, plan.shape, getattr(torch, plan.dtype), unit_tensors)
