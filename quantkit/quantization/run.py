"""Quantizes a model: source × recipe → checkpoint, one decoder layer at a time.

Every decoder layer is a *unit*: read, measured, solved, packed and made durable before the next one
is touched. A run that is stopped at any instant and started again keeps the units that are on disk,
pushes the calibration text through them, and ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from quantkit import __version__
from quantkit.checkpoint.manifest import LayerRow, Manifest, SourceRecord
from quantkit.checkpoint.reader import read_manifest
from quantkit.checkpoint.shards import LazyTensor
from quantkit.checkpoint.work import WorkStore
from quantkit.checkpoint.writer import WORK, CheckpointWriter, refuse_existing
from quantkit.executor.base import Executor
from quantkit.executor.choose import make_executor
from quantkit.formats.base import QuantizedTensor
from quantkit.models.architecture import EMBEDDING, layer_of, parse_config
from quantkit.models.linear import Weights
from quantkit.plugins.manager import current, registry
from quantkit.quantization.calibration.data import calibration_facts
from quantkit.quantization.calibration.finite import NonFiniteError, blame
from quantkit.quantization.calibration.importance import WALKS, spread, token_gradients, weighed_windows
from quantkit.quantization.calibration.kept import gradients
from quantkit.quantization.calibration.prepare import correlation, own, prepare, write, writes_itself
from quantkit.quantization.calibration.runner import LayerRunner
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.planning.layers import PlanRow
from quantkit.quantization.planning.phases import ASSEMBLING, QUANTIZING, WRITING, run_phases, tell_weighing
from quantkit.quantization.planning.plan import Plan, make_plan
from quantkit.quantization.recipe import Recipe, load_recipe
from quantkit.quantization.recovery.run import RecoveryRun, Units
from quantkit.quantization.recovery.windows import recipe_text
from quantkit.quantization.result import QuantizeResult
from quantkit.quantization.solve import (
    ModelOrigin,
    Solved,
    solve_data_free,
    solve_rows,
    solve_stages,
    stored_weight,
)
from quantkit.quantization.specs import CalibrationSpec
from quantkit.quantization.transforms.apply import apply_to_layer, resolve
from quantkit.quantization.transforms.base import LayerTensors
from quantkit.runtime.loader import load_source
from quantkit.sources.base import ModelSource, prefetch, release, tensor_alone, warn_if_quantized
from quantkit.support.device import find_device
from quantkit.support.errors import QuantkitError, Stopped
from quantkit.support.progress import Listener, Phases, ProgressEvent, silent

LAYERS = "model.layers."
UNIT, TABLE, REST = "layer-{}", "embedding", "rest"
"""Units: of a decoder layer; outside of them, in the checkpoint's order."""
IMPORTANCE, OWN_TEXT = f"{WORK}importance", f"{WORK}text"


