"""Recovery as a phase of a quantize run: train, judge on held-out windows, and replace scales and norms.

Everything it finds is kept in the run's folder, and units are replaced only once the result is on disk: a run
that is stopped at any instant and started again ends with the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quantkit.checkpoint.manifest import LayerRow, RecoveryRecord
from quantkit.checkpoint.work import WorkStore
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.finite import squares
from quantkit.memory.quantize import RECOVERY_STATES
from quantkit.models.architecture import EMBEDDING, HEAD, layer_of
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Weights
from quantkit.models.loadable import DERIVED
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.plugins.manager import registry, whose
from quantkit.quantization.calibration.finite import NonFiniteError, blame
from quantkit.quantization.calibration.spill import Spill
from quantkit.quantization.planning.phases import READING, RECOVERING
from quantkit.quantization.planning.plan import Plan
from quantkit.quantization.planning.recovery_check import resolve
from quantkit.quantization.recovery.base import Parameter, Values
from quantkit.quantization.recovery.divergence import Heads
from quantkit.quantization.recovery.replace import damaged, mend, replace, require_units
from quantkit.quantization.recovery.scaled import scale_of, with_scale
from quantkit.quantization.recovery.task import TARGETS, Task, targets
from quantkit.quantization.recovery.walk import NORM, SCALE, QuantizedWalk, original_states, parts_of
from quantkit.quantization.recovery.windows import RecoveryText
from quantkit.quantization.solve import stored_weight
from quantkit.sources.base import ModelSource
from quantkit.support.errors import PluginError, QuantkitError
from quantkit.support.progress import Phases, ProgressEvent

RECOVER, RESULT, LOSSES = "recover", "result", "losses"
"""What a run calls this work; the unit that is its result; in it, held-out losses before and after."""
REPLACING = "replacing"
"""The unit that is there once scales and norms are being replaced: then no layer can be made again."""


@dataclass(frozen=True)
class Units:
    """Names of a run's units: of decoder layer ``layer.format(index)``, and of what is outside of them."""

    layer: str
    table: str
    rest: str


