"""Cosines and sines of rotary positions, as the kernels of both runtimes read them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import inverse_frequencies
from quantkit.models.rope_config import RopeConfig

POSITION_BLOCK = 512
"""Positions whose cosines and sines are computed together."""


def rope_tables(config: ModelConfig, size: int,
                device: torch.device | str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines of ``size`` positions, float32 ``[size, D / 2]`` each, for every layer in turn.

    Layers with the same rotation share their tables. A position's bits don't depend on ``size``, because
    torch always computes a full block of positions.
    """
    tables: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
    for window in config.sliding_windows:
        if (rope := config.rope_of(window)) not in tables:
            inverse = inverse_frequencies(rope, config.head_dim, torch.device("cpu"))
            blocks = [torch.arange(start, start + POSITION_BLOCK)[:, None].float() * inverse
                      for start in range(0, size, POSITION_BLOCK)]
            cos = torch.cat([block.cos() for block in blocks])[:size] * rope.attention_factor
            sin = torch.cat([block.sin() for block in blocks])[:size] * rope.attention_factor
            tables[rope] = cos.to(device), sin.to(device)
        yield tables[rope]
