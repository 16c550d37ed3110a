"""A GPU's memory, shared out before anything is loaded: weights, what a step needs beside them, pages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from quantkit.errors import QuantkitError
from quantkit.formats.base import QuantizedTensor
from quantkit.models.architecture import tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import LanguageModel
from quantkit.units import human_bytes

MOST_ROWS = 2048
"""Tokens that go through a model at once."""
DECODING = 256
"""Sequences that decode side by side, at most."""
PIECE = 512
"""Slots over which attention is summed up by itself."""
LEFT = 1 << 29
"""Bytes for what is not counted: the driver's own, compiled kernels, graphs."""


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor]) -> int:
    """What all weights take on the device, as they are stored or in ``dtype``; rows are tiles of 128."""
    plain = tensor_shapes(config)
    found = 0
    for name, shape in plain.items():
        if name.removesuffix(".weight") in quantized:
            continue
        rows = -(-shape[0] // 128) * 128 if len(shape) > 1 else shape[0]
        found += rows * math.prod(shape[1:]) * dtype.itemsize
    return found + sum(-(-one.shape[0] // 128) * 128 * one.nbytes // one.shape[0]
                       for one in quantized.values())


def step_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the largest step holds beside weights and pages, at most."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    partial = 4 * 2 * (config.num_heads * config.head_dim + config.intermediate_size)
    pieces = config.num_heads * (config.head_dim + 2) * 4 * -(-config.max_position_embeddings // PIECE)
    return (MOST_ROWS * (row * dtype.itemsize + partial)
            + DECODING * (config.vocab_size * (dtype.itemsize + 8) + pieces))


def check(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor],
          device: torch.device, uri: str) -> None:
    """Before anything is loaded. Raises QuantkitError: the GPU's free memory isn't enough."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    weights, step = weight_bytes(config, dtype, quantized), step_bytes(config, dtype)
    if weights + step + LEFT > free:
        raise QuantkitError(
            f"{uri} doesn't fit on {device}",
            why=f"its weights take {human_bytes(weights)}, a step {human_bytes(step + LEFT)}; "
                f"{human_bytes(free)} of {human_bytes(total)} are free",
            next=f"quantkit plan {uri} --memory {free // 10**9}GB, or --device cpu")


def spare_bytes(model: LanguageModel) -> int | None:
    """What is left for pages of a cache, now that the model is loaded; ``None`` on a CPU, where nothing is
    planned."""
    if model.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return max(0, free + cached - step_bytes(model.config, model.dtype) - LEFT)