class RecoveryRun:
    """The recovery of one run. :meth:`mend`, then the layers, then the call.

    Args:
        plan: of the run, whose recipe has a recovery.
        source: the model.
        text: windows that it is trained and judged on.
        phases: of the run.
        units: how units are called.
        strict: a result that isn't kept is an error.
    """

    def __init__(self, plan: Plan, source: ModelSource, text: RecoveryText, phases: Phases, units: Units,
                 strict: bool) -> None:
        assert plan.recipe.recover is not None
        self._plan, self._source, self._phases, self._units = plan, source, phases, units
        self.text = text
        self._spec, self._strict = plan.recipe.recover, strict
        self._recovery, self._options = resolve(self._spec)

    def mend(self, writer: CheckpointWriter, config: ModelConfig) -> None:
        """Finish what an earlier attempt was stopped in. Raises CheckpointError for a damaged unit."""
        names = [self._units.layer.format(index) for index in range(config.num_layers)] + [self._units.rest]
        mend(writer, names)
        store = WorkStore(writer, RECOVER)
        if store.has(REPLACING):
            if any(row.name == EMBEDDING for row in self._plan.rows):
                names.append(self._units.table)
            require_units(writer, names)
            if not store.has(RESULT):
                raise damaged(writer, "the result of the recovery")

    def __call__(self, writer: CheckpointWriter, config: ModelConfig, weights: Weights) -> RecoveryRecord:
        """Train, unless an earlier attempt did, and replace what became better.

        Raises:
            QuantkitError: the result isn't kept, and ``strict``.
            PluginError: a plugin's recovery gives something else than values of the parameters.
            CalibrationError: a value of the original or the quantized model isn't finite. Where one that was
                trained isn't, nothing is kept.
        """
        store = WorkStore(writer, RECOVER)
        if not store.has(RESULT):
            try:
                with Spill(writer.states, RECOVERY_STATES) as spill:
                    self._original(store, config, weights, spill)
                with Spill(writer.states, RECOVERY_STATES) as spill:
                    model = _Model(writer, self._plan, self._source, config, weights, self._units)
                    self._train(model, store, spill)
            except NonFiniteError as error:
                raise blame(error, self.text.origins, "recovery window") from error
        values = store.get(RESULT)
        before, after = values.pop(LOSSES).tolist()
        record = RecoveryRecord(
            name=self._spec.name, options=self._options.model_dump(mode="json"), windows=self._spec.windows,
            held_out=self.text.held_out, sha256=self.text.sha256, before=before,
            after=None if math.isnan(after) else after, kept=after < before)
        if record.kept:
            if not store.has(REPLACING):
                store.put(REPLACING, {REPLACING: torch.tensor(True)})
            model = _Model(writer, self._plan, self._source, config, weights, self._units)
            for index in range(config.num_layers):
                model.replace(index, values)
            model.replace(None, values)
        elif self._strict:
            raise QuantkitError(f"recover: {record.note}", why="--strict makes every fallback an error",
                                next="change the recipe's recover, or leave out --strict")
        return record

    def _original(self, store: WorkStore, config: ModelConfig, weights: Weights, spill: Spill) -> None:
        """Store what the original model gives of all windows."""
        if store.has(TARGETS):
            return
        tokens, tell = self.text.tokens, self._phases(READING)
        shapes = [(count, tokens.shape[1], config.hidden_size) for count in parts_of(*tokens.shape)]
        store.put_batches(TARGETS, shapes, torch.float32, original_states(
            config, weights, tokens, spill,
            lambda index: tell(ProgressEvent(index, config.num_layers, f"layer {index}"))))

    def _train(self, model: _Model, store: WorkStore, spill: Spill) -> None:
        tokens, count = self.text.tokens, self.text.held_out
        tell, batch = self._phases(RECOVERING), parts_of(*tokens.shape)[0]
        parameters = model.parameters()
        starts = {name: parameter.start for name, parameter in parameters.items()}
        walk = QuantizedWalk(model.config, model.weights, model.packed, starts, model.table(), model.heads(),
                             spill)
        held_out = range(len(tokens) - count, len(tokens))

        def held_out_loss(values: Values) -> float:
            try:
                return walk.loss(values, tokens[list(held_out)], targets(store, held_out, batch))
            except NonFiniteError as error:
                raise error if error.sample is None else error.in_window(held_out[error.sample]) from error

        task = Task(walk, parameters, tokens[:-count], batch, store, lambda done, total: tell(
            ProgressEvent(done, total, "scales and norms")))
        task.tell(0, 1)
        before = held_out_loss(starts)
        try:
            trained: object = self._recovery.train(task, self._options)
            _require_unchanged(self._spec.name, parameters, model.parameters())
            values = model.rounded(starts | _checked(self._spec.name, trained, parameters))
            after = held_out_loss(values)
        except NonFiniteError:  # the loss of the quantized model itself is finite
            values, after = starts, math.nan
        store.put(RESULT, {LOSSES: torch.tensor([before, after], dtype=torch.float64)} | dict(values))


