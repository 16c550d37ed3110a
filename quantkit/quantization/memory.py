"""How much a quantization holds in memory at a time, and the peak that is predicted from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.checkpoint.manifest import LayerRow
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, EXPERT, HEAD
from quantkit.models.config import ModelConfig
from quantkit.models.outline import Outline
from quantkit.plugins.manager import registry
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.sources.base import TensorInfo

BATCH_TOKENS = 4096
"""Tokens in one forward pass of a layer: enough to keep the cores busy, few enough to stay small."""
LIBRARY_BYTES = 250_000_000
"""Of transformers, where a model's modules are used."""
BACKWARD_TOKENS = 2048
"""Tokens (or one sample, if that is longer) in one backward pass of a layer, which keeps its activations."""
BACKWARD_LOGITS = 1 << 23
"""The least number of logits that are in memory at a time. The allocator returns a block of this many floats,
32 MiB, to the system when it is freed; smaller blocks would stay on a growing heap."""
WRITTEN = 32
"""Calibration windows that a model writes at a time, where it writes them itself."""
STATES_IN_MEMORY = 1 << 30
"""Bytes of hidden states above which those between two layers are kept on disk."""
RECOVERY_STATES = 1 << 28
"""The same while scales and norms are trained, where what enters every layer is kept of some windows."""
BATCH = 1 << 22
"""Weights, and values of Hessians, of Linears that are solved together; larger ones are solved alone."""
WEIGHTS_AT_ONCE = 1 << 24
"""Weights that are solved at a time, of one Linear or of several: rows don't depend on each other, and each
takes working copies."""
PART = 1 << 26
"""Weights in a part, at most."""
TILE = 64
"""Rows of a part are a multiple of it, as a trellis's rings are."""


EMBEDDING_UNIT = "embedding"
REST_UNIT = "rest"
"""The units of a checkpoint that are in no decoder layer: a quantized embedding, and everything else."""
AROUND_UNIT = "tower"
"""That of a model of images and text with all that isn't its text model's."""


def layer_unit(index: int) -> str:
    return f"layer-{index}"


@dataclass(frozen=True)
class PlanRow:
    """What happens to one layer.

    Attributes:
        name: full name, without ``.weight``.
        shape: the weight is ``[out, in]``.
        layer: index of its decoder layer; ``None`` outside.
        shares: layers of equal value see the same input and share statistics.
        method: a registered method; ``None`` keeps the layer as it is.
        format: a registered format; ``None`` for a kept layer.
        spec: with ``scale_dtype`` resolved; ``None`` for a kept layer.
        options: the method's options as plain data, defaults filled in.
        bytes_before: the size of the weight in the source.
        bytes_after: the exact size of all tensors that are stored for it.
        dtype: the weight's dtype in the source, ``bfloat16``.
        why: why a layer is kept that a rule would quantize, if it is.
    """

    name: str
    shape: tuple[int, int]
    layer: int | None
    shares: str
    method: str | None
    format: str | None
    spec: QuantSpec | None
    options: Mapping[str, Any]
    bytes_before: int
    bytes_after: int
    dtype: str
    why: str = ""

    def recorded(self, *, error: float | None = None, tokens: int | None = None,
                 notes: tuple[str, ...] = ()) -> LayerRow:
        """The row of a manifest, with what was measured."""
        notes += (f"kept: {self.why}",) * bool(self.why)
        return LayerRow(name=self.name, shape=self.shape, dtype=self.dtype, method=self.method,
                        format=self.format, spec=self.spec, options=dict(self.options), bits=self.bits,
                        bytes=self.bytes_after, error=error, tokens=tokens, notes=notes)

    @property
    def unit(self) -> str:
        """The unit that it is stored in: units are made one after another, each whole or not at all."""
        if self.layer is not None:
            return layer_unit(self.layer)
        return EMBEDDING_UNIT if self.name == EMBEDDING else REST_UNIT

    @property
    def bits(self) -> float:
        """Stored bits a weight, scales and zero points included."""
        return 8 * self.bytes_after / (self.shape[0] * self.shape[1])

    def to_dict(self) -> dict[str, Any]:
        spec = self.spec.model_dump(mode="json") if self.spec else None
        return {**asdict(self), "shape": list(self.shape), "spec": spec, "options": dict(self.options),
                "label": self.spec.label() if self.spec else None, "bits": self.bits}


