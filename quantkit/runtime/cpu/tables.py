"""What a step's program is told of the cache and of positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.kv.store import Store
from quantkit.models.config import ModelConfig
from quantkit.models.rope_config import RopeConfig
from quantkit.models.rope_frequencies import inverse_frequencies

POSITION_BLOCK = 512
"""Positions whose cosines and sines are worked out together."""


def page_addresses(store: Store) -> dict[str, int]:
    """Where a layer's pages lie, by an argument's name; 0: there are none.

    Addresses only: the memory is the cache's, and is gone when the cache lets go of it.
    """
    from quantkit_kernels.cpu.kv_codecs import PARTS

    where = {name.replace(".", "_"): part.data_ptr() for name, part in store.pages.parts.items()}
    if store.residual is not None:
        residual = store.residual.parts
        where |= {f"{side}_residual": residual[f"{side}.values"].data_ptr() for side in "kv"}
        where["residual_positions"] = residual["positions"].data_ptr() if "positions" in residual else 0
    return {name: where.get(name, 0) for name in (
        "positions", "residual_positions", "k_residual", "v_residual",
        *(f"{side}_{part}" for side in "kv" for part in PARTS))}


def rope_tables(config: ModelConfig, size: int,
                device: torch.device | str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer, cosines and sines of so many positions, float32 ``[size, D / 2]``; layers that turn
    alike share them. A position's bits don't depend on ``size``: torch is always given a whole block."""
    made: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
    for window in config.sliding_windows:
        if (rope := config.rope_of(window)) not in made:
            inverse = inverse_frequencies(rope, config.head_dim, torch.device("cpu"))
            blocks = [torch.arange(at, at + POSITION_BLOCK)[:, None].float() * inverse
                      for at in range(0, size, POSITION_BLOCK)]
            cos = torch.cat([one.cos() for one in blocks])[:size] * rope.attention_factor
            sin = torch.cat([one.sin() for one in blocks])[:size] * rope.attention_factor
            made[rope] = cos.to(device), sin.to(device)
        yield made[rope]
