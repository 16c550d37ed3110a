"""What a process holds beside weights and KV pages: activations, logits, tables, the runtime itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from math import prod

import torch

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache
from quantkit.models.architecture import EMBEDDING, HEAD, LinearSlot, all_slots, linear_slots
from quantkit.models.config import ModelConfig
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Linear
from quantkit.ops.cpu_weight import Activations, CpuWeight
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.memory.kv import Footprint
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.runtime.memory.weights import ModelWeights, packed_sample

PREFILL_CHUNK = 512
"""Prompt tokens that go through a model on a CPU at once, at most, and wherever policies act on chunks; other
requests decode between two chunks."""
CPU_ROWS = 512
"""Tokens that go through a program of CPU kernels at once, at most."""
GPU_ROWS = 2048
"""Tokens that go through a model on a GPU at once, at most."""
GPU_LEAST = 128
"""Tokens of a prompt that go through a model on a GPU in the time of one: rows are filled up to as many."""
GPU_SEQUENCES = 256
"""Sequences that decode side by side on a GPU, at most."""
MIN_POSITIONS = 512
"""Positions whose cosines and sines a program has at least."""
SPLIT = 512
"""Slots over which a GPU's attention is summed up by itself."""
PACKING = 6
"""Bytes of a weight while a GPU's kernels lay it out anew: as it is stored, its codes, a copy of them, the
result."""
TABLE_WIDTH = 16
"""Pages of a head for which a GPU's tables have room at first."""
PAGE_NUMBER_BYTES = 40
"""Of a page's number: in a list, as an integer, and in a step's table."""
FLOAT = 4
PAIR_BYTES = 52
"""What a program of CPU kernels notes of a row and one of its experts."""


def scratch_bytes(weights: ModelWeights, footprint: Footprint, context: int,
                  concurrency: int) -> dict[str, int]:
    """Bytes on a CPU by what they are for.

    ``activations`` of a chunk of a prompt; ``logits`` of a step, and a copy to sample from; ``cos and sin``
    of positions, worked out for up to twice as many; ``policy``: what it holds while it acts on a layer, an
    estimate; ``page tables``; ``runtime``: Python, torch and LLVM.
    """
    config = weights.config
    ropes = {config.rope_of(window) for window in config.sliding_windows}
    activations = _program(weights) if weights.fallback_reason is None else _operations(weights, footprint)
    rows = min(concurrency, DECODE_ROWS) * (1 if config.diffusion is None else config.diffusion.block_size)
    return {"activations": activations,
            "logits": 2 * rows * config.vocab_size * FLOAT,
            "cos and sin": len(ropes) * max(MIN_POSITIONS, 2 * context) * config.head_dim * FLOAT,
            "policy": footprint.acting_bytes,
            "page tables": PAGE_NUMBER_BYTES * footprint.pages(concurrency),
            "runtime": RUNTIME_BYTES}


def packed_of(linear: Linear, high: bool = False) -> CpuWeight:
    """A Linear's packed weight, or with ``high`` its high halves if it has any. Raises TypeError if it isn't
    packed."""
    if not isinstance(linear.weight, CpuWeight):
        raise TypeError(f"{linear.name} isn't packed")
    return linear.weight.high() if high else linear.weight