def rows_at_once(spec: QuantSpec, shape: tuple[int, int]) -> int:
    """The number of rows in a part of a weight ``shape``: all if they fit into one part or share scales."""
    rows, columns = shape
    step = max(1, PART // (columns * TILE)) * TILE
    block = spec.granularity.size if spec.granularity.strategy == "block" else None
    indivisible = (spec.granularity.strategy in ("tensor", "tile") or spec.outer_shape(shape) == (1, 1)
                   or (block is not None and step * columns % block))
    return rows if indivisible else min(rows, step)


def batch_groups(rows: Iterable[PlanRow], needs: Container[str],
                 limit: int = BATCH) -> list[tuple[PlanRow, ...]]:
    """Quantized Linears in the groups in which they are solved, each in the place of its first.

    Args:
        rows: the layers of one unit.
        needs: names of those whose methods need statistics.
        limit: weights, and values of Hessians, of a group that is more than one Linear.
    """
    groups: list[list[PlanRow]] = []
    open_groups: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.method is None:
            continue
        method = registry("methods").get(row.method)
        size = max(row.shape) * row.shape[1]
        if method.quantize_batch is None or row.name not in needs or 2 * size > limit:
            groups.append([row])
            continue
        alike = repr((row.shape, row.dtype, row.method, row.format, row.spec, sorted(row.options.items())))
        if alike in open_groups and (len(open_groups[alike]) + 1) * size <= limit:
            open_groups[alike].append(row)
        else:
            groups.append([row])
            open_groups[alike] = groups[-1]
    return [tuple(group) for group in groups]


def walks_bytes(config: ModelConfig, tokens: int, linears: int) -> int:
    """The most that is on disk while tokens get an importance: what enters each layer and the head, float32
    ``[tokens, hidden]``, and the gradients behind the layer that the backward walk has come to and before it;
    a square for each token, and each Linear that is wanted or the head."""
    return 4 * tokens * ((config.num_layers + 2) * config.hidden_size + linears + 1)


def peak_bytes(rows: Sequence[PlanRow], needs: set[str], calibration: CalibrationSpec | None,
               weighed: bool, config: ModelConfig | None, other: tuple[str, ...],
               infos: Mapping[str, TensorInfo],
               changed: bool = False, drift: Collection[str] = ()) -> int:
    """What :func:`~quantkit.quantization.planning.plan.make_plan` predicts.

    ``RUNTIME + hidden states + the most of what happens``, in bytes. Hidden states, if a method needs
    calibration, are ``windows · window · hidden · 4``, with what the widest Linear multiplies beside them,
    and twice that where drift is measured; up to ``STATES_IN_MEMORY``. What happens:

    - a *Linear is solved*: 11 for each weight (itself and its result in float32, and codes) or,
      where its method needs a Hessian, if that is more, ``4 · in²`` for a copy of it, 9 for each
      weight (itself, its levels, codes) and 32 for each of ``WEIGHTS_AT_ONCE``. Small ones that are alike
      (``BATCH``) are one, with a second copy of the Hessians. Squares take 4 more for each weight, or
      8 and 8 for each of ``WEIGHTS_AT_ONCE``: every weight's scale. Beside that are its unit's
      stored results, ``4 · in²`` for each input that Linears of its stage share and that this or a later one
      needs, twice that with drift, which also takes 20 for each weight, and 4 for every weight of the layer's
      later stages;
    - a *stage is measured*: 4 for every weight of the layer's Linears (float32), those Hessians, and the
      activations of ``BATCH_TOKENS``; or *run* with what is stored, which is there too;
      A transform that changes layers holds one in float32, beside that;
    - the *embedding or the head*, if it is quantized: as it is stored before and after, its codes, and as
      for a layer's Linear what a part of its rows takes (:func:`rows_at_once`);
    - *another tensor* is copied, as it is stored; of the embeddings those that the text needs, in float32;
    - where tokens get an importance, a layer is held with all that its backward pass needs, or the head with
      some of its logits; all layers' inputs are on disk;
    - a model that writes its calibration text is whole in memory before all that.

    Where tensors are views of files, what the system keeps of these in its cache isn't counted.

    Args:
        needs: names of the layers whose method needs statistics.
        calibration: the text, if any method needs statistics.
        weighed: tokens get an importance.
        config: the model's; ``None`` where its family isn't known, and nothing is calibrated.
        other: names of the other stored tensors.
        infos: the facts of all tensors.
        changed: a transform changes layers after their inputs were measured: all of a layer is one stage.
        drift: names of the layers whose inputs' drift is measured.
    """
    units: dict[int | None, list[PlanRow]] = defaultdict(list)
    for row in rows:
        units[row.layer].append(row)
    kept = [f"{row.name}.weight" for row in rows if row.method is None]
    largest = max((infos[name].nbytes for name in (*other, *kept)), default=0)
    largest += max(sum(row.bytes_after for row in unit if row.method) for unit in units.values())
    outside = units.pop(None, [])
    for row in outside:
        if row.spec is not None:
            largest = max(largest, _outside(row, row.name in needs))
    for unit in units.values():
        plain = 4 * sum(row.shape[0] * row.shape[1] for row in unit) if changed else 0
        packed = 0
        for stage, later in _stages(unit, changed or needs.isdisjoint(row.name for row in unit)):
            largest = max(largest, plain + packed + 4 * later + _solving(stage, needs, drift))
            packed += sum(row.bytes_after for row in stage)
    if calibration is None or config is None:
        return RUNTIME_BYTES + largest
    tokens, table = calibration.windows * calibration.window, infos[f"{EMBEDDING}.weight"].nbytes
    inside = not needs <= {EMBEDDING, HEAD}
    between = min(states_bytes(config, tokens, changed or not inside, bool(drift)), STATES_IN_MEMORY)
    wide = config.intermediate_size
    if config.experts is not None:
        wide = max(wide, config.experts.chosen * config.experts.intermediate_size, config.experts.shared_size)
    batch = 4 * min(tokens, max(BATCH_TOKENS, calibration.window)) * (6 * config.hidden_size + 4 * wide)
    largest = max(largest, table + 4 * min(tokens, config.vocab_size) * config.hidden_size)
    for unit in units.values():
        if not needs.isdisjoint(row.name for row in unit):
            weights = (4 << changed) * sum(row.shape[0] * row.shape[1] for row in unit)
            packed = sum(row.bytes_after for row in unit)
            forms = max(_hessians(stage, needs, drift) for stage, _ in _stages(unit, changed))
            largest = max(largest, weights + batch + max(packed, forms))
    solving = max(between + largest, _writing(rows, calibration, config))
    if not weighed:
        return RUNTIME_BYTES + solving
    weighing = 4 * tokens * len(needs)
    tokens = min(calibration.windows, calibration.importance_windows) * calibration.window
    weights = max(4 * sum(row.shape[0] * row.shape[1] for row in unit) for unit in units.values())
    batch = min(tokens, max(BACKWARD_TOKENS, calibration.window))
    activations = 10 * config.hidden_size + 4 * wide + 3 * config.num_heads * calibration.window
    logits = config.vocab_size * min(batch, -(-BACKWARD_LOGITS // config.vocab_size))
    head = 4 * config.vocab_size * config.hidden_size
    backward = max(weights + 4 * activations * batch, table + head + 24 * logits)
    return RUNTIME_BYTES + weighing + max(solving, backward)


def modules_peak_bytes(rows: Sequence[PlanRow], needs: set[str], calibration: CalibrationSpec,
                       outline: Outline, other: tuple[str, ...], infos: Mapping[str, TensorInfo],
                       drift: Collection[str] = ()) -> int:
    """The same of a run through transformers' modules: a layer is one stage.

    While it is measured, all of its tensors are there in float32, twice where experts are joined, with the
    Hessians and the activations of ``BATCH_TOKENS``; while it is solved, its plain weights count too. Beside
    that are the hidden states, and the rows of embeddings that the text needs.
    """
    tokens = calibration.windows * calibration.window
    layers: dict[int, int] = defaultdict(int)
    rows_used = 0
    for name, info in infos.items():
        if (layer := outline.layer_of(name)) is not None:
            layers[layer] += 4 * info.nbytes // info.dtype.itemsize
        elif "embed" in name and len(info.shape) == 2:
            rows_used += 4 * min(tokens, info.shape[0]) * info.shape[1]
    units: dict[int | None, list[PlanRow]] = defaultdict(list)
    for row in rows:
        units[row.layer].append(row)
    widest = max((row.shape[0] for row in rows if EXPERT not in row.name), default=0)
    batch = 4 * min(tokens, max(BATCH_TOKENS, calibration.window)) * (6 * outline.hidden_size + 4 * widest)
    measuring = 2 * max(layers.values(), default=0) + batch + max(
        (_hessians(unit, needs, drift) for unit in units.values()), default=0)
    solving = peak_bytes(rows, needs, None, False, None, other, infos, changed=True, drift=drift)
    states = min(modules_states_bytes(rows, calibration, outline, drift), STATES_IN_MEMORY)
    return LIBRARY_BYTES + states + rows_used + max(RUNTIME_BYTES + measuring, solving)


def modules_states_bytes(rows: Sequence[PlanRow], calibration: CalibrationSpec, outline: Outline,
                         drift: Collection[str]) -> int:
    """What :func:`states_bytes` is of such a run: hidden states, and where drift is measured the original
    model's, with what enters a layer's Linears there."""
    inputs: dict[int | None, dict[str, int]] = defaultdict(dict)
    for row in rows:
        if row.name in drift:
            inputs[row.layer][row.shares] = row.shape[1]
    width = max((sum(widths.values()) for widths in inputs.values()), default=0)
    tokens = calibration.windows * calibration.window
    return 4 * tokens * ((outline.hidden_size << bool(drift)) + width)


def states_bytes(config: ModelConfig, tokens: int, changed: bool, drift: bool) -> int:
    """The most that is kept of all tokens between two stages, float32: hidden states and what the next Linear
    multiplies, of the original model too where ``drift`` is measured; ``changed``: a layer is one stage."""
    inner = 0 if changed else max(config.num_heads * config.head_dim,
                                  0 if config.experts and all(config.experts.layers)
                                  else config.intermediate_size)
    return 4 * tokens * (config.hidden_size + inner) << drift


def _stages(unit: Sequence[PlanRow], together: bool) -> Iterator[tuple[list[PlanRow], int]]:
    """A layer's rows in the stages of :mod:`quantkit.quantization.calibration.runner`, or ``together``; and
    how many weights the later ones have."""
    stages: dict[str, list[PlanRow]] = defaultdict(list)
    for row in unit:
        stages["" if together else EXPERT if EXPERT in row.name else row.shares].append(row)
    later = sum(row.shape[0] * row.shape[1] for row in unit)
    for stage in stages.values():
        later -= sum(row.shape[0] * row.shape[1] for row in stage)
        yield stage, later


def _solving(unit: Sequence[PlanRow], needs: set[str], drift: Collection[str]) -> int:
    """While a unit's Linears are solved, some that are alike at a time."""
    peak = packed = 0
    groups = batch_groups(unit, needs)
    shared, total, waiting = set[str](), 0, list[int]()  # Hessians of a group and of those behind it
    for row in (row for group in reversed(groups) for row in reversed(group)):
        if row.name in needs and row.shares not in shared:
            shared.add(row.shares)
            total += _hessian(row, drift)
        waiting.append(total)
    for group in groups:
        row, count = group[0], len(group)
        weights, form = count * row.shape[0] * row.shape[1], count * row.shape[1] ** 2
        packed += sum(member.bytes_after for member in group)
        working = 11 * weights
        if row.name in needs:
            copies = 4 * form * (1 if count == 1 else 2)
            exact = 4 * weights * (row.name in drift)  # beside what is solved for
            working = max(working, copies + exact + 9 * weights + 32 * min(weights, WEIGHTS_AT_ONCE))
            if exact:
                working = max(working, 4 * row.shape[1] ** 2 + 20 * weights)
        if row.spec and row.spec.granularity.strategy == "tile":
            working += 8 * (weights + min(weights, WEIGHTS_AT_ONCE)) if row.name in needs else 4 * weights
        if row.spec and row.spec.rotation:
            working += 4 * weights + (8 * form if row.name in needs else 0)
        peak = max(peak, packed + working + waiting[-1])
        del waiting[-count:]
    return peak


def _hessians(unit: Sequence[PlanRow], needs: set[str], drift: Collection[str]) -> int:
    """Bytes of the Hessians and the drift of a unit's layers; those with the same input share one."""
    return sum({row.shares: _hessian(row, drift) for row in unit if row.name in needs}.values())


def _hessian(row: PlanRow, drift: Collection[str]) -> int:
    return 4 * row.shape[1] ** 2 * (2 if row.name in drift else 1)


def _outside(row: PlanRow, calibrated: bool) -> int:
    """The embedding or the head while it is solved: rows are, a part at a time."""
    assert row.spec is not None
    rows, columns = row.shape
    part = rows_at_once(row.spec, row.shape)
    hessian = 4 * columns**2 + 8 * (part + columns) * columns if calibrated else 0
    return row.bytes_before + row.bytes_after + rows * columns + 12 * part * columns + hessian


def _writing(rows: Sequence[PlanRow], calibration: CalibrationSpec, config: ModelConfig) -> int:
    """While a model writes its calibration text: all of it, and keys and values of the windows, at most in
    float32."""
    if calibration.text != "self":
        return 0
    values = sum(row.shape[0] * row.shape[1] for row in rows) + 2 * config.vocab_size * config.hidden_size
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return 4 * (values + token * min(calibration.windows, WRITTEN) * calibration.window)


COPIES = 8
"""Of every trained number in float32: start, unit, value, gradient, Adam's ``d`` and moments, and one that is
being made."""


def recovery_memory_bytes(rows: Sequence[PlanRow], config: ModelConfig, infos: Mapping[str, TensorInfo],
                          windows: int, length: int) -> int:
    """The peak of resident memory while scales and norms are trained.

    Trained numbers with what the optimizer keeps of them; what enters each layer, up to
    ``RECOVERY_STATES``; the heads of both models; and a layer with all that its backward pass needs, 16
    bytes for each weight and twice that where weights are rotated, or some of the models' logits.

    Args:
        windows: the number of windows of text.
        length: tokens of a window.
    """
    tokens = windows * length
    batch = min(tokens, max(BACKWARD_TOKENS, length))
    weights: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.layer is not None:
            rotated = row.spec is not None and row.spec.rotation is not None
            weights[row.layer] += (32 if rotated else 16) * row.shape[0] * row.shape[1]
    activations = 12 * config.hidden_size + 4 * config.intermediate_size + 3 * config.num_heads * length
    table = config.vocab_size * config.hidden_size
    heads = infos[f"{EMBEDDING}.weight"].nbytes + 4 * table * (1 + any(
        row.name in (EMBEDDING, HEAD) and row.spec is not None for row in rows))
    logits = config.vocab_size * min(batch, -(-BACKWARD_LOGITS // config.vocab_size))
    states = min(4 * tokens * config.hidden_size * (config.num_layers + 2), RECOVERY_STATES)
    backward = max(max(weights.values(), default=0) + 4 * activations * batch, 24 * logits)
    return RUNTIME_BYTES + 4 * COPIES * trained(rows, config) + states + heads + backward


def recovery_disk_bytes(rows: Sequence[PlanRow], config: ModelConfig, windows: int, length: int) -> int:
    """About what is on disk beside the finished layers while scales and norms are trained: the original
    model's last states, hidden states between two layers, the optimizer's state twice, the result, and a
    layer that is being replaced."""
    units: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.layer is not None:
            units[row.layer] += row.bytes_after
    states = 4 * windows * length * config.hidden_size
    return 2 * states + 4 * 8 * trained(rows, config) + max(units.values(), default=0)


def trained(rows: Sequence[PlanRow], config: ModelConfig) -> int:
    """How many numbers are trained, at most."""
    count = config.hidden_size * (1 + 4 * config.num_layers)
    for row in rows:
        if row.layer is not None and row.spec is not None:
            size = 1
            for side in row.spec.scale_shape(row.shape):
                size *= side
            count += size + row.shape[0]
    return count
