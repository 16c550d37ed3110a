"""Quantizes a model: source × recipe → checkpoint, one decoder layer at a time.

Every decoder layer is a *unit*: read, measured, solved, packed and made durable before the next one
is touched. A run that is stopped at any instant and started again keeps the units that are on disk,
pushes the calibration text through them, and ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.assemble import AROUND
from quantkit.checkpoint.manifest import (
    CalibrationFacts,
    LayerRow,
    Manifest,
    OuterRecord,
    RecoveryRecord,
    SourceRecord,
)
from quantkit.checkpoint.reader import read_manifest
from quantkit.checkpoint.shards import LazyTensor
from quantkit.checkpoint.writer import WORK, CheckpointWriter, WorkStore, refuse_existing
from quantkit.executor.base import Executor
from quantkit.executor.ray import make_executor
from quantkit.formats.base import QuantizedTensor
from quantkit.models.architecture import EMBEDDING
from quantkit.models.linear import Weights
from quantkit.ops.cpu_machine import trim_heap
from quantkit.ops.reference import fast_float32
from quantkit.plugins.manager import current, registry
from quantkit.quantization.calibration.data import (
    calibration_facts,
    correlation,
    prepare,
    self_written_data,
    write,
)
from quantkit.quantization.calibration.finite import NonFiniteError, blame
from quantkit.quantization.calibration.importance import (
    WALKS,
    gradients,
    spread,
    token_gradients,
    weighed_windows,
    weighing_steps,
)
from quantkit.quantization.calibration.module_runner import ModuleRunner
from quantkit.quantization.calibration.runner import CalibrationRunner, LayerRunner, original_weights
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.effort import Effort, with_effort
from quantkit.quantization.memory import AROUND_UNIT, EMBEDDING_UNIT, REST_UNIT, PlanRow, layer_unit
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.planning.plan import (
    ASSEMBLING,
    QUANTIZING,
    WRITING,
    Plan,
    checked_outline,
    make_plan,
)
from quantkit.quantization.planning.steps import LayerProgress
from quantkit.quantization.recipe import CalibrationSpec, Recipe, load_recipe
from quantkit.quantization.recovery import RecoveryJob, find_recovery, read_recovery_text
from quantkit.quantization.solve import (
    ModelOrigin,
    Solved,
    solve_data_free,
    solve_rows,
    solve_stages,
    stored_weight,
)
from quantkit.quantization.transforms.base import LayerTensors, apply_to_layer, resolve_transforms
from quantkit.runtime.loader import load_source
from quantkit.sources.base import ModelSource, outer_of, prefetch, release, tensor_alone, warn_if_quantized
from quantkit.sources.causal_lm import config_around
from quantkit.support.device import find_device
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.support.progress import Listener, Phases, ProgressEvent, silent

IMPORTANCE = f"{WORK}importance"
WRITTEN_TEXT = f"{WORK}text"
"""Units of the run that aren't part of the checkpoint: each token's importance, and text that the model
wrote."""


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made.

    Attributes:
        out: the checkpoint's folder.
        plan: says what was to be done; it is exact in bits and bytes.
        rows: say what was done, a row a Linear.
        fallbacks: every note of every row, with its layer's name, and that on the calibration text.
        resumed: the number of units that an earlier attempt had finished.
        seconds: the time that this attempt took.
        calibration: describes what the calibrated methods saw, if there were any.
        recovery: says what training of scales and norms came to, if the recipe asks for it.
    """

    out: Path
    plan: Plan
    rows: tuple[LayerRow, ...]
    fallbacks: tuple[str, ...]
    resumed: int
    seconds: float
    calibration: CalibrationFacts | None = None
    recovery: RecoveryRecord | None = None

    def to_dict(self) -> dict[str, Any]:
        facts = self.calibration.model_dump(mode="json") if self.calibration else None
        recovery = {"recovery": self.recovery.model_dump(mode="json")} if self.recovery else {}
        return {"out": str(self.out), "bits_per_weight": self.plan.bits_per_weight,
                "tensor_bytes": self.plan.disk_bytes, "resumed_units": self.resumed,
                "seconds": self.seconds, "fallbacks": list(self.fallbacks), "calibration": facts,
                "layers": [row.to_dict() for row in self.rows]} | recovery