def buffer_width(writers: Sequence[Linear], readers: Sequence[Linear], size: int = 0) -> int:
    """Numbers of a row between a program's operations that is wide enough for these Linears."""
    from quantkit_kernels.cpu.weight_decoder import STRIPE

    width = max([size, *(packed_of(linear).stripes * STRIPE for linear in writers),
                 *(packed_of(linear).columns for linear in readers)])
    return -(-width // 16) * 16


def result_widths(writers: Sequence[Sequence[Linear]], readers: Sequence[Linear],
                  sizes: Sequence[int]) -> list[int]:
    """The widths of the rows for the results of Linears that read the same input.

    Args:
        writers: for every layer, a Linear for each result, or one for all of them.
        readers: the Linears that read any of the results.

    Returns:
        One for each result, or a single one where one Linear computes all results side by side.
    """
    if len(writers[0]) == len(sizes):
        return [buffer_width([linears[i] for linears in writers], readers) for i in range(len(sizes))]
    assert all(len(linears) == 1 for linears in writers)
    last = sum(sizes[:-1])
    width = max([last, *(last + packed_of(linear).columns for linear in readers)])
    return [buffer_width([linears[0] for linears in writers], [], width)]


@functools.lru_cache(maxsize=64)
def _program(weights: ModelWeights) -> int:
    """Rows of activations between the operations of a program of CPU kernels."""
    config, experts = weights.config, weights.config.experts
    by_layer: dict[str, dict[str, list[Linear]]] = defaultdict(lambda: defaultdict(list))
    for layer in weights.multiplied:
        assert layer.packed is not None, f"{layer.name} isn't packed in a model that runs as one program"
        place = layer.name.split(".")
        role = "head" if layer.name in (HEAD, EMBEDDING) else {"o_proj": "out", "down_proj": "down"}.get(
            place[-1], "in" if "self_attn" in place else "gate")
        if experts is not None and ".experts." in layer.name:
            role = f"expert {experts.projections.index(place[-1])}"
        by_layer[role]["" if role == "head" else place[2]].append(Linear(layer.name, layer.packed))
    linears = defaultdict(list, {role: list(itertools.chain(*layers.values()))
                                 for role, layers in by_layer.items()})
    gates, ups, downs = (linears[f"expert {part}"] for part in range(3))
    results = [*linears["out"], *linears["down"]]
    hidden = [*linears["in"], *linears["gate"], *linears["head"], *gates, *ups]
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    widths = [buffer_width([], linears["out"], q),
              *result_widths([*by_layer["in"].values()], [], [q, kv, kv])]
    if linears["gate"]:
        widths += result_widths([*by_layer["gate"].values()], linears["down"], [config.intermediate_size] * 2)
    pairs = 0
    if experts is not None:
        sample = packed_sample(None, None, config.hidden_size, "", weights.dtype)
        assert sample is not None
        for rows in (experts.count, 1)[:2 if experts.shared_size else 1]:
            router = Linear("router", dataclasses.replace(sample, shape=(rows, config.hidden_size)))
            hidden.append(router)
            widths.append(buffer_width([router], []))
        if experts.shared_size:
            widths.append(buffer_width(linears["down"], []))
        sizes = [buffer_width(side, downs) for side in (gates, ups)] + [buffer_width(downs, [])]
        pairs = experts.chosen * (FLOAT * sum(sizes) + PAIR_BYTES + _prepared([("pairs", [*gates, *ups]),
                                                                               ("opened", downs)]))
    widths.append(buffer_width(results, hidden))
    if config.sandwich_norms:
        widths.append(buffer_width(results, []))
    by_row = [("hidden", [linear for linear in hidden if ".experts." not in linear.name]),
              ("mixed", linears["out"]), ("gate", linears["down"])]
    return CPU_ROWS * (FLOAT * sum(widths) + _prepared(by_row) + pairs)


def _prepared(readers: Sequence[tuple[str, Sequence[Linear]]]) -> int:
    """Bytes of a row as the Linears of each role read it."""
    inputs = {(role, weight.input_key): weight for role, linears in readers
              for weight in map(packed_of, linears)}
    return sum(Activations(weight, CPU_ROWS).stride for weight in inputs.values())


def _operations(weights: ModelWeights, footprint: Footprint) -> int:
    """Operation by operation, in float32, estimated: a chunk's rows in a layer; a sequence's keys and values,
    decoded and once more as attention wants them; the largest layer that is dequantized, and packed then."""
    config = weights.config
    wide = config.intermediate_size if config.experts is None else (
        config.experts.chosen * config.experts.intermediate_size + config.experts.shared_size)
    row = 4 * config.hidden_size + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim + 3 * wide
    slots = max(group.peak.slots for group in footprint.groups)
    attended = 4 * config.num_kv_heads * config.head_dim * slots
    largest = max((prod(layer.shape) for layer in weights.layers
                   if layer.packed is None and layer.row.spec is not None), default=0)
    return FLOAT * (CPU_ROWS * row + attended + 2 * largest)


def packing_bytes(config: ModelConfig) -> int:
    """What is there beside the weights while a GPU's are laid out: all of a layer that see one input, or the
    head."""
    return PACKING * max(_product_sizes(
        config, all_slots(config) if config.tie_word_embeddings else linear_slots(config)))


def dequantized_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a GPU's products of prompts keep for the weight that they dequantize, at most."""
    return dtype.itemsize * max(_product_sizes(config, [
        slot for slot in linear_slots(config) if slot.layer is not None and ".experts." not in slot.name]))


def _product_sizes(config: ModelConfig, slots: Sequence[LinearSlot]) -> Collection[int]:
    """Numbers of the weights that see one input, or one expert's."""
    sizes: dict[object, int] = defaultdict(int)
    for slot in slots:
        shares = slot.shares
        if config.experts is not None and ".experts." in slot.name:  # all that are down, or all others
            shares = str(slot.name.endswith(config.experts.projections[2]))
        sizes[slot.layer, shares] += slot.out_features * slot.in_features
    return sizes.values()


def gpu_step_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the largest step on a GPU holds beside weights and pages, at most: once as a graph, and once
    operation by operation."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    partial = 4 * 2 * (config.num_heads * config.head_dim + config.intermediate_size)
    splits = config.num_heads * (config.head_dim + 2) * 4 * -(-config.max_position_embeddings // SPLIT)
    return (GPU_ROWS * (2 * row * dtype.itemsize + partial)
            + GPU_SEQUENCES * (config.vocab_size * (dtype.itemsize + 8) + splits))


def prompt_portion(model: LanguageModel, cache: KVCache, chunk: int = PREFILL_CHUNK) -> int:
    """Prompt tokens that go through a model over this cache at once, at most; ``chunk``: those after which
    policies act that act on chunks, and after which a prompt is cut if that makes a difference."""
    acts = any(layer.policy.on_prefill == "chunk" for layer in cache.layers)
    large = model.device.type == "cuda" and not acts and model.chunk_invariant(cache)
    return GPU_ROWS if large else chunk


def table_size(entries: int) -> int:
    """Entries of a GPU's table that must hold a number of them: tables grow in steps."""
    return max(TABLE_WIDTH, 1 << (entries - 1).bit_length())


def residual_table_size(cache: KVCache) -> int:
    """Pages of vectors that wait for their codes for which a GPU's tables come to have room, while a prompt's
    portion is read."""
    codecs = cache.codecs
    portion = GPU_ROWS if cache.device.type == "cuda" else PREFILL_CHUNK
    return table_size(-(-(codecs.first + codecs.residual_length + portion) // PAGE) + 1)


def gpu_table_bytes(cache: KVCache, sequences: int, context: int) -> int:
    """What a GPU's tables of so many sequences, and of one that policies try things with, take, one of them
    of ``context`` tokens; half of it once more while they grow."""
    entries = table_size(-(-context // PAGE)) + 1
    if cache.has_residual:
        entries += residual_table_size(cache) + 1
    return 4 * table_size(sequences + 1) * len(cache.layers) * cache.heads * entries * 3 // 2


