"""The orchestrator of the left half: source × recipe → checkpoint, one decoder layer at a time.

Every decoder layer is a *unit*: read, measured, solved, packed and made durable before the next one
is touched. A run that is stopped at any instant and started again keeps the units that are on disk,
pushes the calibration text through them, and ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.calibrate.data import CalibrationData
from quantkit.calibrate.finite import NonFiniteError, blame
from quantkit.calibrate.importance import token_importance
from quantkit.calibrate.prepare import own, prepare, write, writes_itself
from quantkit.calibrate.runner import EXPERT, LayerRunner
from quantkit.checkpoint.manifest import CalibrationFacts, LayerRow, Manifest, SourceRecord
from quantkit.checkpoint.reader import read_manifest
from quantkit.checkpoint.writer import WORK, CheckpointWriter, refuse_existing
from quantkit.errors import QuantkitError, Stopped
from quantkit.formats.base import QuantizedTensor
from quantkit.methods.base import LayerStats
from quantkit.models.architecture import parse_config
from quantkit.models.linear import Weights
from quantkit.ops.rotation import rotate, rotate_form
from quantkit.plan import Plan, PlanRow, make_plan, with_own_head
from quantkit.plugins import current, registry
from quantkit.progress import Event, Listener, silent
from quantkit.recipe import load_recipe
from quantkit.sources.base import ModelSource, open_source
from quantkit.spec import CalibrationSpec

LAYERS = "model.layers."
REST = "rest"
IMPORTANCE, OWN_TEXT = f"{WORK}importance", f"{WORK}text"
FEW_TOKENS = 128
"""Of fewer an expert's Hessian says little."""


@dataclass(frozen=True)
class QuantizeResult:
    """What a run made.

    Attributes:
        out: the checkpoint's folder.
        plan: what was to be done; exact in bits and bytes.
        rows: what was done, a row a Linear.
        fallbacks: every note of every row, with its layer's name.
        resumed: units that an earlier attempt had finished.
        seconds: of this attempt.
        calibration: what the calibrated methods saw, if there were any.
    """

    out: Path
    plan: Plan
    rows: tuple[LayerRow, ...]
    fallbacks: tuple[str, ...]
    resumed: int
    seconds: float
    calibration: CalibrationFacts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        facts = self.calibration.model_dump(mode="json") if self.calibration else None
        return {"out": str(self.out), "bits_per_weight": self.plan.bits_per_weight,
                "tensor_bytes": self.plan.disk_bytes, "resumed_units": self.resumed,
                "seconds": self.seconds, "fallbacks": list(self.fallbacks), "calibration": facts,
                "layers": [row.to_dict() for row in self.rows]}


def quantize(uri: str, recipe: str, out: str | Path, *, revision: str | None = None,
             calibration: CalibrationSpec | None = None, strict: bool = False,
             progress: Listener = silent) -> QuantizeResult:
    """Quantize a model into a checkpoint folder.

    Args:
        uri: where the model is: folder, hub name, ``.gguf`` file, ``pkg:NAME``, ``synthetic:NAME``.
        recipe: a recipe's name, or a YAML file.
        out: the folder to make; nothing may be there.
        revision: commit or tag, for a hub model.
        calibration: instead of the recipe's.
        strict: a fallback is an error.
        progress: called before each unit and once at the end.

    Warns:
        UserWarning: of what is bad about the calibration data, and of sources that aren't pinned.

    Raises:
        QuantkitError: whatever is wrong with model, recipe, options, disk or values; everything
            that can be known in advance is found before any work.
        Stopped: interrupted; the finished layers are kept.
    """
    start = time.monotonic()
    refuse_existing(out)
    source = open_source(uri, revision)
    try:
        loaded = load_recipe(recipe)
        if calibration is not None:
            loaded = loaded.model_copy(update={"calibration": calibration})
        source = with_own_head(loaded, source)
        run = _Run(source, make_plan(loaded, source), Path(out), strict, progress)
        result = run(start)
    finally:
        source.close()
    current().notify("on_run_finished", kind="quantize", summary=result.to_dict())
    return result


def calibration_facts(plan: Plan, data: CalibrationData | None) -> CalibrationFacts | None:
    """What a run calibrates on, for the manifest."""
    spec = plan.recipe.calibration
    if data is None or spec is None:
        return None
    return CalibrationFacts(text=", ".join(spec.without_folders().texts), samples=spec.samples,
                            length=spec.length, seed=spec.seed, importance=spec.importance,
                            tokens=data.tokens.numel(), sha256=data.sha256, packing=data.packing,
                            files=data.files, coverage=data.coverage)


