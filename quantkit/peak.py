"""How much memory a quantization will need, before it is begun."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantkit.models.config import ModelConfig
from quantkit.sources.base import TensorInfo
from quantkit.spec import CalibrationSpec

if TYPE_CHECKING:
    from quantkit.plan import PlanRow

RUNTIME_BYTES = 320 * 2**20
"""Resident memory of the interpreter with torch and nothing loaded (243 MiB measured), rounded up."""
BACKWARD_TOKENS = 2048
"""Tokens that go backward through a layer at a time (or one sample): its activations are kept meanwhile."""
BACKWARD_LOGITS = 1 << 23
"""Logits in memory at a time."""
WRITTEN = 32
"""Calibration windows that a model writes at a time, where it writes them itself."""
STATES_IN_MEMORY = 1 << 30
"""Bytes of hidden states, of all layers together, above which they are on disk between two passes."""


def peak_bytes(rows: list[PlanRow], needs: set[str], calibration: CalibrationSpec | None, states: int,
               config: ModelConfig, other: tuple[str, ...], infos: Mapping[str, TensorInfo]) -> int:
    """What :func:`~quantkit.plan.make_plan` predicts.

    ``RUNTIME + calibration + max(unit)``, in bytes:

    - *calibration*, if a method needs it: the embeddings as they are stored, and
      ``2 · samples · length · hidden · 4`` for the hidden states before and after a layer;
    - *unit*, a decoder layer: 4 for every weight of its Linears (float32) plus the stored result,
      and, where a method needs Hessians, ``4 · in²`` for each input that layers share (for each Linear,
      where tokens have an importance), plus ``4 · (2 · out · in + 2 · in²)`` of working copies for
      its largest Linear;
    - *unit*, the rest: every other tensor as it is stored, and ``lm_head`` as a unit of its own.

    Before that, where tokens get an importance, all layers' inputs are held (up to
    ``STATES_IN_MEMORY``, the rest on disk) beside a layer with all that its backward pass needs, or the
    head with some of its logits; the larger of both peaks counts. A model that writes its calibration text
    is whole in memory before all that.

    Args:
        rows: the plan's.
        needs: names of the layers whose method needs statistics.
        calibration: if any does.
        states: bytes of all layers' inputs, where tokens get an importance; else 0.
        config: the model's.
        other: names of the other stored tensors.
        infos: of all tensors.
    """
    units: dict[int | None, list[PlanRow]] = defaultdict(list)
    for row in rows:
        units[row.layer].append(row)
    largest = sum(infos[name].nbytes for name in other if not name.startswith("model.layers."))
    for unit in units.values():
        weights = sum(4 * row.shape[0] * row.shape[1] + row.bytes_after for row in unit)
        solved = [row for row in unit if row.name in needs]
        hessians = sum({row.name if states else row.shares: 4 * row.shape[1] ** 2 for row in solved}.values())
        working = max((8 * (r.shape[0] + r.shape[1]) * r.shape[1] for r in solved), default=0)
        largest = max(largest, weights + hessians + working)
    if calibration is None:
        return RUNTIME_BYTES + largest
    embeddings = infos.get("model.embed_tokens.weight")
    between = 2 * calibration.samples * calibration.length * config.hidden_size * 4
    stored = embeddings.nbytes if embeddings else 0
    solving = max(between + stored + largest, _writing(rows, calibration, config))
    if not states:
        return RUNTIME_BYTES + solving
    weighing = 4 * calibration.samples * calibration.length * len(needs)
    weights = max(sum(4 * row.shape[0] * row.shape[1] for row in unit) for unit in units.values())
    tokens = min(calibration.samples * calibration.length, max(BACKWARD_TOKENS, calibration.length))
    wide = config.intermediate_size
    if config.experts is not None:
        wide = max(wide, config.experts.chosen * config.experts.intermediate_size)
    kept = 10 * config.hidden_size + 4 * wide + 3 * config.num_heads * calibration.length
    logits = config.vocab_size * min(tokens, max(1, BACKWARD_LOGITS // config.vocab_size))
    backward = max(weights + 4 * kept * tokens, 4 * (config.vocab_size * config.hidden_size + 6 * logits))
    return RUNTIME_BYTES + weighing + max(
        solving, between + stored + min(states, STATES_IN_MEMORY) + backward)


def _writing(rows: list[PlanRow], calibration: CalibrationSpec, config: ModelConfig) -> int:
    """While a model writes its calibration text: all of it in float32, and keys and values of the windows."""
    if calibration.text != "self":
        return 0
    values = sum(row.shape[0] * row.shape[1] for row in rows) + 2 * config.vocab_size * config.hidden_size
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return 4 * (values + token * min(calibration.samples, WRITTEN) * calibration.length)
