"""``distill``: trains scales and norms of the finished units, and replaces them if that brought the model
closer to the original.

Codes are as they were. Everything that is found is kept in the run's folder, and units are replaced only once
the result is on disk: a run that is stopped at any instant and started again ends with the same bytes. A unit
that is written anew isn't there for an instant, so its new form is stored beside it first.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from quantkit.checkpoint.manifest import LayerRow, RecoveryRecord
from quantkit.checkpoint.writer import WORK, CheckpointWriter, WorkStore
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.finite import squares
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, HEAD, layer_of, parse_config
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import DERIVED
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.plugins.manager import registry
from quantkit.quantization.calibration.finite import NonFiniteError, blame
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.memory import RECOVERY_STATES, REST_UNIT, PlanRow, layer_unit
from quantkit.quantization.recipe import CalibrationSpec, Recipe
from quantkit.quantization.recovery import Recovery, RecoveryJob, RecoveryText, recovery_options
from quantkit.quantization.solve import stored_weight
from quantkit.quantization.transforms.base import resolve_transforms
from quantkit.sources.base import ModelSource
from quantkit.support.errors import CheckpointError, QuantkitError
from quantkit.support.progress import Listener, ProgressEvent
from quantkit_recover.optimizer import DistillOptions, Parameter, Values, train
from quantkit_recover.text import reason_against_text, recovery_text
from quantkit_recover.walk import (
    NORM,
    SCALE,
    Heads,
    QuantizedWalk,
    original_states,
    parts_of,
    scale_of,
    with_scale,
)

READING = "running the original model"
RECOVERING = "training scales and norms"
NAME = "recover"
"""What a run calls this work."""
STAGED = f"{WORK}{NAME}.unit-"
"""Begins the name of a unit's new form."""
TARGETS = "targets"
"""The unit of the original model's last states."""
RESULT = "result"
"""The unit of the trained values, and of the held-out losses before and after."""
LOSSES = "losses"
REPLACING = "replacing"
"""The unit that is there once scales and norms are being replaced: then no layer can be made again."""


class Distill(Recovery):
    """See :mod:`quantkit_recover.optimizer`."""

    name = "distill"
    paper = "https://arxiv.org/abs/2407.11062"
    options = DistillOptions
    phases = (READING, RECOVERING)

    def reason_against(self, recipe: Recipe, rows: Sequence[PlanRow], config: ModelConfig) -> str | None:
        """Why the plan's scales can't be trained, with the remedy."""
        quantized = [row for row in rows if row.layer is not None and row.spec is not None]
        if not quantized:
            return "no Linear of a decoder layer is quantized"
        if config.experts is not None:
            return "a layer of experts sends each token another way in training than in the original"
        changing = [transform.name for transform, _ in resolve_transforms(recipe.transforms)
                    if transform.layer]
        if changing:
            return f"transform {changing[0]} changes layers and their norms while they are measured"
        for row in quantized:
            assert row.spec is not None
            if (why := _reason_against_scales(row.spec, row.shape)) is not None:
                return f"{row.name}: {why}"
        return None if recipe.calibration is None else reason_against_text(recipe.calibration)

    def read_text(self, spec: CalibrationSpec, windows: int, seen: torch.Tensor, source: ModelSource,
                  progress: Listener, strict: bool) -> RecoveryText:
        """Windows that the layers aren't calibrated on."""
        return recovery_text(spec, windows, seen, source, progress, strict)

    def mend(self, job: RecoveryJob, writer: CheckpointWriter) -> None:
        """Finish replacements; refuse what is damaged and was made before them."""
        layers = parse_config(job.source.config()).num_layers
        units = [layer_unit(index) for index in range(layers)] + [REST_UNIT]
        for unit in units:
            if writer.has(STAGED + unit):
                tensors, rows = writer.get(STAGED + unit)
                writer.put(unit, {name: tensor.clone() for name, tensor in tensors.items()}, rows)
                writer.drop(STAGED + unit)
        store = WorkStore(writer, NAME)
        if store.has(REPLACING):
            for unit in dict.fromkeys([*units, *(row.unit for row in job.rows)]):
                if not writer.has(unit):
                    raise _damaged(writer, f"unit {unit!r}")
            if not store.has(RESULT):
                raise _damaged(writer, "the result of the recovery")

    def recover(self, job: RecoveryJob, writer: CheckpointWriter) -> RecoveryRecord:
        """Train, judge on held-out windows, and replace what became better."""
        store, spec = WorkStore(writer, NAME), job.recipe.recover
        assert spec is not None
        options = recovery_options(job.recipe)
        assert isinstance(options, DistillOptions)
        model = _FinishedModel(job, writer)
        if not store.has(RESULT):
            try:
                _store_targets(job, model.config, store, writer)
                with Spill(writer.states, RECOVERY_STATES) as spill:
                    _train(job, model, options, store, spill)
            except NonFiniteError as error:
                raise blame(error, job.text.origins, "recovery window") from error
        values = store.get(RESULT)
        before, after = values.pop(LOSSES).tolist()
        record = RecoveryRecord(
            name=self.name, options=options.model_dump(mode="json"), windows=spec.windows,
            held_out=job.text.held_out, sha256=job.text.sha256, before=before,
            after=None if math.isnan(after) else after, kept=after < before)
        if record.kept:
            if not store.has(REPLACING):
                store.put(REPLACING, {REPLACING: torch.tensor(True)})
            for index in (*range(model.config.num_layers), None):
                model.replace(index, values)
        elif job.strict:
            raise QuantkitError(f"recover: {record.note}", why="--strict makes every fallback an error",
                                next="change the recipe's recover, or leave out --strict")
        return record


