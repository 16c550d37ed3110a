"""A contiguous KV cache: per layer one block of keys and one of values that grow as needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.errors import UsageError
from quantkit.models.config import ModelConfig

FIRST = 64
"""Slots of a first allocation."""
EMPTY = -1


class KVCache:
    """Keys and values of a batch of sequences of different lengths.

    Each sequence fills its slots from the left; a table keeps every slot's position, so that nothing
    reads a position off a slot's place. Capacity doubles up to ``max_length``. Models with a sliding
    window keep all positions and mask.

    A *step* is one call of :meth:`update` for each layer with the same positions, in any order.

    Args:
        config: gives layers, key-value heads and head dimension.
        batch: number of sequences.
        max_length: most tokens that a sequence may hold.
        dtype: of keys and values.
        device: where they lie.

    Attributes:
        lengths: tokens held, a sequence.
    """

    def __init__(self, config: ModelConfig, batch: int, max_length: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        self._heads, self._dim = config.num_kv_heads, config.head_dim
        self._max, self._dtype, self._device = max_length, dtype, torch.device(device)
        self.lengths = [0] * batch
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * config.num_layers
        self._positions = torch.full((batch, 0), EMPTY, dtype=torch.int64, device=self._device)
        self._step: _Step | None = None
        self._done: set[int] = set()

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots a sequence that are allocated now."""
        return int(self._positions.shape[1])

    @property
    def max_length(self) -> int:
        """Most tokens that a sequence may hold."""
        return self._max

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks that exist now, the table of positions included."""
        blocks = [block for layer in self._layers if layer is not None for block in layer]
        return sum(t.untyped_storage().nbytes() for t in (*blocks, self._positions))

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """Positions int64 ``[B, count]`` that follow what each sequence holds."""
        ends = torch.tensor(self.lengths, dtype=torch.int64, device=self._device)
        return ends[:, None] + torch.arange(count, device=self._device)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor,
               positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`~quantkit.models.decoder.KVCacheProtocol`.

        The result is a view of the cache, good until the next step.

        Raises:
            UsageError: a sequence would outgrow ``max_length``.
            ValueError: the batch differs, or padding stands before a token.
        """
        if self._step is None or layer in self._done:
            self._step = self._begin(positions)
            self._done.clear()
        self._done.add(layer)
        keys, values = self._block(layer)
        self._step.write(keys, k)
        self._step.write(values, v)
        end = self._step.end
        return keys[:, :, :end], values[:, :, :end], self._step.seen

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order; memory shrinks with them.

        Raises:
            IndexError: no such sequence.
        """
        if list(rows) == list(range(self.batch)):
            return
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        width = min(self.capacity, _grown(max(self.lengths, default=0), 0, self._max))
        self._positions = self._positions[:, :width].index_select(0, index)
        for i, layer in enumerate(self._layers):
            if layer is not None:
                self._layers[i] = (layer[0][:, :, :width].index_select(0, index),
                                   layer[1][:, :, :width].index_select(0, index))
        self._step = None

    def drop(self, rows: Sequence[int]) -> None:
        """Remove these sequences; the others keep their order. Raises IndexError for an unknown one."""
        gone = {range(self.batch)[row] for row in rows}
        self.select([row for row in range(self.batch) if row not in gone])

    def _begin(self, positions: torch.Tensor) -> _Step:
        if positions.shape[0] != self.batch:
            raise ValueError(f"{positions.shape[0]} sequences for a cache of {self.batch}")
        valid = positions != EMPTY
        counts = valid.sum(1).tolist()
        if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
            raise ValueError("padding (position -1) must stand after a sequence's tokens")
        starts, ends = self.lengths, [a + b for a, b in zip(self.lengths, counts, strict=True)]
        if max(ends, default=0) > self._max:
            raise UsageError(f"a sequence of {max(ends)} tokens doesn't fit the KV cache",
                             why=f"it was made for {self._max}",
                             next="shorten the prompt, or ask for fewer tokens")
        width = max(counts, default=0)
        uniform = len(set(starts)) == 1 and starts[0] + width <= self._max
        self._reserve(max(ends, default=0))
        step = _Step(starts[0], width, None) if uniform else _Step(
            0, width, _scatter(valid[:, :width], starts))
        if uniform:
            self._positions[:, starts[0]: starts[0] + width] = positions[:, :width]
        elif step.scatter is not None:
            rows, columns, slots = step.scatter
            self._positions[rows, slots] = positions[rows, columns]
        self.lengths = ends
        step.end = max(ends, default=0)
        step.seen = self._positions[:, :step.end]
        return step

    def _reserve(self, needed: int) -> None:
        """Room for ``needed`` slots a sequence, in the table now and in each layer when it is next used."""
        if needed > self.capacity:
            grown = torch.full((self.batch, _grown(needed, self.capacity, self._max)), EMPTY,
                               dtype=torch.int64, device=self._device)
            grown[:, :self.capacity] = self._positions
            self._positions = grown

    def _block(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._layers[layer]
        if pair is None or pair[0].shape[2] < self.capacity:
            held = None if pair is None else pair
            pair = self._layers[layer] = (self._wider(held and held[0]), self._wider(held and held[1]))
        return pair

    def _wider(self, old: torch.Tensor | None) -> torch.Tensor:
        # zeros, not empty memory: a masked slot still enters a product, and NaN times 0 is NaN
        new = torch.zeros(self.batch, self._heads, self.capacity, self._dim, dtype=self._dtype,
                          device=self._device)
        if old is not None:
            new[:, :, :old.shape[2]] = old
        return new


class _Step:
    """Where the tokens of one step go: a slice that all sequences share, or a slot for each token."""

    __slots__ = ("end", "scatter", "seen", "start", "width")

    def __init__(self, start: int, width: int,
                 scatter: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None) -> None:
        self.start, self.width, self.scatter = start, width, scatter
        self.end = 0
        self.seen = torch.empty(0)

    def write(self, block: torch.Tensor, new: torch.Tensor) -> None:
        """``new [B, Hkv, T, D]`` into ``block [B, Hkv, capacity, D]``; padding is left out, or lies
        behind a sequence's end, where its next tokens go."""
        if self.scatter is None:
            block[:, :, self.start: self.start + self.width] = new[:, :, :self.width]
        else:
            rows, columns, slots = self.scatter
            block[rows, :, slots] = new[rows, :, columns].to(block.dtype)


def _scatter(valid: torch.Tensor, starts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 ``[n]`` each: row, column and slot of every token that isn't padding."""
    rows, columns = valid.nonzero(as_tuple=True)
    return rows, columns, torch.tensor(starts, device=valid.device)[rows] + columns


def _grown(needed: int, capacity: int, most: int) -> int:
    """The next capacity that holds ``needed``: doubled from ``capacity`` or from :data:`FIRST`."""
    size = max(capacity, FIRST)
    while size < needed:
        size *= 2
    return min(size, most)
