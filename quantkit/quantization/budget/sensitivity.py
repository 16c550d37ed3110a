"""Predicts the divergence that each quantization of a Linear would cause, from two walks through the model.

To second order, the divergence of a model whose Linear's outputs are off by ``δ`` is ``½ δᵀ F δ``, with ``F``
the Fisher information of its answers there (:mod:`quantkit.quantization.calibration.importance`). Taken as
the same for all outputs and as independent from token to token, ``F`` is one number a token, ``f``, and the
mean over tokens becomes ``½ tr(ΔW H ΔWᵀ)`` with ``H`` the mean of ``f x xᵀ``: nats a token, so that layers
can be compared and added up, as in HAWQ-V2, https://arxiv.org/abs/1911.03852.

Every candidate is solved by its own method, a layer at a time, on what the *original* layers before it give.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.manifest import SourceRecord
from quantkit.checkpoint.writer import WORK, CheckpointWriter, WorkStore
from quantkit.formats.dtypes import FLOATS
from quantkit.models.architecture import EXPERT, parse_config
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, rotate_hessian
from quantkit.plugins.manager import current, registry
from quantkit.quantization.calibration.data import CalibrationData, correlation, prepare, write
from quantkit.quantization.calibration.finite import NonFiniteError, blame
from quantkit.quantization.calibration.importance import (
    BACKWARD,
    FORWARD,
    NEVER,
    WALKS,
    gradients,
    spread,
    token_gradients,
    weighed_windows,
    weighing_steps,
)
from quantkit.quantization.calibration.runner import LayerRunner, original_weights
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.memory import walks_bytes
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.grid import check_finite
from quantkit.quantization.planning.plan import WRITING, Plan, PlanRow
from quantkit.quantization.recipe import CalibrationSpec, Candidate, Recipe
from quantkit.runtime.loader import load_source
from quantkit.sources.base import ModelSource, release, tensor_alone
from quantkit.support.errors import CheckpointError, QuantkitError, Stopped
from quantkit.support.progress import Listener, Phases, ProgressEvent, silent
from quantkit_kernels.kept import cache_folder

VERSION = 3
"""The version of what is measured: another one finds nothing of what was kept."""
MEASURING = "measuring candidates"
"""The phase in which candidates are measured."""
ELSEWHERE = ("free some space, wait for another run to end, or keep what is measured elsewhere: "
             "QUANTKIT_CACHE=DIR quantkit quantize …")
TEXT = f"{WORK}text"
GRADIENTS = f"{WORK}gradients"
LAYER = f"{WORK}layer."
TINY = 1e-300
"""In place of the square of a matrix of zeros."""
Rows = Mapping[str, Mapping[int, PlanRow]]
"""By Linear, then by the candidate's number."""


def budget_phases(spec: CalibrationSpec) -> tuple[str, ...]:
    """The phases of measuring what each layer costs at each width."""
    return (*([WRITING] if spec.self_written else []), FORWARD, BACKWARD, MEASURING)


def sensitivities(source: ModelSource, plan: Plan, candidates: Sequence[Candidate], rows: Rows,
                  progress: Listener = silent) -> dict[str, dict[int, float]]:
    """The divergence that each candidate would cause in each Linear.

    Kept in the user's cache folder, layer by layer: a run that is stopped goes on where it was, and another
    budget for the same model, candidates and text measures nothing again.

    Args:
        plan: its recipe says which text.
        candidates: the candidates that are compared.
        rows: say what those that fit make of each Linear, in decoder layers.
        progress: called after each layer, forward and backward, then before it is measured; and at the end.

    Returns:
        By full name and the candidate's number: KL in nats a token. 0 for a candidate that keeps the layer.

    Raises:
        CalibrationError: the text is unusable, or a value isn't finite.
        QuantkitError: what was measured can't be kept.
        Stopped: interrupted; what was measured is kept.
    """
    run = _Run(source, plan, candidates, rows, progress)
    needed = walks_bytes(run.config, run.tokens, len(rows))
    try:
        with CheckpointWriter(_folder(run.identity), run.identity, needed_bytes=needed) as writer:
            return run(writer)
    except NonFiniteError as error:
        raise blame(error, run.data.origins if run.data else ()) from error
    except CheckpointError as error:
        raise CheckpointError(error.what, why=error.why, next=ELSEWHERE) from error
    except KeyboardInterrupt:
        raise Stopped(f"stopped; what was measured is kept in {_folder(run.identity)}.partial",
                      next="run the same command again to go on") from None