def quantize(uri: str, recipe: str | Recipe, out: str | Path, *, revision: str | None = None,
             calibration: CalibrationSpec | None = None, strict: bool = False,
             progress: Listener = silent, executor: str | Executor = "local",
             device: str = "cpu", effort: Effort | None = None) -> QuantizeResult:
    """Quantize a model into a checkpoint folder.

    Args:
        uri: names the model: a folder, hub name, ``.gguf`` file, ``pkg:NAME``, ``synthetic:NAME``.
        recipe: a recipe's name, a YAML file, or what one of them was loaded as.
        out: the folder to make; nothing may be there.
        revision: commit or tag, for a hub model.
        calibration: replaces the recipe's calibration.
        strict: a fallback is an error.
        progress: called before each unit and once at the end.
        executor: solves the Linears: ``local``, ``ray``, or one that stays open.
        device: the device on which calibrated recipes compute: ``cpu``, ``cuda``, or ``auto``.
        effort: how much time the run may take, in place of what a recipe says that is named; see
            :mod:`quantkit.quantization.effort`.

    Warns:
        UserWarning: of what is bad about the calibration data, of sources that aren't pinned, and of a model
            that is quantized already.

    Raises:
        QuantkitError: whatever is wrong with model, recipe, options, disk or values; everything
            that can be known in advance is found before any work.
        Stopped: interrupted; the finished layers are kept.
    """
    start = time.monotonic()
    refuse_existing(out, uri)
    place = find_device(device)
    if isinstance(recipe, str):
        recipe = load_recipe(recipe, effort)
    elif effort is not None:
        recipe = with_effort(recipe, effort)
    if calibration is not None:
        recipe = recipe.model_copy(update={"calibration": calibration})
    origin = ModelOrigin(uri, revision, recipe)
    with ExitStack() as ends:
        source = ends.enter_context(closing(origin.open()))
        plan = make_plan(recipe, source)
        warn_if_quantized(source)
        if isinstance(executor, str):
            executor = ends.enter_context(closing(make_executor(executor, place)))
        ends.enter_context(fast_float32())
        result = _Run(source, plan, Path(out), strict, progress, origin, executor, place)(start)
    current().notify("on_run_finished", kind="quantize", summary=result.to_dict())
    return result


