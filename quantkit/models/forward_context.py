"""What all layers of one forward pass share."""

from __future__ import annotations

from typing import Protocol

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.rope_config import RopeConfig
from quantkit.models.rope_frequencies import inverse_frequencies
from quantkit.ops.attention import Visibility
from quantkit.ops.rope import tables


class HasMaxLengths(Protocol):
    """Knows how long sequences become; see :class:`~quantkit.models.interfaces.KVCacheProtocol`."""

    def max_lengths(self) -> torch.Tensor: ...


class ForwardContext:
    """What all layers of one forward pass share: rotation tables and who sees whom.

    Args:
        config: the model's.
        positions: int64 ``[B, T]``, −1: padding.
        dtype: of the hidden states.
        cache: where the sequences go on; without one they end with this step.
    """

    def __init__(self, config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype,
                 cache: HasMaxLengths | None = None) -> None:
        self.positions = positions
        self._config, self._dtype, self._cache = config, dtype, cache
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
            self._seen[window] = Visibility(self.positions, self.positions, window)
        return self._seen[window]