def quantize(uri: str, recipe: str | Recipe, out: str | Path, *, revision: str | None = None,
             calibration: CalibrationSpec | None = None, strict: bool = False,
             progress: Listener = silent, executor: str | Executor = "local",
             device: str = "cpu") -> QuantizeResult:
    """Quantize a model into a checkpoint folder.

    Args:
        uri: where the model is: folder, hub name, ``.gguf`` file, ``pkg:NAME``, ``synthetic:NAME``.
        recipe: a recipe's name, a YAML file, or what one of them was loaded as.
        out: the folder to make; nothing may be there.
        revision: commit or tag, for a hub model.
        calibration: instead of the recipe's.
        strict: a fallback is an error.
        progress: called before each unit and once at the end.
        executor: where Linears are solved: ``local``, ``ray``, or one that stays open.
        device: what calibrated recipes compute on: ``cpu``, ``cuda``, or ``auto``.

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
    loaded = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if calibration is not None:
        loaded = loaded.model_copy(update={"calibration": calibration})
    origin = ModelOrigin(uri, revision, loaded)
    with ExitStack() as ends:
        source = ends.enter_context(closing(origin.open()))
        plan = make_plan(loaded, source)
        warn_if_quantized(source)
        if isinstance(executor, str):
            executor = ends.enter_context(closing(make_executor(executor, place)))
        result = _Run(source, plan, Path(out), strict, progress, origin, executor, place)(start)
    current().notify("on_run_finished", kind="quantize", summary=result.to_dict())
    return result


class _Run:
    def __init__(self, source: ModelSource, plan: Plan, out: Path, strict: bool,
                 progress: Listener, origin: ModelOrigin, executor: Executor, device: torch.device) -> None:
        self.source, self.plan, self.out, self.strict = source, plan, out, strict
        self.phases = Phases(progress, run_phases(plan.calibration, plan.weighed,
                                                  plan.recipe.recover is not None))
        self.origin, self.executor, self.device = origin, executor, device
        self.raw_config, self._tensor = source.config(), partial(tensor_alone, source)
        self.config = parse_config(self.raw_config)
        self.formats, self.methods = registry("formats"), registry("methods")
        # what stays as it is would else be read, and found to hold NaN, when the work is done
        for name in (*plan.other, *(f"{row.name}.weight" for row in plan.rows if row.method is None)):
            self._tensor(name)
        release(source)
        self.transforms, self.measured = resolve(plan.recipe.transforms), plan.measured
        self.data = prepare(plan.calibration, source, plan.widest_hessian, progress, strict)
        text = recipe_text(plan.recipe.recover, plan.recipe.calibration, source, self.data, progress,
                           strict)
        self.recovery = None if text is None else RecoveryRun(
            plan, source, text, self.phases, Units(UNIT, TABLE, REST), strict)

    def __call__(self, start: float) -> QuantizeResult:
        manifest = self._manifest()
        # sums are made in another order elsewhere, so that a run ends where it was begun; the recovery's key
        # is empty here, and unfinished runs of earlier versions haven't got it
        identity = manifest.model_dump(mode="json", exclude={"recovery"}) | {
            "torch": torch.__version__, "device": self.device.type if self.plan.calibrated else "cpu"}
        if self.recovery is not None:
            identity["recovery_text"] = self.recovery.text.sha256
        with CheckpointWriter(self.out, identity, needed_bytes=self.plan.needed_disk_bytes) as writer:
            resumed = len(writer.units())
            total = self.config.num_layers + 1 + bool(self._outside(TABLE))
            try:
                if not writer.finished:
                    self._write_text(writer)
                    if self.recovery is not None:
                        self.recovery.mend(writer, self.config)
                    self._units(writer, total)
                    facts = calibration_facts(self.plan.recipe.calibration, self.data)
                    record = None
                    if self.recovery is not None:
                        record = self.recovery(writer, self.config, self._weights())
                    manifest = manifest.model_copy(update={"calibration": facts, "recovery": record})
                self.phases(ASSEMBLING)(ProgressEvent(total, total, "assembling and rereading"))
                out = writer.finish(self.raw_config, self.source.side_files(), manifest)
            except KeyboardInterrupt:
                done = len(writer.units())
                raise Stopped(f"stopped; {done} of {total} units are kept in {writer.partial}",
                              next="run the same command again to go on") from None
        made = read_manifest(out)
        notes, seconds = tuple(made.fallbacks()), time.monotonic() - start
        return QuantizeResult(out, self.plan, made.layers, notes, resumed, seconds, made.calibration,
                              made.recovery)

    def _manifest(self) -> Manifest:
        """The manifest before the run: all that identifies it, and nothing that it will measure."""
        identity = self.source.identity()
        # of the hub the commit that was found, for whoever opens it again
        revision = identity.revision if identity.kind == "hub" else self.origin.revision
        self.origin = dataclasses.replace(self.origin, revision=revision, identity=identity)
        owners = {table.entry(name).owner for row in self.plan.rows
                  for table, name in ((self.methods, row.method), (self.formats, row.format)) if name}
        owners |= {registry("transforms").entry(spec.name).owner for spec in self.plan.recipe.transforms}
        if (recover := self.plan.recipe.recover) is not None:
            owners.add(registry("recoveries").entry(recover.name).owner)
        return Manifest(quantkit_version=__version__, recipe=self.plan.recipe.snapshot(),
                        source=SourceRecord.of(identity),
                        calibration=calibration_facts(self.plan.recipe.calibration, self.data),
                        plugins={p.distribution: p.version for p in current().plugins
                                 if p.distribution in owners})

    def _weights(self) -> Weights:
        return Weights(self._tensor, self.source.tensors().__contains__, torch.float32, device=self.device)

    def _write_text(self, writer: CheckpointWriter) -> None:
        """Let the model write what it is calibrated on, if it shall; once a run."""
        if (spec := self.plan.calibration) is None or not writes_itself(spec):
            return
        if not writer.has(OWN_TEXT):
            with self._tracing():
                tokens = write(spec, self.source, load_source(self.source, self.device), self._weights(),
                               self.phases(WRITING))
            writer.put(OWN_TEXT, {"tokens": tokens}, [])
        self.data = own(spec, self.source, writer.get(OWN_TEXT)[0]["tokens"], self.plan.widest_hessian)

    def _units(self, writer: CheckpointWriter, total: int) -> None:
        weights, layers = self._weights(), self.config.num_layers
        outside = [unit for unit in (TABLE, REST) if unit == REST or self._outside(unit)]
        # layers are calibrated behind an embedding that is rounded without them
        first = any(row.name not in self.measured for row in self._outside(TABLE))
        missing = [index for index in range(layers) if not writer.has(UNIT.format(index))]
        with ExitStack() as ends:
            elsewhere = None
            if self.executor.remote and not self.measured:
                work = [(f"layer {index}", self._inside(index)) for index in missing]
                before, after = ([(unit, self._outside(unit))] if wanted and not writer.has(unit) else []
                                 for unit, wanted in ((TABLE, first), (REST, True)))
                elsewhere = ends.enter_context(closing(self._elsewhere([*before, *work, *after])))
            head = next((row.name for unit in outside if not writer.has(unit) for row in self._outside(unit)
                         if row.name in self.measured), None)
            # hidden states are wanted up to the last layer that is still to be measured, and no further
            last = max(missing, default=-1) if head is None else layers
            runner = None
            table, done, progress = None, 0, self.phases(QUANTIZING)
            tokens = self.data.tokens if self.data is not None and self.measured and last >= 0 else None
            importance = None if tokens is None else self._importance(writer, weights, tokens)
            if first:
                progress(ProgressEvent(0, total, TABLE, kept=writer.has(TABLE)))
                table, done = self._whole(writer, outside.pop(0), {}, elsewhere)[EMBEDDING], 1
            if tokens is not None:
                states = ends.enter_context(Spill(writer.states))
                with self._tracing():
                    runner = LayerRunner(self.config, weights, tokens, importance, states, table,
                                         correlation(self.plan.calibration), self.plan.drift)
            for index in range(layers):
                progress(ProgressEvent(done + index, total, f"layer {index}", kept=index not in missing))
                self._layer(writer, index, runner, elsewhere, index < last)
            stats: dict[str, LayerStats] = {}
            if runner is not None and head is not None:
                with self._tracing():
                    stats[head] = runner.measure_head(head)
            del runner
            for remaining, unit in zip(range(len(outside), 0, -1), outside, strict=True):
                progress(ProgressEvent(total - remaining, total, TABLE
                                       if unit == TABLE else "embeddings and head"))
                self._whole(writer, unit, stats, elsewhere)

    def _elsewhere(self, units: Iterable[tuple[str, list[PlanRow]]]) -> Generator[list[Solved], None, None]:
        """Units that depend on nothing, solved by processes that open the model themselves."""
        return self.executor.map(solve_data_free, (
            (label, (self.origin, tuple(row for row in rows if row.method))) for label, rows in units))

    def _other(self, index: int | None) -> list[str]:
        return [name for name in self.plan.other if layer_of(name, self.config.num_layers) == index]

    def _inside(self, index: int) -> list[PlanRow]:
        return [row for row in self.plan.rows if row.layer == index]

    def _outside(self, unit: str) -> list[PlanRow]:
        """What is in no decoder layer: the embedding, if it is quantized, or the rest."""
        return [r for r in self.plan.rows if r.layer is None and (r.name == EMBEDDING) == (unit == TABLE)]

    def _whole(self, writer: CheckpointWriter, unit: str, stats: dict[str, LayerStats],
               elsewhere: Iterator[list[Solved]] | None) -> dict[str, QuantizedTensor]:
        """A unit outside of the layers, made now or by an earlier attempt."""
        planned = self._outside(unit)
        if writer.has(unit):
            tensors, rows = writer.get(unit)
            self._refuse_notes(LayerRow.model_validate(row) for row in rows)
            return {row.name: stored_weight(row, tensors) for row in planned if row.method}
        other = [] if unit == TABLE else self._other(None)
        layer = self._tensors(planned, stats)
        return self._store(writer, unit, planned, other, layer, self._solved(planned, layer, elsewhere))

    def _importance(self, writer: CheckpointWriter, weights: Weights,
                    tokens: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The importance of every token for every Linear, if the recipe asks for it; computed once a run."""
        if not self.plan.weighed or (spec := self.plan.recipe.calibration) is None:
            return None
        walks = WorkStore(writer, WALKS)
        if not writer.has(IMPORTANCE):
            wanted = [name for name, needs in self.measured.items() if "hessian" in needs]
            backward = any(row.layer is not None for row in self.plan.rows if row.name in wanted)
            count = itertools.count()

            def step() -> None:
                tell_weighing(self.phases, next(count), self.config.num_layers, backward)

            step()
            windows = weighed_windows(len(tokens), spec.importance_windows)
            some = tokens[windows]
            with self._tracing(windows):
                squares = gradients(
                    self.source, self.plan.recipe.transforms, some, spec.seed, wanted, self.device,
                    lambda: token_gradients(self.config, weights, some, wanted, spec.seed, walks, step))
            importance = {name: spread(part, windows, len(tokens)) for name, part in squares.items()}
            writer.put(IMPORTANCE, importance, [])
        walks.clear()
        return writer.get(IMPORTANCE)[0]

    def _layer(self, writer: CheckpointWriter, index: int, runner: LayerRunner | None,
               elsewhere: Iterator[list[Solved]] | None, on: bool) -> None:
        """Solve and store a layer, unless it is on disk; the hidden states go on through it if ``on``."""
        unit = UNIT.format(index)
        planned = self._inside(index)
        if writer.has(unit):
            tensors, rows = writer.get(unit)
            self._refuse_notes(LayerRow.model_validate(row) for row in rows)
            packed = {row.name: stored_weight(row, tensors) for row in planned if row.method}
            if runner is not None and on:
                with self._tracing():
                    if self.plan.changes_layers:
                        runner.advance(index, packed, {name: tensors[name]
                                                       for name in self._may_change(index, tensors)})
                    else:
                        for stage in runner.stages(index):
                            runner.advance_stage(stage, packed)
            return
        wanted = {row.name: self.measured[row.name] for row in planned if row.name in self.measured}
        if elsewhere is None:
            following = f"{LAYERS}{index + 1}."
            prefetch(self.source, [name for name in self.source.tensors() if name.startswith(following)])
        if runner is not None and wanted and not self.plan.changes_layers:
            layer = self._tensors(planned, {})
            with self._tracing():
                solved = [*solve_stages(planned, layer, wanted, self.executor, runner, on)]
            self._store(writer, unit, planned, self._other(index), layer, iter(solved))
            return
        stats: dict[str, LayerStats] = {}
        if runner is not None and wanted:
            with self._tracing():
                stats = runner.measure(index, wanted)
            runner.forget([row.name for row in planned if row.method])
            stats = {name: stat.to(torch.device("cpu")) for name, stat in stats.items()}  # where weights are
        layer = self._tensors(planned, stats)
        for transform, options in self.transforms if stats else ():
            apply_to_layer(transform, options, self.config, index, layer)
        packed = self._store(writer, unit, planned, self._other(index), layer,
                             self._solved(planned, layer, elsewhere))
        if runner is not None and on:
            with self._tracing():
                runner.advance(index, packed, {name: layer.stored(name)
                                               for name in self._may_change(index, layer.changed)})

    def _tensors(self, planned: list[PlanRow], stats: dict[str, LayerStats]) -> LayerTensors:
        return LayerTensors(self._tensor, self.source.tensors().__contains__,
                            {row.name: row.spec for row in planned if row.spec}, stats,
                            self.config.offset_norms)

    def _may_change(self, index: int, names: Collection[str]) -> list[str]:
        """Those of a layer's tensors that aren't quantized, if there are transforms that change layers."""
        if not self.plan.changes_layers:
            return []
        kept = {f"{row.name}.weight" for row in self.plan.rows if row.layer == index and row.method is None}
        return [name for name in (*self.plan.other, *kept) if name in names]

    @contextmanager
    def _tracing(self, windows: Sequence[int] | None = None) -> Iterator[None]:
        """If a value isn't finite, name the window that it came from, and the weight that is to blame;
        ``windows``: the numbers of those that are under way, if they aren't all."""
        try:
            yield
        except NonFiniteError as error:
            if windows is not None and error.sample is not None:
                error = error.in_window(windows[error.sample])
            raise blame(error, self.data.origins if self.data else ()) from error

    def _store(self, writer: CheckpointWriter, unit: str, planned: list[PlanRow], other: list[str],
               layer: LayerTensors, solved: Iterator[Solved]) -> dict[str, QuantizedTensor]:
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
                    LazyTensor(infos[name], partial(self._tensor, name)) for name in other}
        writer.put(unit, tensors, [row.to_dict() for row in rows])
        release(self.source)
        for row in rows:
            current().notify("on_layer_quantized", name=row.name, row=row.to_dict())
        return packed

    def _solved(self, planned: list[PlanRow], layer: LayerTensors,
                elsewhere: Iterator[list[Solved]] | None) -> Iterator[Solved]:
        """A unit's Linears in order."""
        if elsewhere is not None:
            return iter(next(elsewhere))
        return solve_rows(planned, layer, self.measured, self.executor)

    def _refuse_notes(self, rows: Iterable[LayerRow]) -> None:
        """Refuse notes of layers made now, and of those that an earlier, less strict attempt left."""
        for row in rows:
            if self.strict and row.notes:
                raise QuantkitError(f"{row.name}: {'; '.join(row.notes)}",
                                    why="--strict makes every fallback an error",
                                    next="raise the damping or the calibration's size, or leave out --strict")
