"""Predicts what training scales and norms takes, in memory and on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.config import ModelConfig
from quantkit.quantization.memory import BACKWARD_LOGITS, BACKWARD_TOKENS, RECOVERY_STATES
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.sources.base import TensorInfo

if TYPE_CHECKING:
    from quantkit.quantization.planning.layers import PlanRow

COPIES = 8
"""Of every trained number in float32: start, unit, value, gradient, Adam's ``d`` and moments, and one that is
being made."""


def recovery_memory_bytes(rows: Sequence[PlanRow], config: ModelConfig, infos: Mapping[str, TensorInfo],
                   windows: int, length: int) -> int:
    """The peak of resident memory.

    Trained numbers with what the optimizer keeps of them; what enters each layer, up to
    ``RECOVERY_STATES``; the heads of both models; and a layer with all that its backward pass needs, 16
    bytes for each weight and twice that where weights are rotated, or some of the models' logits.

    Args:
        rows: the plan's.
        config: the model's.
        infos: its tensors.
        windows: of text.
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
    """About what is on disk beside the finished layers: the original model's last states, hidden states
    between two layers, the optimizer's state twice, the result, and a layer that is being replaced."""
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