class _Run:
    """One attempt at a run: what it reads before any work, and the order of its work."""

    def __init__(self, source: ModelSource, plan: Plan, out: Path, strict: bool,
                 progress: Listener, origin: ModelOrigin, executor: Executor, device: torch.device) -> None:
        self.source = source
        self.plan = plan
        self.out = out
        self.strict = strict
        self.phases = Phases(progress, plan.phases)
        self.origin = origin
        self.executor = executor
        self.device = device
        self.raw_config = source.config()
        self.outline, self.outer = checked_outline(source), outer_of(source)
        self.read = partial(tensor_alone, source)
        # what stays as it is would else be read, and found to hold NaN, when the work is done
        for name in (*plan.other, *(f"{row.name}.weight" for row in plan.rows if row.method is None)):
            self.read(name)
        if self.outer is not None:
            for name in self.outer.rest:
                self.outer.read(name)
        release(source)
        self.data = prepare(plan.calibration, source, plan.widest_hessian, progress, strict)
        self.recovery = find_recovery(plan.recipe)
        self.job = None
        if (text := read_recovery_text(plan.recipe, source, self.data, progress, strict)) is not None:
            self.job = RecoveryJob(plan.recipe, plan.rows, plan.other, source, self.weights(), text,
                                   self.phases, strict)

    def __call__(self, start: float) -> QuantizeResult:
        manifest = self._manifest()
        with CheckpointWriter(self.out, self._identity(manifest),
                              needed_bytes=self.plan.needed_disk_bytes) as writer:
            units = _UnitMaker(self, writer)
            resumed = len(writer.units())
            try:
                if not writer.finished:
                    manifest = self._make(writer, units, manifest)
                self.phases(ASSEMBLING)(ProgressEvent(units.total, units.total, "assembling and rereading"))
                config = self.raw_config if self.outer is None else config_around(
                    self.source.uri, self.outer.config, self.raw_config)
                out = writer.finish(config, self.source.side_files(), manifest)
            except KeyboardInterrupt:
                done = len(writer.units())
                raise Stopped(f"stopped; {done} of {units.total} units are kept in {writer.partial}",
                              next="run the same command again to go on") from None
        made = read_manifest(out)
        return QuantizeResult(out, self.plan, made.layers, tuple(made.fallbacks()), resumed,
                              time.monotonic() - start, made.calibration, made.recovery)

    def _make(self, writer: CheckpointWriter, units: _UnitMaker, manifest: Manifest) -> Manifest:
        """Make all units; the manifest with what that has found out."""
        self._write_text(writer)
        if self.recovery is not None and self.job is not None:
            self.recovery.mend(self.job, writer)
        units.make_all()
        record = None
        if self.recovery is not None and self.job is not None:
            record = self.recovery.recover(self.job, writer)
        facts = calibration_facts(self.plan.recipe.calibration, self.data)
        return manifest.model_copy(update={"calibration": facts, "recovery": record})

    def _manifest(self) -> Manifest:
        """The manifest before the run: all that identifies it, and nothing that it will measure."""
        identity = self.source.identity()
        # of the hub the commit that was found, for whoever opens it again
        revision = identity.revision if identity.kind == "hub" else self.origin.revision
        self.origin = dataclasses.replace(self.origin, revision=revision, identity=identity)
        recipe = self.plan.recipe
        owners = {registry("transforms").entry(spec.name).owner for spec in recipe.transforms}
        for row in self.plan.rows:
            owners |= {registry(kind).entry(name).owner
                       for kind, name in (("methods", row.method), ("formats", row.format)) if name}
        if recipe.recover is not None:
            owners.add(registry("recoveries").entry(recipe.recover.name).owner)
        return Manifest(quantkit_version=__version__, recipe=recipe.snapshot(),
                        source=SourceRecord.of(identity),
                        calibration=calibration_facts(recipe.calibration, self.data),
                        outline=self.plan.outline_record,
                        outer=None if self.outer is None else OuterRecord(
                            model_type=str(self.outer.config["model_type"]),
                            prefixes=dict(self.outer.prefixes)),
                        plugins={p.distribution: p.version for p in current().plugins
                                 if p.distribution in owners})

    def _identity(self, manifest: Manifest) -> dict[str, Any]:
        """Everything that the checkpoint's bytes depend on: only such a run is gone on with."""
        # sums are made in another order elsewhere, so that a run ends where it was begun; the recovery's key
        # is empty here, and unfinished runs of earlier versions haven't got it
        identity = manifest.model_dump(mode="json", exclude={"recovery"}) | {
            "torch": torch.__version__, "device": self.device.type if self.plan.calibrated else "cpu"}
        return identity if self.job is None else identity | {"recovery_text": self.job.text.sha256}

    def weights(self) -> Weights:
        """The original model's, on the run's device."""
        return original_weights(self.source, self.device)

    def _write_text(self, writer: CheckpointWriter) -> None:
        """Let the model write what it is calibrated on, if it shall; once a run."""
        if (spec := self.plan.calibration) is None or not spec.self_written:
            return
        if not writer.has(WRITTEN_TEXT):
            with self.blaming():
                tokens = write(spec, self.source, load_source(self.source, self.device), self.weights(),
                               self.phases(WRITING))
            writer.put(WRITTEN_TEXT, {"tokens": tokens}, [])
        self.data = self_written_data(spec, self.source, writer.get(WRITTEN_TEXT)[0]["tokens"],
                                      self.plan.widest_hessian)

    def importance(self, writer: CheckpointWriter, weights: Weights,
                   tokens: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The importance of every token for every Linear, if the recipe asks for it; computed once a run."""
        if not self.plan.weighed or (spec := self.plan.calibration) is None:
            return None
        walks = WorkStore(writer, WALKS)
        if not writer.has(IMPORTANCE):
            wanted = [name for name, needs in self.plan.measured.items() if "hessian" in needs]
            backward = any(row.layer is not None for row in self.plan.rows if row.name in wanted)
            step = weighing_steps(self.phases, self.outline.num_layers, backward)
            windows = weighed_windows(len(tokens), spec.importance_windows)
            some = tokens[windows]
            with self.blaming(windows):
                config = self.outline.known_config
                squares = gradients(
                    self.source, self.plan.recipe.transforms, some, spec.seed, wanted, self.device,
                    lambda: token_gradients(config, weights, some, wanted, spec.seed, walks, step))
            importance = {name: spread(part, windows, len(tokens)) for name, part in squares.items()}
            writer.put(IMPORTANCE, importance, [])
        walks.clear()
        return writer.get(IMPORTANCE)[0]

    @contextmanager
    def blaming(self, windows: Sequence[int] | None = None) -> Iterator[None]:
        """If a value isn't finite, name the window that it came from, and the weight that is to blame.

        Args:
            windows: the numbers of the windows that are under way, if they aren't all.
        """
        try:
            yield
        except NonFiniteError as error:
            if windows is not None and error.sample is not None:
                error = error.in_window(windows[error.sample])
            raise blame(error, self.data.origins if self.data else ()) from error


class _UnitMaker:
    """Makes the units of a run, in order, unless they are on disk.

    Layers are calibrated behind an embedding that is rounded without them: it comes first then. An embedding
    that is measured as the model's head comes after the layers.
    """

    def __init__(self, run: _Run, writer: CheckpointWriter) -> None:
        self.run, self.writer = run, writer
        self.source, self.plan = run.source, run.plan
        self.outline = run.outline
        self.transforms = resolve_transforms(run.plan.recipe.transforms)
        self.layers = range(run.outline.num_layers)
        self.rows: dict[str, list[PlanRow]] = {}
        for row in run.plan.rows:
            self.rows.setdefault(row.unit, []).append(row)
        self.embedding_first = any(row.name not in run.plan.measured
                                   for row in self.rows.get(EMBEDDING_UNIT, ()))
        after = [REST_UNIT]
        if EMBEDDING_UNIT in self.rows and not self.embedding_first:
            after = [EMBEDDING_UNIT, REST_UNIT]
        self.before, self.after = [EMBEDDING_UNIT] * self.embedding_first, after
        self.total = len(self.before) + len(self.layers) + len(self.after)
        self.runner: CalibrationRunner[Any] | None = None
        """Pushes the calibration text through the layers; ``None`` if nothing is left to be measured."""
        self.remote: Iterator[list[Solved]] | None = None
        """The Linears of each missing unit, as processes elsewhere have solved them."""

    def make_all(self) -> None:
        """Make what isn't on disk."""
        progress = self.run.phases(QUANTIZING)
        missing = [index for index in self.layers if not self.writer.has(layer_unit(index))]
        measured_head = next((row.name for unit in self.after if not self.writer.has(unit)
                              for row in self.rows.get(unit, ()) if row.name in self.plan.measured), None)
        # hidden states go through the layers before the last one that is still to be measured
        last = len(self.layers) if measured_head is not None else max(missing, default=-1)
        with ExitStack() as ends:
            if self.run.executor.remote and not self.plan.measured:
                self.remote = ends.enter_context(closing(self._solve_elsewhere()))
            weights, tokens = self.run.weights(), None
            if self.run.data is not None and self.plan.measured and last >= 0:
                tokens = self.run.data.tokens
            importance = None if tokens is None else self.run.importance(self.writer, weights, tokens)
            table = None
            if self.embedding_first:
                progress(ProgressEvent(0, self.total, EMBEDDING_UNIT, kept=self.writer.has(EMBEDDING_UNIT)))
                table = self._make_outer(EMBEDDING_UNIT, {})[EMBEDDING]
            if tokens is not None:
                states = ends.enter_context(Spill(self.writer.states))
                with self.run.blaming():
                    share = correlation(self.plan.calibration)
                    self.runner = ModuleRunner(
                        self.source, self.outline, tokens, states, self.run.device, share,
                        bool(self.plan.drift),
                    ) if self.plan.through_modules else LayerRunner(
                        self.outline.known_config, weights, tokens, importance, states, table, share,
                        bool(self.plan.drift))
            for index in self.layers:
                place = ProgressEvent(len(self.before) + index, self.total, f"layer {index}",
                                      kept=index not in missing)
                progress(place)
                self._make_layer(index, index < last, self._progress_within(place, progress))
            stats = self._measure_head(measured_head)
            trim_heap()  # what layers left free, before the largest weights are read
            for number, unit in enumerate(self.after, self.total - len(self.after)):
                progress(ProgressEvent(number, self.total,
                                       unit if unit == EMBEDDING_UNIT else "embeddings and head"))
                self._make_outer(unit, stats)
            if (outer := self.run.outer) is not None and not self.writer.has(AROUND_UNIT):
                self.writer.put(AROUND_UNIT, {
                    AROUND + name: LazyTensor(info, partial(outer.read, name))
                    for name, info in outer.rest.items()}, [])

    def _solve_elsewhere(self) -> Generator[list[Solved], None, None]:
        """The Linears of all missing units, which depend on nothing: processes open the model themselves."""
        order = [*self.before, *map(layer_unit, self.layers), *self.after]
        return self.run.executor.map(solve_data_free, (
            (unit.replace("-", " "), (self.run.origin, tuple(row for row in self.rows.get(unit, ())
                                                             if row.method)))
            for unit in order if not self.writer.has(unit)))

    def _make_outer(self, unit: str, stats: dict[str, LayerStats]) -> dict[str, QuantizedTensor]:
        """A unit outside of the layers: its quantized weights, made now or by an earlier attempt."""
        if self.writer.has(unit):
            return self._stored(unit)[1]
        rows = self.rows.get(unit, [])
        other = [] if unit == EMBEDDING_UNIT else self._other(None)
        layer = self._tensors(rows, stats)
        return self._store(unit, rows, other, layer, self._solve(rows, layer))

    def _measure_head(self, name: str | None) -> dict[str, LayerStats]:
        """The statistics of the head, if it is still to be measured. The hidden states have done their
        work."""
        runner, self.runner = self.runner, None
        if not isinstance(runner, LayerRunner) or name is None:
            return {}
        with self.run.blaming():
            return {name: runner.measure_head(name)}

    def _progress_within(self, place: ProgressEvent, tell: Listener) -> LayerProgress:
        """Tells of a layer's steps as of ``place``."""
        index = place.done - len(self.before)
        return LayerProgress(
            self.plan, self.rows.get(layer_unit(index), []), lambda share, doing: tell(dataclasses.replace(
                place, share=share, detail=f"layer {index + 1} of {len(self.layers)}: {doing}")))

    def _make_layer(self, index: int, advance: bool, progress: LayerProgress) -> None:
        """Solve and store a layer, unless it is on disk.

        Args:
            advance: whether the hidden states go on through it.
            progress: hears of the steps.
        """
        unit = layer_unit(index)
        rows = self.rows.get(unit, [])
        if self.writer.has(unit):
            tensors, packed = self._stored(unit)
            if self.runner is not None and advance:
                self._advance_stored(self.runner, index, tensors, packed)
            return
        if self.remote is None:
            following = f"{self.outline.layer_prefix}{index + 1}."
            prefetch(self.source, [name for name in self.source.tensors() if name.startswith(following)])
        wanted = {row.name: self.plan.measured[row.name] for row in rows if row.name in self.plan.measured}
        if self.runner is not None and wanted and not self.plan.has_layer_transforms:
            layer = self._tensors(rows, {})
            with self.run.blaming():
                solved = {solution[1].name: solution for solution in solve_stages(
                    rows, layer, wanted, self.run.executor, self.runner, advance, progress)}
            in_order = [solved[row.name] for row in rows if row.method]  # stages may have another one
            self._store(unit, rows, self._other(index), layer, iter(in_order))
        else:
            self._make_whole_layer(index, wanted, advance, progress)

    def _make_whole_layer(self, index: int, wanted: Mapping[str, Collection[str]], advance: bool,
                          progress: LayerProgress) -> None:
        """A layer whose Linears are all measured before any is solved, so that transforms can change it; or
        one in which nothing is measured."""
        unit, runner = layer_unit(index), self.runner
        rows = self.rows.get(unit, [])
        stats: dict[str, LayerStats] = {}
        names = [row.name for row in rows if row.method]
        if isinstance(runner, LayerRunner) and wanted:
            progress.measuring(names)
            with self.run.blaming():
                stats = runner.measure(index, wanted)
            progress.measured(names)
            runner.forget(names)
            stats = {name: stat.to(torch.device("cpu")) for name, stat in stats.items()}  # where weights are
        layer = self._tensors(rows, stats)
        for transform, options in self.transforms if stats else ():
            apply_to_layer(transform, options, self.outline.known_config, index, layer)
        packed = self._store(unit, rows, self._other(index), layer,
                             progress.solving(self._solve(rows, layer), names))
        if runner is not None and advance:
            changed = {name: layer.stored(name) for name in self._changed(index, layer.changed)}
            self._advance_stored(runner, index, changed, packed)

    def _advance_stored(self, runner: CalibrationRunner[Any], index: int, tensors: Mapping[str, torch.Tensor],
                        packed: Mapping[str, QuantizedTensor]) -> None:
        """Push the hidden states through a finished layer; ``tensors``: has what transforms changed."""
        with self.run.blaming():
            if isinstance(runner, LayerRunner) and self.plan.has_layer_transforms:
                runner.advance(index, packed, {name: tensors[name] for name in self._changed(index, tensors)})
            else:
                for stage in runner.stages(index):
                    runner.advance_stage(stage, packed)

    def _stored(self, unit: str) -> tuple[dict[str, torch.Tensor], dict[str, QuantizedTensor]]:
        """The tensors of a unit that is on disk, and its packed weights."""
        tensors, stored_rows = self.writer.get(unit)
        self._refuse_notes(LayerRow.model_validate(row) for row in stored_rows)
        return tensors, {row.name: stored_weight(row, tensors)
                         for row in self.rows.get(unit, ()) if row.method}

    def _solve(self, rows: list[PlanRow], layer: LayerTensors) -> Iterator[Solved]:
        if self.remote is not None:
            return iter(next(self.remote))
        return solve_rows(rows, layer, self.plan.measured, self.run.executor)

    def _tensors(self, rows: list[PlanRow], stats: dict[str, LayerStats]) -> LayerTensors:
        specs = {row.name: row.spec for row in rows if row.spec}
        return LayerTensors(self.run.read, self.source.tensors().__contains__, specs, stats,
                            self.outline.offset_norms)

    def _other(self, index: int | None) -> list[str]:
        """Names of a layer's tensors that aren't a Linear's weight; ``None`` stands for outside of layers."""
        return [name for name in self.plan.other if self.outline.layer_of(name) == index]

    def _changed(self, index: int, names: Collection[str]) -> list[str]:
        """Those of a layer's tensors that aren't quantized, if there are transforms that change layers."""
        if not self.plan.has_layer_transforms:
            return []
        kept = {f"{row.name}.weight" for row in self.rows.get(layer_unit(index), ()) if row.method is None}
        return [name for name in (*self.plan.other, *kept) if name in names]

    def _store(self, unit: str, planned: list[PlanRow], other: list[str], layer: LayerTensors,
               solved: Iterator[Solved]) -> dict[str, QuantizedTensor]:
        """Write a unit; its packed weights.

        Args:
            other: the names of tensors that are stored as they are, or as a transform left them.
            layer: has what transforms changed.
            solved: gives the quantized Linears in order.
        """
        tensors: dict[str, torch.Tensor | LazyTensor] = {}
        rows: list[LayerRow] = []
        packed: dict[str, QuantizedTensor] = {}
        for plan in planned:
            if plan.method is None:
                other = [*other, f"{plan.name}.weight"]
                rows.append(plan.recorded())
                continue
            result, row = next(solved)
            assert row.name == plan.name
            self._refuse_notes([row])
            packed[plan.name] = result
            tensors |= {f"{plan.name}.{suffix}": t for suffix, t in result.tensors.items()}
            rows.append(row)
        infos = self.source.tensors()
        tensors |= {name: layer.stored(name) if name in layer.changed else
                    LazyTensor(infos[name], partial(self.run.read, name)) for name in other}
        self.writer.put(unit, tensors, [row.to_dict() for row in rows])
        release(self.source)
        for row in rows:
            current().notify("on_layer_quantized", name=row.name, row=row.to_dict())
        return packed

    def _refuse_notes(self, rows: Iterable[LayerRow]) -> None:
        """Refuse notes of layers made now, and of those that an earlier, less strict attempt left."""
        for row in rows:
            if self.run.strict and row.notes:
                raise QuantkitError(f"{row.name}: {'; '.join(row.notes)}",
                                    why="--strict makes every fallback an error",
                                    next="raise the damping or the calibration's size, or leave out --strict")
