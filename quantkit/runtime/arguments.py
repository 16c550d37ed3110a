"""What a step's program is told of the cache and of positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.kv.store import Store
from quantkit.models.config import ModelConfig
from quantkit.models.rope_config import RopeConfig
from quantkit.models.rope_frequencies import inverse_frequencies


def addresses(store: Store) -> dict[str, int]:
    """Where a layer's pages lie, by an argument's name; 0: there are none.

    Addresses only: the memory is the cache's, and is gone when the cache lets go of it.
    """
    from quantkit_kernels.cpu.kv_codecs import PARTS

    where = {name.replace(".", "_"): part.data_ptr() for name, part in store.pages.parts.items()}
    if store.waiting is not None:
        waits = store.waiting.parts
        where |= {f"{side}_waiting": waits[f"{side}.values"].data_ptr() for side in "kv"}
        where["waiting_positions"] = waits["positions"].data_ptr() if "positions" in waits else 0
    return {name: where.get(name, 0) for name in (
        "positions", "waiting_positions", "k_waiting", "v_waiting",
        *(f"{side}_{part}" for side in "kv" for part in PARTS))}


def angles(config: ModelConfig, size: int,
           device: torch.device | str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer, cosines and sines of so many positions, float32 ``[size, D / 2]``; layers that turn
    alike share them."""
    made: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
    for window in config.sliding_windows:
        if (rope := config.rope_of(window)) not in made:
            angle = torch.arange(size)[:, None].float() * inverse_frequencies(
                rope, config.head_dim, torch.device("cpu"))
            cos, sin = (wave * rope.attention_factor for wave in (angle.cos(), angle.sin()))
            made[rope] = cos.contiguous().to(device), sin.contiguous().to(device)
        yield made[rope]