def weight_errors(source: ModelSource, rows: Rows,
                  progress: Listener = silent) -> dict[str, dict[int, float]]:
    """What stands for the divergence where the model's mathematics isn't known: ``‖ΔW‖² / ‖W‖²`` of each
    Linear, rounded to nearest. Its sum over a model grows in proportion to the loss where errors are small,
    https://arxiv.org/abs/2411.17525; the factors of single layers are taken as equal, since only running the
    model tells them. The experts of a layer count as one.

    Args:
        source: the model.
        rows: say what candidates make of each Linear.
        progress: called before each.

    Returns:
        By full name and the candidate's number. 0 for a candidate that keeps the layer.

    Raises:
        QuantkitError: a weight isn't finite.
    """
    experts = Counter(_beside(name) for name in rows)
    costs = {}
    for done, (name, choices) in enumerate(rows.items()):
        progress(ProgressEvent(done, len(rows), name))
        weight = tensor_alone(source, f"{name}.weight").float()
        check_finite(weight)
        norm = max(float(weight.square().sum(dtype=torch.float64)) * experts[_beside(name)], TINY)
        costs[name] = {index: _rounding_error(row, weight) / norm for index, row in choices.items()}
        release(source)
    progress(ProgressEvent(len(rows), len(rows), "measured"))
    return costs


def _beside(name: str) -> str:
    """The same for all experts of a layer."""
    head, expert, rest = name.partition(EXPERT)
    return head + expert + rest.partition(".")[2] if expert else name


def _rounding_error(row: PlanRow, weight: torch.Tensor) -> float:
    if row.method is None:
        return 0.0
    assert row.format and row.spec
    form = registry("formats").get(row.format)
    method = registry("methods").get("nf4" if row.spec.kind == "nf" else "rtn")
    codes = method.run(weight, None, row.spec, method.options())
    error = packing.dequantize(form, packing.pack(form, codes, FLOATS[row.dtype])) - weight
    return float(error.square_().sum(dtype=torch.float64))


class _Run:
    def __init__(self, source: ModelSource, plan: Plan, candidates: Sequence[Candidate], rows: Rows,
                 progress: Listener) -> None:
        spec = plan.recipe.calibration
        assert spec is not None
        self.source, self.plan = source, plan
        self.spec, self.rows = spec, rows
        self.phases = Phases(progress, budget_phases(spec))
        self.seed, self.tokens = spec.seed, spec.windows * spec.window
        widest = max(row.shape[1] for choices in rows.values() for row in choices.values())
        self.data = prepare(spec, source, widest, progress)
        self.config = parse_config(source.config())
        self.weights = original_weights(source)
        self.identity = _identity(source, plan.recipe, candidates, rows, self.data)

    def __call__(self, writer: CheckpointWriter) -> dict[str, dict[int, float]]:
        layers = range(self.config.num_layers)
        missing = [index for index in layers if not writer.has(f"{LAYER}{index}")]
        if missing:
            self._measure(writer, missing)
        writer.drop(GRADIENTS)
        losses_by_name = {name: losses.tolist() for index in layers
                          for name, losses in writer.get(f"{LAYER}{index}")[0].items()}
        self.phases(MEASURING)(ProgressEvent(len(layers), len(layers), "measured"))
        return {name: dict(zip(choices, losses_by_name[name], strict=True))
                for name, choices in self.rows.items()}

    def _measure(self, writer: CheckpointWriter, missing: Sequence[int]) -> None:
        if self.data is None and not writer.has(TEXT):
            model = load_source(self.source, self.weights.device)
            written = write(self.spec, self.source, model, self.weights, self.phases(WRITING))
            writer.put(TEXT, {"tokens": written}, [])
        tokens = self.data.tokens if self.data else writer.get(TEXT)[0]["tokens"]
        walks = WorkStore(writer, WALKS)
        windows = weighed_windows(len(tokens), self.spec.importance_windows)
        some = tokens[windows]
        if not writer.has(GRADIENTS):
            step = weighing_steps(self.phases, self.config.num_layers)
            wanted = list(self.rows)
            writer.put(GRADIENTS, gradients(
                self.source, self.plan.recipe.transforms, some, self.seed, wanted, self.weights.device,
                lambda: token_gradients(self.config, self.weights, some, wanted, self.seed, walks, step)), [])
        walks.clear()
        squares = writer.get(GRADIENTS)[0]
        weighed = {name: spread(squares_of_layer, windows, len(tokens))
                   for name, squares_of_layer in squares.items()}
        with Spill(writer.states) as states:
            runner = LayerRunner(self.config, self.weights, tokens, weighed, states,
                                 correlation=correlation(self.spec))
            for index in range(missing[-1] + 1):
                self.phases(MEASURING)(ProgressEvent(index, self.config.num_layers,
                                                     f"candidates in layer {index}",
                                                     kept=index not in missing))
                if index in missing:
                    writer.put(f"{LAYER}{index}", self._layer(index, runner, squares), [])
                if index < missing[-1]:
                    runner.advance(index, {})

    def _layer(self, index: int, runner: LayerRunner,
               squares: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name, rows in self.rows.items() if next(iter(rows.values())).layer == index]
        stats = runner.measure(index, {name: {"hessian"} for name in names})
        return {name: _losses(self.source, self.rows[name], stats[name], squares[name]) for name in names}


