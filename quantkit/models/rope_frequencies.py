"""From a :class:`RopeConfig` to the frequencies that the rotation uses."""

from __future__ import annotations

import functools

import torch

from quantkit.models.rope_config import RopeConfig
from quantkit.ops import rope


@functools.lru_cache(maxsize=64)
def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device,
                        long: bool = False) -> torch.Tensor:
    """float32 ``[rotated / 2]``, radians a position; shared by all layers and not to be written.

    Args:
        config: of the rope.
        head_dim: of a head, of whose dimensions some or all are rotated.
        device: where the result lies.
        long: longrope's frequencies for sequences beyond the trained context.
    """
    dim = config.rotated(head_dim)
    if config.kind == "linear":
        frequencies = rope.linear_frequencies(config.theta, dim, config.factor)
    elif config.kind == "llama3":
        frequencies = rope.llama3_frequencies(config.theta, dim, config.factor, config.low_freq_factor,
                                              config.high_freq_factor, config.original_max_positions)
    elif config.kind == "yarn":
        frequencies = rope.yarn_frequencies(config.theta, dim, config.factor, config.beta_fast,
                                            config.beta_slow, config.original_max_positions, config.truncate)
    elif config.kind == "longrope":
        frequencies = rope.longrope_frequencies(config.theta, dim,
                                                config.long_factors if long else config.short_factors)
    else:
        frequencies = rope.frequencies(config.theta, dim)
    return frequencies.to(device)
