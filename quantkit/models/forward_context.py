"""What all layers of one forward pass share, and the frequencies of its rotations."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.rope_config import RopeConfig
from quantkit.ops import rope
from quantkit.ops.attention import Visibility, block_ends
from quantkit.ops.rope import tables


@functools.lru_cache(maxsize=64)
def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device,
                        long: bool = False) -> torch.Tensor:
    """float32 ``[rotated / 2]``, radians a position; shared by all layers and not to be written.

    Args:
        config: the rope's parameters.
        head_dim: the head dimension; some or all dimensions are rotated.
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


class HasMaxLengths(Protocol):
    """Knows how long sequences become; see :class:`~quantkit.models.interfaces.KVCacheProtocol`."""

    def max_lengths(self) -> torch.Tensor: ...


class ForwardContext:
    """What all layers of one forward pass share: rotation tables and who sees whom.

    Args:
        positions: int64 ``[B, T]``, −1: padding.
        cache: holds the sequences that go on; without one they end with this step.
    """

    def __init__(self, config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype,
                 cache: HasMaxLengths | None = None) -> None:
        self.positions = positions
        self._config = config
        self._dtype = dtype
        self._cache = cache
        self._rope_tables: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: dict[int | None, Visibility] = {}

    def rope_tables(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``sin`` of :func:`~quantkit.ops.rope.tables` for layers with this window."""
        rope = self._config.rope_of(window)
        if rope not in self._rope_tables:
            inverse = inverse_frequencies(rope, self._config.head_dim, self.positions.device)
            if rope.kind == "longrope":
                ends = self.positions.amax(1) + 1 if self._cache is None else self._cache.max_lengths()
                long = inverse_frequencies(rope, self._config.head_dim, self.positions.device, True)
                beyond = (ends.to(inverse.device) > rope.original_max_positions)[:, None, None, None]
                inverse = torch.where(beyond, long, inverse)
            self._rope_tables[rope] = tables(self.positions, inverse, rope.attention_factor, self._dtype)
        return self._rope_tables[rope]

    def seen(self, window: int | None) -> Visibility:
        """Who sees whom among this step's own positions."""
        if window not in self._seen:
            diffusion = self._config.diffusion
            ends = None if diffusion is None else block_ends(self.positions, diffusion.block_size)
            self._seen[window] = Visibility(self.positions, self.positions, window, ends=ends)
        return self._seen[window]