def _reason_against_scales(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    if spec.nested:
        return "its scales are quantized themselves; use a spec without 'nested'"
    if spec.scale_dtype == "e8m0":
        return "its scales are powers of 2, which training can't move little by little; use scale_dtype: e4m3"
    if spec.granularity.strategy == "tile":
        return "its scales are of squares of weights; use another strategy"
    if spec.activations:
        return "its inputs are rounded too, which training doesn't simulate; use a spec without 'activations'"
    if spec.granularity.strategy == "block" and shape[0] * shape[1] % (spec.granularity.size or 1):
        return f"blocks of {spec.granularity.size} don't divide its {shape[0]} × {shape[1]} weights"
    return None


def _damaged(writer: CheckpointWriter, what: str) -> CheckpointError:
    return CheckpointError(f"{what} in {writer.partial} is damaged",
                           why="some layers have new scales already, and it was made before them",
                           next=f"begin again: rm -r {shlex.quote(str(writer.partial))}")


def _store_targets(job: RecoveryJob, config: ModelConfig, store: WorkStore, writer: CheckpointWriter) -> None:
    """Store what the original model's final norm gives of all windows."""
    if store.has(TARGETS):
        return
    tokens, tell = job.text.tokens, job.phases(READING)
    shapes = [(count, tokens.shape[1], config.hidden_size) for count in parts_of(*tokens.shape)]
    with Spill(writer.states, RECOVERY_STATES) as spill:
        store.put_batches(TARGETS, shapes, torch.float32, original_states(
            config, job.weights, tokens, spill,
            lambda index: tell(ProgressEvent(index, config.num_layers, f"layer {index}"))))


def _train(job: RecoveryJob, model: _FinishedModel, options: DistillOptions, store: WorkStore,
           spill: Spill) -> None:
    """Store trained values as they would be read back, and the held-out losses before and after."""
    tokens, held_out = job.text.tokens, job.text.held_out
    progress = job.phases(RECOVERING)
    batch = parts_of(*tokens.shape)[0]
    parameters = model.parameters()
    starts = {name: parameter.start for name, parameter in parameters.items()}
    walk = QuantizedWalk(model.config, job.weights, model.packed, starts, model.packed_outside(EMBEDDING),
                         model.heads(), spill)

    def targets(windows: Iterable[int]) -> torch.Tensor:
        return torch.stack([store.batch(TARGETS, window // batch)[window % batch] for window in windows])

    def gradient(values: Values, windows: Sequence[int]) -> dict[str, torch.Tensor]:
        try:
            return walk.gradient(values, tokens[list(windows)], targets(windows))[1]
        except NonFiniteError as error:
            raise _in_window(error, windows) from error

    def held_out_loss(values: Values) -> float:
        windows = range(len(tokens) - held_out, len(tokens))
        try:
            return walk.loss(values, tokens[list(windows)], targets(windows))
        except NonFiniteError as error:
            raise _in_window(error, windows) from error

    def tell(done: int, total: int) -> None:
        progress(ProgressEvent(done, total, "scales and norms"))

    tell(0, 1)
    before = held_out_loss(starts)
    try:
        values = model.rounded(train(parameters, len(tokens) - held_out, options, store, gradient, tell))
        after = held_out_loss(values)
    except NonFiniteError:  # the loss of the quantized model itself is finite
        values, after = starts, math.nan
    store.put(RESULT, {LOSSES: torch.tensor([before, after], dtype=torch.float64)} | dict(values))


def _in_window(error: NonFiniteError, windows: Sequence[int]) -> NonFiniteError:
    return error if error.sample is None else error.in_window(windows[error.sample])


class _FinishedModel:
    """The finished units of a run, as a model whose scales and vectors can be replaced."""

    def __init__(self, job: RecoveryJob, writer: CheckpointWriter) -> None:
        self._job, self._writer = job, writer
        self.config = parse_config(job.source.config())

    def packed(self, index: int) -> dict[str, QuantizedTensor]:
        """A decoder layer's packed weights by the full names of their Linears."""
        return self._packed(index, self._writer.get(layer_unit(index))[0])

    def packed_outside(self, name: str) -> QuantizedTensor | None:
        """The packed embedding or head, if it is quantized."""
        row = next((row for row in self._job.rows if row.name == name and row.method), None)
        return None if row is None else stored_weight(row, self._writer.get(row.unit)[0])

    def heads(self) -> Heads:
        """The heads of the original and of the quantized model."""
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        original = self._job.weights.tensor(f"{name}.weight")
        packed, quantized = self.packed_outside(name), original
        if packed is not None:
            weight = registry("formats").get(packed.format).dequantize(packed)
            quantized = (undo_hadamard(weight) if packed.spec.rotation is not None else weight).to(original)
        return Heads(original, quantized, self.config.logit_softcap)

    def parameters(self) -> dict[str, Parameter]:
        parameters = {}
        for index in range(self.config.num_layers):
            for name, packed in self.packed(index).items():
                scale = scale_of(packed)
                parameters[name + SCALE] = Parameter("scale", scale, scale)
            parameters |= {name: self._vector(name) for name in self._vectors(index)}
        return parameters | {name: self._vector(name) for name in self._vectors(None)}

    def rounded(self, values: Values) -> dict[str, torch.Tensor]:
        """Values as they will be read from what is stored, float32. Raises NonFiniteError if one isn't
        finite."""
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError(f"{name} after recovery")
        result = {}
        for index in range(self.config.num_layers):
            for name, packed in self.packed(index).items():
                result[name + SCALE] = scale_of(with_scale(packed, values[name + SCALE]))
        infos = self._job.source.tensors()
        return result | {name: value.to(infos[name].dtype).float() for name, value in values.items()
                         if not name.endswith(SCALE)}

    def replace(self, index: int | None, values: Values) -> None:
        """Put the values into a layer's unit; ``None`` stands for the unit that comes after the layers."""
        unit = REST_UNIT if index is None else layer_unit(index)
        tensors, rows = self._writer.get(unit)
        changed: dict[str, torch.Tensor] = dict(tensors)
        errors = {}
        for name, packed in (self._packed(index, tensors) if index is not None else {}).items():
            packed = with_scale(packed, values[name + SCALE])
            changed |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
            errors[name] = self._error(name, packed)
        changed |= {name: values[name].to(tensors[name].dtype) for name in self._vectors(index)}
        new_rows = [_with_error(row, errors) for row in rows]
        if new_rows == rows and all(torch.equal(changed[name], tensor) for name, tensor in tensors.items()):
            return
        self._writer.put(STAGED + unit, changed, new_rows)
        self._writer.put(unit, changed, new_rows)
        self._writer.drop(STAGED + unit)

    def _packed(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, QuantizedTensor]:
        return {row.name: stored_weight(row, tensors) for row in self._job.rows
                if row.layer == index and row.method}

    def _error(self, name: str, packed: QuantizedTensor) -> float:
        exact = self._job.source.tensor(f"{name}.weight").float()
        if packed.spec.rotation is not None:
            exact = apply_hadamard(exact)
        form = registry("formats").get(packed.format)
        off = squares(packing.dequantize(form, packed).sub_(exact)) / max(squares(exact), 1e-60)
        return float(off ** 0.5)

    def _vectors(self, index: int | None) -> list[str]:
        """Names of a layer's vectors, or of the final norm's."""
        infos = self._job.source.tensors()
        vectors = [name for name in self._job.other if not name.endswith(DERIVED)
                   and len(infos[name].shape) == 1 and infos[name].dtype.is_floating_point]
        if index is None:
            return [name for name in vectors if name == f"{NORM}.weight"]
        return [name for name in vectors if layer_of(name, self.config.num_layers) == index]

    def _vector(self, name: str) -> Parameter:
        start = self._job.source.tensor(name).float()
        kind: Literal["norm", "bias"] = "bias" if name.endswith(".bias") else "norm"
        if kind == "bias":
            return Parameter(kind, start, start.square().mean().sqrt())
        return Parameter(kind, start, (start + self.config.offset_norms).abs())


def _with_error(row: Mapping[str, Any], errors: Mapping[str, float]) -> dict[str, Any]:
    if row["name"] not in errors:
        return dict(row)
    return LayerRow.model_validate(dict(row) | {"error": errors[row["name"]]}).to_dict()


RECOVERY = Distill()
