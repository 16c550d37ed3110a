"""Counts what a process holds beside weights and KV pages: activations, logits, tables, Python itself."""

from __future__ import annotations

import functools
import math
from collections import defaultdict

from quantkit.capacity.weights import WeightOption
from quantkit.kv.footprint import Footprint
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.linear import Linear
from quantkit.ops.cpu_weight import Activations, CpuWeight
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.cpu.buffers import MAX_ROWS, buffer, buffers, packed_of
from quantkit.runtime.cpu.program import MIN_POSITIONS

RUNTIME_BYTES = 480 * 2**20
"""Resident memory of a server without model and cache (0.43 GB measured): Python, torch, LLVM; rounded up."""
TABLE_BYTES = 40
"""Of a page's number: in a list, as an integer, and in a step's table."""
FLOAT = 4


def scratch_bytes(weights: WeightOption, footprint: Footprint, context: int,
                  concurrency: int) -> dict[str, int]:
    """Bytes by what they are for.

    ``activations`` of a chunk of a prompt; ``logits`` of a step, and a copy to sample from; ``cos and sin``
    of positions, worked out for up to twice as many; ``policy``: what it holds while it acts on a layer, an
    estimate; ``page tables``; ``runtime``: Python, torch and LLVM.
    """
    config = weights.config
    ropes = {config.rope_of(window) for window in config.sliding_windows}
    activations = _program(weights) if weights.fallback_reason is None else _operations(weights, footprint)
    return {"activations": activations,
            "logits": 2 * min(concurrency, DECODE_ROWS) * config.vocab_size * FLOAT,
            "cos and sin": len(ropes) * max(MIN_POSITIONS, 2 * context) * config.head_dim * FLOAT,
            "policy": footprint.acting_bytes,
            "page tables": TABLE_BYTES * footprint.pages(concurrency),
            "runtime": RUNTIME_BYTES}


@functools.lru_cache(maxsize=64)
def _program(weights: WeightOption) -> int:
    """Rows of activations between a :class:`~quantkit.runtime.cpu.program.CpuProgram`'s operations: what it
    would make is made (memory is taken when it is written to) and counted."""
    config, parts = weights.config, _Parts(weights)
    outs, ins, downs, gates, head = (parts.all(name) for name in ("out", "in", "down", "gate", "head"))
    q, kv, size = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim,
                   config.intermediate_size)
    buffers_of_step = [buffer([*outs, *downs], [*ins, *gates, *head]), buffer([], outs, q),
                       *buffers(parts.by_layer("in"), [], [q, kv, kv]),
                       *buffers(parts.by_layer("gate"), downs, [size, size])]
    if config.sandwich_norms:
        buffers_of_step.append(buffer([*outs, *downs], []))
    rooms: dict[object, CpuWeight] = {}
    for role, linears in (("hidden", [*ins, *gates, *head]), ("mixed", outs), ("gate", downs)):
        for kind in map(packed_of, linears):
            rooms[role, kind.kernel.decoder.family, kind.columns, kind.rotated] = kind
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffers_of_step}
    return sum(storages.values()) + MAX_ROWS * sum(
        Activations(kind, MAX_ROWS).stride for kind in rooms.values())


class _Parts:
    """Linears by the place that they have in a decoder layer."""

    def __init__(self, weights: WeightOption) -> None:
        self._linears: dict[tuple[str, str], list[Linear]] = defaultdict(list)
        for layer in weights.multiplied:
            assert layer.packed is not None, f"{layer.name} isn't packed in a model that runs as one program"
            name = layer.name.split(".")
            part = "head" if layer.name in (HEAD, EMBEDDING) else {"o_proj": "out", "down_proj": "down"}.get(
                name[-1], "in" if "self_attn" in name else "gate")
            self._linears[part, "" if part == "head" else name[2]].append(Linear(layer.name, layer.packed))

    def by_layer(self, wanted: str) -> list[list[Linear]]:
        return [linears for (part, _), linears in self._linears.items() if part == wanted]

    def all(self, wanted: str) -> list[Linear]:
        return [linear for linears in self.by_layer(wanted) for linear in linears]


def _operations(weights: WeightOption, footprint: Footprint) -> int:
    """Operation by operation, in float32, estimated: a chunk's rows in a layer; a sequence's keys and values,
    decoded and once more as attention wants them; the largest layer that is dequantized, and packed then."""
    config = weights.config
    wide = config.intermediate_size if config.experts is None else (
        config.experts.chosen * config.experts.intermediate_size)
    row = 4 * config.hidden_size + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim + 3 * wide
    slots = max(kind.peak.slots for kind in footprint.groups)
    attended = 4 * config.num_kv_heads * config.head_dim * slots
    largest = max((math.prod(layer.shape) for layer in weights.layers
                   if layer.packed is None and layer.row.spec is not None), default=0)
    return FLOAT * (MAX_ROWS * row + attended + 2 * largest)