class _Run:
    def __init__(self, source: ModelSource, plan: Plan, out: Path, strict: bool,
                 progress: Listener) -> None:
        self.source, self.plan, self.out, self.strict, self.progress = source, plan, out, strict, progress
        self.raw_config = source.config()
        self.config = parse_config(self.raw_config)
        self.formats, self.methods = registry("formats"), registry("methods")
        self.data = prepare(plan, source, progress)

    def __call__(self, start: float) -> QuantizeResult:
        manifest = self._manifest()
        identity = manifest.model_dump(mode="json")
        with CheckpointWriter(self.out, identity, needed_bytes=self.plan.needed_disk_bytes) as writer:
            resumed = len(writer.units())
            total = self.config.num_layers + 1
            try:
                if not writer.finished:
                    self._write_text(writer)
                    self._units(writer, total)
                    facts = calibration_facts(self.plan, self.data)
                    manifest = manifest.model_copy(update={"calibration": facts})
                self.progress(Event(total, total, "assembling and rereading"))
                out = writer.finish(self.raw_config, self.source.side_files(), manifest)
            except KeyboardInterrupt:
                done = len(writer.units())
                raise Stopped(f"stopped; {done} of {total} units are kept in {writer.partial}",
                              next="run the same command again to go on") from None
        made = read_manifest(out)
        notes = tuple(f"{row.name}: {note}" for row in made.layers for note in row.notes)
        return QuantizeResult(out, self.plan, made.layers, notes, resumed, time.monotonic() - start,
                              made.calibration)

    def _manifest(self) -> Manifest:
        """The manifest before the run: all that identifies it, and nothing that it will measure."""
        owners = {table.entry(name).owner for row in self.plan.rows
                  for table, name in ((self.methods, row.method), (self.formats, row.format)) if name}
        return Manifest(quantkit_version=__version__, recipe=self.plan.recipe.snapshot(),
                        source=SourceRecord.of(self.source.identity()),
                        calibration=calibration_facts(self.plan, self.data),
                        plugins={p.distribution: p.version for p in current().plugins
                                 if p.distribution in owners})

    def _weights(self) -> Weights:
        return Weights(self.source.tensor, self.source.tensors().__contains__, torch.float32)

    def _write_text(self, writer: CheckpointWriter) -> None:
        """Let the model write what it is calibrated on, if it shall; once a run."""
        if not writes_itself(self.plan):
            return
        if not writer.has(OWN_TEXT):
            tokens = write(self.plan, self.source, self._weights(), self.progress)
            writer.put(OWN_TEXT, {"tokens": tokens}, [])
        self.data = own(self.plan, self.source, writer.get(OWN_TEXT)[0]["tokens"])

    def _units(self, writer: CheckpointWriter, total: int) -> None:
        weights = self._weights()
        missing = [index for index in range(total - 1) if not writer.has(_unit(index))]
        # hidden states are wanted up to the last layer that is still to be measured, and no further
        last = max(missing, default=-1)
        runner = None
        if self.data is not None and missing:
            importance = self._importance(writer, weights, self.data.tokens)
            with self._tracing():
                runner = LayerRunner(self.config, weights, self.data.tokens, importance)
        for index in range(total - 1):
            self.progress(Event(index, total, f"layer {index}"))
            packed = self._layer(writer, index, runner)
            if runner is not None and index < last:
                with self._tracing():
                    runner.advance(index, packed)
        self.progress(Event(total - 1, total, "embeddings and head"))
        if writer.has(REST):
            self._refuse_notes(LayerRow.model_validate(row) for row in writer.get(REST)[1])
            return
        self._store(writer, REST, [r for r in self.plan.rows if r.layer is None],
                    [n for n in self.plan.other if not n.startswith(LAYERS)], {})

    def _importance(self, writer: CheckpointWriter, weights: Weights,
                    tokens: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Of every token for every Linear, if the recipe asks for it; found once a run."""
        spec = self.plan.recipe.calibration
        assert spec is not None
        if spec.importance == "equal":
            return None
        if writer.has(IMPORTANCE):
            return writer.get(IMPORTANCE)[0]
        done, total = -1, 2 * self.config.num_layers

        def step() -> None:
            nonlocal done
            done += 1
            self.progress(Event(done, total, "what each token matters"))

        step()
        wanted = [row.name for row in self.plan.rows if self._needs(row)]
        with self._tracing():
            found = token_importance(self.config, weights, tokens, wanted, spec.seed,
                                     writer.states, step)
        writer.put(IMPORTANCE, found, [])
        return found

    def _layer(self, writer: CheckpointWriter, index: int,
               runner: LayerRunner | None) -> dict[str, QuantizedTensor]:
        unit = _unit(index)
        planned = [row for row in self.plan.rows if row.layer == index]
        if writer.has(unit):
            tensors, rows = writer.get(unit)
            self._refuse_notes(LayerRow.model_validate(row) for row in rows)
            return {row.name: _stored(row, tensors) for row in planned if row.method}
        wanted = [row.name for row in planned if self._needs(row)]
        stats: dict[str, LayerStats] = {}
        if runner is not None and wanted:
            with self._tracing():
                stats = runner.measure(index, wanted)
        other = [n for n in self.plan.other if n.startswith(f"{LAYERS}{index}.")]
        return self._store(writer, unit, planned, other, stats)

    def _needs(self, row: PlanRow) -> bool:
        return row.method is not None and bool(self.methods.get(row.method).needs)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Of a value that isn't finite, name the window it came from, and the weight that is to blame."""
        try:
            yield
        except NonFiniteError as error:
            raise blame(error, self.source, self.data.origins if self.data else ()) from error

    def _store(self, writer: CheckpointWriter, unit: str, planned: list[PlanRow], other: list[str],
               stats: Mapping[str, LayerStats]) -> dict[str, QuantizedTensor]:
        tensors: dict[str, torch.Tensor] = {}
        rows: list[LayerRow] = []
        packed: dict[str, QuantizedTensor] = {}
        for plan in planned:
            weight = self.source.tensor(f"{plan.name}.weight")
            if plan.method is None:
                tensors[f"{plan.name}.weight"] = weight
                rows.append(LayerRow.of(plan))
                continue
            result, row = self._solve(plan, weight, stats.get(plan.name))
            packed[plan.name] = result
            tensors |= {f"{plan.name}.{suffix}": t for suffix, t in result.tensors.items()}
            rows.append(row)
        tensors |= {name: self.source.tensor(name) for name in other}
        writer.put(unit, tensors, [row.to_dict() for row in rows])
        for row in rows:
            current().notify("on_layer_quantized", name=row.name, row=row.to_dict())
        return packed

    def _solve(self, plan: PlanRow, weight: torch.Tensor,
               stats: LayerStats | None) -> tuple[QuantizedTensor, LayerRow]:
        assert plan.method and plan.format and plan.spec
        method, form = self.methods.get(plan.method), self.formats.get(plan.format)
        exact = weight.float()
        if plan.spec.rotation:
            exact = rotate(exact)
            if stats is not None and stats.hessian is not None:
                stats = dataclasses.replace(stats, hessian=rotate_form(stats.hessian))
        try:
            codes = method.run(exact, stats, plan.spec, method.options(**plan.options))
            result = form.pack(codes, weight.dtype)
        except QuantkitError as error:
            raise type(error)(f"{plan.name}: {error.what}", why=error.why, next=error.next) from error
        loss = (form.dequantize(result) - exact).norm() / exact.norm().clamp(min=1e-30)
        tokens, notes = (None, ()) if stats is None else (stats.tokens, stats.notes + _few(plan.name, stats))
        row = LayerRow.of(plan, error=float(loss), tokens=tokens, notes=notes + codes.notes)
        self._refuse_notes([row])
        return result, row

    def _refuse_notes(self, rows: Iterable[LayerRow]) -> None:
        """Of layers made now, and of those that an earlier, less strict attempt has left."""
        for row in rows:
            if self.strict and row.notes:
                raise QuantkitError(f"{row.name}: {'; '.join(row.notes)}",
                                    why="--strict makes every fallback an error",
                                    next="raise the damping or the calibration's size, or leave out --strict")


def _few(name: str, stats: LayerStats) -> tuple[str, ...]:
    """A note on an expert that the router hardly ever chose."""
    if EXPERT not in name or stats.tokens >= FEW_TOKENS:
        return ()
    return (f"only {stats.tokens} calibration tokens reached this expert",)


def _unit(index: int) -> str:
    return f"layer-{index}"


def _stored(plan: PlanRow, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The packed weight of a finished unit."""
    assert plan.format and plan.spec
    prefix = f"{plan.name}."
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    own.pop("bias", None)
    return QuantizedTensor(plan.format, plan.spec, plan.shape, getattr(torch, plan.dtype), own)