def _losses(source: ModelSource, choices: Mapping[int, PlanRow], stats: LayerStats,
            squares: torch.Tensor) -> torch.Tensor:
    """The losses of each candidate for one Linear, float64."""
    reached = squares[squares != NEVER]
    # the Hessian's weights are 1 on average: this is what a unit of them is
    unit = float(reached.sum(dtype=torch.float64)) / squares.numel()
    weight = tensor_alone(source, f"{next(iter(choices.values())).name}.weight")
    return torch.tensor([0.5 * unit * _loss(row, weight, stats) for row in choices.values()],
                        dtype=torch.float64)


def _loss(row: PlanRow, weight: torch.Tensor, stats: LayerStats) -> float:
    """``tr(ΔW H ΔWᵀ)`` of a weight as it would be stored."""
    if row.method is None:
        return 0.0
    assert row.format and row.spec and stats.hessian is not None
    method, form = registry("methods").get(row.method), registry("formats").get(row.format)
    exact, hessian = weight.float(), stats.hessian
    if row.spec.rotation:
        exact, hessian = apply_hadamard(exact), rotate_hessian(hessian)
    try:
        codes = method.run(exact, LayerStats(stats.tokens, hessian), row.spec,
                           method.options(**{**row.options, **method.quick}))
        error = packing.dequantize(form, packing.pack(form, codes, weight.dtype)) - exact
    except QuantkitError as fault:
        raise type(fault)(f"{row.name}: {fault.what}", why=fault.why, next=fault.next) from fault
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64).clamp(min=0))


def _identity(source: ModelSource, recipe: Recipe, candidates: Sequence[Candidate], rows: Rows,
              data: CalibrationData | None) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    assert recipe.calibration is not None
    return {"version": VERSION, "quantkit": __version__,
            "plugins": {plugin.distribution: plugin.version for plugin in current().plugins},
            "source": SourceRecord.of(source.identity()).model_dump(mode="json"),
            "transforms": [transform.model_dump(mode="json") for transform in recipe.transforms],
            "candidates": [candidate.model_dump(mode="json") for candidate in candidates],
            "rows": {name: sorted(choices) for name, choices in rows.items()},
            "calibration": recipe.calibration.without_folders().model_dump(mode="json"),
            "tokens": data.sha256 if data else None}


def _folder(identity: Mapping[str, Any]) -> Path:
    base = cache_folder()
    if base is None:
        raise QuantkitError("there is no folder to keep what is measured in", why="this user has no home",
                            next="name one: QUANTKIT_CACHE=DIR quantkit quantize …")
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return base.with_name("sensitivity") / digest[:32]
