"""The roofline of decoding: whether a step is bound by its bytes or by its operations.

https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.kv.base import PAGE
from quantkit.runtime.memory.kv import Footprint
from quantkit.runtime.memory.weights import ModelWeights

MOST_BATCH = 1 << 20
"""A larger batch is treated as never."""


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at most.

    Attributes:
        bandwidth: bytes read a second.
        flops: floating-point (or integer) operations a second; a multiplication and its addition are two.
        whose: the sources of the figures, by name.
    """

    bandwidth: float
    flops: float
    whose: dict[str, str]


@dataclass(frozen=True)
class DecodeStep:
    """One token of every sequence.

    Attributes:
        batch: the number of sequences.
        weight_bytes, kv_bytes: read.
        flops: the operations that are done.
        memory_s, compute_s: seconds for each at the ceiling; the longer one is what a step takes at least.
    """

    batch: int
    weight_bytes: float
    kv_bytes: float
    flops: float
    memory_s: float
    compute_s: float

    @property
    def bound(self) -> str:
        """``memory`` or ``compute``."""
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def tokens_s(self) -> float:
        """The most tokens a second of all sequences together."""
        return self.batch / max(self.memory_s, self.compute_s)

    def to_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "weight_bytes": round(self.weight_bytes),
                "kv_bytes": round(self.kv_bytes), "operations": round(self.flops),
                "memory_seconds": self.memory_s, "compute_seconds": self.compute_s, "bound_by": self.bound,
                "tokens_per_second_at_most": self.tokens_s}


def decode_step(weights: ModelWeights, footprint: Footprint, ceilings: Ceilings, batch: int) -> DecodeStep:
    """A decode step of sequences that hold all that they ever will. A layer with a sliding window of the
    model's own reads only what it sees, though the cache may hold more."""
    config, read = weights.config, weights.read_bytes(batch)
    kv, seen = 0.0, 0
    for kind in footprint.groups:
        visible = kind.decoding.slots if kind.window is None else min(kind.decoding.slots, kind.window)
        residual_slots = min(footprint.residual_slots, visible)
        codes, residual = kind.page_bytes
        kv += batch * footprint.heads * kind.layers * ((visible - residual_slots) * codes
                                                       + residual_slots * residual) / PAGE
        seen += kind.layers * visible
    attention = 2 * config.num_heads * config.head_dim * seen  # with keys, with values
    flops = 2 * batch * (weights.multiplications() + attention)
    return DecodeStep(batch, read, kv, flops, (read + kv) / ceilings.bandwidth, flops / ceilings.flops)


def compute_bound_batch(weights: ModelWeights, footprint: Footprint, ceilings: Ceilings) -> int | None:
    """The smallest batch that is bound by compute; ``None``: every one is bound by memory, since what a
    sequence adds of its own keys and values takes longer to read than its arithmetic."""
    low, high = 0, 1
    while decode_step(weights, footprint, ceilings, high).bound == "memory":
        low, high = high, 2 * high
        if high > MOST_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if decode_step(weights, footprint, ceilings, middle).bound == "compute":
            high = middle
        else:
            low = middle
    return high