class _Model:
    """The finished units of a run, as a model whose scales and vectors can be replaced."""

    def __init__(self, writer: CheckpointWriter, plan: Plan, source: ModelSource, config: ModelConfig,
                 weights: Weights, units: Units) -> None:
        self._writer, self._plan, self._source, self._units = writer, plan, source, units
        self.config, self.weights = config, weights

    def packed(self, index: int) -> dict[str, QuantizedTensor]:
        """A decoder layer's packed weights by the full names of their Linears."""
        tensors, _ = self._writer.get(self._units.layer.format(index))
        return self._packed(index, tensors)

    def parameters(self) -> dict[str, Parameter]:
        """Everything that can be trained."""
        parameters = {}
        for index in range(self.config.num_layers):
            for name, packed in self.packed(index).items():
                scale = scale_of(packed)
                parameters[name + SCALE] = Parameter("scale", scale, scale)
            parameters |= {name: self._vector(name) for name in self._vectors(index)}
        return parameters | {name: self._vector(name) for name in self._vectors(None)}

    def table(self) -> QuantizedTensor | None:
        """The embedding, if it is quantized."""
        return self._outside(EMBEDDING)

    def heads(self) -> Heads:
        """Those of the original and of the quantized model."""
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        original = self.weights.tensor(f"{name}.weight")
        packed = self._outside(name)
        quantized = original
        if packed is not None:
            weight = registry("formats").get(packed.format).dequantize(packed)
            if packed.spec.rotation is not None:
                weight = undo_hadamard(weight)
            quantized = weight.to(original)
        return Heads(original, quantized, self.config.logit_softcap)

    def rounded(self, values: Values) -> dict[str, torch.Tensor]:
        """Values as they will be read from what is stored, float32."""
        result = {}
        for index in range(self.config.num_layers):
            for name, packed in self.packed(index).items():
                result[name + SCALE] = scale_of(with_scale(packed, values[name + SCALE]))
        for name, value in values.items():
            if not name.endswith(SCALE):
                result[name] = value.to(self._source.tensors()[name].dtype).float()
        return result

    def replace(self, index: int | None, values: Values) -> None:
        """Put the values into a layer's unit; ``None``: into that of what comes after the layers."""
        unit = self._units.rest if index is None else self._units.layer.format(index)
        tensors, rows = self._writer.get(unit)
        changed: dict[str, torch.Tensor] = dict(tensors)
        errors = {}
        for name, packed in (self._packed(index, tensors) if index is not None else {}).items():
            packed = with_scale(packed, values[name + SCALE])
            changed |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
            errors[name] = self._error(name, packed)
        changed |= {name: values[name].to(tensors[name].dtype) for name in self._vectors(index)}
        replace(self._writer, unit, changed, [_with_error(row, errors) for row in rows])

    def _error(self, name: str, packed: QuantizedTensor) -> float:
        exact = self._source.tensor(f"{name}.weight").float()
        if packed.spec.rotation is not None:
            exact = apply_hadamard(exact)
        form = registry("formats").get(packed.format)
        off = squares(packing.dequantize(form, packed).sub_(exact)) / max(squares(exact), 1e-60)
        return float(off ** 0.5)

    def _packed(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, QuantizedTensor]:
        return {row.name: stored_weight(row, tensors) for row in self._plan.rows
                if row.layer == index and row.method}

    def _outside(self, name: str) -> QuantizedTensor | None:
        row = next((row for row in self._plan.rows if row.name == name and row.method), None)
        if row is None:
            return None
        unit = self._units.table if name == EMBEDDING else self._units.rest
        return stored_weight(row, self._writer.get(unit)[0])

    def _vectors(self, index: int | None) -> list[str]:
        """Names of a layer's vectors, or of the final norm's."""
        infos = self._source.tensors()
        vectors = [name for name in self._plan.other if not name.endswith(DERIVED)
                   and len(infos[name].shape) == 1 and infos[name].dtype.is_floating_point]
        if index is None:
            return [name for name in vectors if name == f"{NORM}.weight"]
        return [name for name in vectors if layer_of(name, self.config.num_layers) == index]

    def _vector(self, name: str) -> Parameter:
        start = self._source.tensor(name).float()
        kind: Literal["norm", "bias"] = "bias" if name.endswith(".bias") else "norm"
        if kind == "bias":
            return Parameter(kind, start, start.square().mean().sqrt())
        return Parameter(kind, start, (start + self.config.offset_norms).abs())


def _checked(name: str, trained: object, parameters: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """Trained values. Raises PluginError if they aren't values of the parameters, NonFiniteError if they
    aren't finite."""
    problem = None
    if not isinstance(trained, dict):
        problem = f"it returned a {type(trained).__name__}, not a dictionary of tensors"
    else:
        for key, value in trained.items():
            if key not in parameters:
                problem = f"it trains {key!r}, which is no parameter"
            elif not isinstance(value, torch.Tensor) or value.shape != parameters[key].start.shape:
                problem = f"{key} became {list(value.shape) if isinstance(value, torch.Tensor) else value!r}"
            elif not bool(torch.isfinite(value).all()):
                raise NonFiniteError(f"{key} after recovery {name}")
    if problem is not None or not isinstance(trained, dict):
        raise PluginError(f"{whose('recoveries', name)}: {problem}",
                          why="train returns values of parameters by name, float32 of their shapes",
                          next="see docs/plugins.md")
    return {key: value.detach().to(device="cpu", dtype=torch.float32) for key, value in trained.items()}


def _require_unchanged(name: str, parameters: Mapping[str, Parameter],
                       stored: Mapping[str, Parameter]) -> None:
    """Raise PluginError if a recovery wrote to what it was given: losses and ratios count from there."""
    for key, parameter in stored.items():
        if not torch.equal(parameters[key].start, parameter.start):
            raise PluginError(f"{whose('recoveries', name)}: it writes to the start of {key}",
                              why="parameters are read only", next="train a clone; see docs/plugins.md")


def _with_error(row: Mapping[str, Any], errors: Mapping[str, float]) -> dict[str, Any]:
    name = row["name"]
    if name not in errors:
        return dict(row)
    return LayerRow.model_validate(dict(row) | {"error": errors[name]}).to_dict()
