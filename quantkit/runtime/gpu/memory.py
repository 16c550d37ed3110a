"""Divides a GPU's memory before loading: weights, what a step needs beside them, KV pages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv.cache import KVCache
from quantkit.models.architecture import all_slots, linear_slots, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.interfaces import LanguageModel
from quantkit.runtime.gpu import linears
from quantkit.runtime.gpu.tables import table_bytes
from quantkit.support.errors import QuantkitError
from quantkit.support.units import human_bytes

MAX_ROWS = 2048
"""Tokens that go through a model at once."""
DECODING = 256
"""Sequences that decode side by side, at most."""
PIECE = 512
"""Slots over which attention is summed up by itself."""
LEFT = 1 << 29
"""Bytes for what is not counted: the driver's own, compiled kernels, graphs."""
PACKING = 6
"""Bytes of a weight while it is laid out anew: as it is stored, its codes, a copy of them, the result."""


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor],
                 device: torch.device) -> int:
    """What all weights take on the device in the kernels' order."""
    weights = sum(linears.packed_bytes(weight, dtype, device) for weight in quantized.values())
    for name, shape in tensor_shapes(config).items():
        if name.removesuffix(".weight") not in quantized:
            rows = -(-shape[0] // linears.ROWS) * linears.ROWS if len(shape) > 1 else shape[0]
            weights += rows * math.prod(shape[1:]) * dtype.itemsize
    return weights


def stored_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor]) -> int:
    """What they take as they are stored, or in ``dtype``."""
    return sum(weight.nbytes for weight in quantized.values()) + sum(
        math.prod(shape) * dtype.itemsize for name, shape in tensor_shapes(config).items()
        if name.removesuffix(".weight") not in quantized)


def packing_bytes(config: ModelConfig) -> int:
    """What is there beside the weights while some are laid out: all of a layer that see one input, or the
    head."""
    sizes: dict[object, int] = {}
    slots = all_slots(config) if config.tie_word_embeddings else linear_slots(config)
    for slot in slots:
        key = slot.layer, slot.shares
        sizes[key] = sizes.get(key, 0) + slot.out_features * slot.in_features
    return PACKING * max(sizes.values())


def step_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the largest step holds beside weights and pages, at most."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    partial = 4 * 2 * (config.num_heads * config.head_dim + config.intermediate_size)
    pieces = config.num_heads * (config.head_dim + 2) * 4 * -(-config.max_position_embeddings // PIECE)
    return (MAX_ROWS * (row * dtype.itemsize + partial)
            + DECODING * (config.vocab_size * (dtype.itemsize + 8) + pieces))


def check(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor],
          device: torch.device, uri: str, ours: bool) -> None:
    """Before anything is loaded.

    Args:
        config, dtype, quantized: of the model.
        device: where it is to run.
        uri: what it is called.
        ours: whether kernels of ours will run it, which lay weights out anew.

    Raises:
        QuantkitError: the GPU's free memory isn't enough.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    step = step_bytes(config, dtype)
    if ours:
        weights, step = weight_bytes(config, dtype, quantized, device), max(step, packing_bytes(config))
    else:
        weights = stored_bytes(config, dtype, quantized)
    if weights + step + LEFT > free:
        raise QuantkitError(
            f"{uri} doesn't fit on {device}",
            why=f"its weights take {human_bytes(weights)}, a step or loading {human_bytes(step + LEFT)}; "
                f"{human_bytes(free)} of {human_bytes(total)} are free",
            next=f"quantkit plan {uri} --memory {free // 10**6}MB, or --device cpu")


def spare_bytes(model: LanguageModel, cache: KVCache, sequences: int, chunk: int) -> int | None:
    """What is left for pages of a cache, now that the model is loaded; ``None`` on a CPU, where nothing is
    planned.

    Args:
        model: that is loaded.
        cache: the cache, with its largest number of concurrent sequences.
        sequences: as many.
        chunk: prompt tokens that go through the model at once.
    """
    if model.device.type != "cuda":
        return None
    config = model.config
    free, _ = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    queries = chunk * config.num_layers * config.num_heads * config.head_dim * model.dtype.itemsize
    return max(0, free + cached - step_bytes(config, model.dtype) - LEFT
               - table_bytes(cache, sequences, config.max_position_embeddings)
               - (queries if cache.policy.query_window else 0))
