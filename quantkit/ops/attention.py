"""Causal grouped-query attention over keys whose positions are given explicitly.

Nothing here assumes that key ``j`` stands at position ``j``: caches may leave holes, drop keys or
hold sequences of different lengths side by side. https://arxiv.org/abs/2305.13245
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from quantkit.ops.rows import softcapped

CHUNK = 256
"""Queries handled at a time; keys that none of them sees are skipped."""
MASK_ELEMENTS = 2**22
"""Most elements of a chunk's mask: with long contexts chunks get shorter."""
EMPTY = -1


class VisibleKeys(NamedTuple):
    """The keys that a chunk of queries sees: those outside of ``[low, high)`` are invisible to all of them;
    ``bias`` is ``[B, 1, rows, high - low]`` of 0 and −inf, or ``None`` if all is visible."""

    low: int
    high: int
    bias: torch.Tensor | None = None


class Visibility:
    """Which keys each query sees, worked out once for all layers with the same window.

    A query at position ``p`` sees the keys at positions in ``[0, p]``, or in ``(p - window, p]``.

    Args:
        positions: int64 ``[B, T]`` of the queries; −1: padding, whose result is finite but means nothing.
        keys: int64 ``[B, S]``, positions of the keys; −1: an empty slot, seen by nobody.
        window: number of positions seen, the query's own included; ``None``: all.
        limit, sinks: the cache's own window, which sees the first ``sinks`` positions too.
        ends: int64 ``[B, T]``, the last position that each query sees, by default its own.

    Attributes:
        rows: number of queries in a chunk.
    """

    def __init__(self, positions: torch.Tensor, keys: torch.Tensor, window: int | None = None,
                 limit: int | None = None, sinks: int = 0, ends: torch.Tensor | None = None) -> None:
        self._positions = positions
        self._ends = positions if ends is None else ends
        self._keys = keys
        self._window = window
        self._limit, self._sinks = limit, sinks
        batch, self.queries = positions.shape
        self.rows = max(1, min(CHUNK, MASK_ELEMENTS // max(1, batch * keys.shape[1])))
        self._kept: dict[tuple[int, torch.dtype], VisibleKeys] = {}

    def chunk(self, start: int, dtype: torch.dtype) -> VisibleKeys:
        """What queries ``[start, start + rows)`` see, with a bias in ``dtype``."""
        if (hit := self._kept.get((start, dtype))) is not None:
            return hit
        mask = self._make(start, dtype)
        if self._positions.numel() * self._keys.shape[1] <= MASK_ELEMENTS:
            self._kept[start, dtype] = mask
        return mask

    def _make(self, start: int, dtype: torch.dtype) -> VisibleKeys:
        query = self._positions[:, start: start + self.rows, None]
        key = self._keys[:, None, :]
        seen = (key <= self._ends[:, start: start + self.rows, None]) & (key != EMPTY)
        if self._window is not None:
            seen &= key > query - self._window
        if self._limit is not None:
            seen &= (key > query - self._limit) | (key < self._sinks)
        if bool(seen.all()):
            return VisibleKeys(0, key.shape[2])
        columns = seen.any(1).any(0).nonzero()
        low, high = (int(columns[0]), int(columns[-1]) + 1) if columns.numel() else (0, key.shape[2])
        seen = seen[:, :, low:high]
        seen = seen | ~seen.any(-1, keepdim=True)  # some backends make NaN of a softmax over nothing
        if bool(seen.all()):
            return VisibleKeys(low, high)
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return VisibleKeys(low, high, bias.unsqueeze(1))


def block_ends(positions: torch.Tensor, size: int) -> torch.Tensor:
    """The last position of each position's block of ``size``, int64; that of padding (−1) is −1."""
    return torch.where(positions < 0, positions, positions // size * size + size - 1)


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Visibility,
              scale: float | None = None, softcap: float | None = None,
              sinks: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax(q kᵀ · scale) v``, each query over the keys that it sees.

    Softmax and sums are float32 inside. Memory beyond the result is bounded: queries go in chunks.

    Args:
        q: ``[B, H, T, D]``.
        keys, values: ``[B, Hkv, S, D]``, q's dtype, H a multiple of Hkv; query head ``h`` reads
            key-value head ``h // (H / Hkv)``. Empty slots may hold any finite value.
        seen: made from the positions of these queries and keys.
        scale: ``D ** -0.5`` by default.
        softcap: ``c``, where scores ``x`` become ``c · tanh(x / c)``.
        sinks: float32 ``[H]`` or ``[B, H]``: a further score of each head, uncapped and of no key, that is in
            the softmax's denominator alone, https://arxiv.org/abs/2508.10925.

    Returns:
        ``[B, H, T, D]`` in q's dtype; finite for padded queries too.
    """
    by_hand = softcap is not None or sinks is not None
    if not by_hand and q.shape[2] == 1:
        return _decode(q, keys, values, seen, scale)
    dtype = q.dtype
    if q.device.type == "cpu" and dtype != torch.float64:
        q = q.float()
        keys = keys.float()
        values = values.float()  # half-precision products are slow there
    out = torch.empty_like(q, dtype=dtype)
    for start in range(0, q.shape[2], seen.rows):
        stop = start + seen.rows
        seen_keys = seen.chunk(start, q.dtype)
        bias, span = seen_keys.bias, slice(seen_keys.low, seen_keys.high)
        block = q[:, :, start:stop], keys[:, :, span], values[:, :, span]
        out[:, :, start:stop] = F.scaled_dot_product_attention(
            *block, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
        ) if not by_hand else _by_hand(*block, bias, scale, softcap, sinks)
    return out


def _by_hand(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None,
             scale: float | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """What torch's attention can't do, a key head at a time: that bounds the scores in memory."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    results = []
    group = q.shape[1] // keys.shape[1]
    for head, (key, value) in enumerate(zip(keys.split(1, 1), values.split(1, 1))):
        mine = slice(head * group, (head + 1) * group)
        scores = softcapped(q[:, mine].float() @ key.float().mT * scale, softcap)
        scores = scores if bias is None else scores + bias
        if sinks is not None:
            sink = sinks[..., mine, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :keys.shape[2]]
        results.append(weights.to(value.dtype) @ value)
    return torch.cat(results, 1)


def _decode(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Visibility,
            scale: float | None) -> torch.Tensor:
    """One query a sequence. The heads that share keys become the rows of one product: each key is
    then read once, in the cache's own dtype, and nothing of the cache is copied."""
    batch, heads, _, dim = q.shape
    seen_keys = seen.chunk(0, q.dtype)
    if seen_keys.high - seen_keys.low < keys.shape[2]:
        span = slice(seen_keys.low, seen_keys.high)
        keys, values = keys[:, :, span], values[:, :, span]
    rows = q.reshape(batch, keys.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen_keys.bias, scale=scale)
    return out.reshape(batch, heads, 1, dim)


def attention_weights(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, seen: int,
                      scale: float | None = None, softcap: float | None = None,
                      window: int | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax weights of a sequence's last queries, for policies that ask where they look.

    Args:
        q: ``[H, w, D]``, rotated; the last stands at position ``seen - 1``.
        keys: ``[Hkv, S, D]``, rotated.
        positions: int ``[Hkv, S]``, rising, then −1: empty.
        seen: tokens of the sequence so far.
        scale, softcap: as for :func:`attention`.
        window: the argument of :class:`Visibility`.
        sinks: the argument of :func:`attention`, ``[H]``.

    Returns:
        float32 ``[Hkv, H / Hkv, w, S]``.
    """
    heads, count = keys.shape[0], q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grouped = (q.float() * scale).unflatten(0, (heads, -1))
    scores = grouped @ keys.float()[:, None].mT
    scores = softcapped(scores, softcap)
    at = torch.arange(seen - count, seen, device=q.device)
    earlier = (positions != EMPTY) & (positions <= seen - count)  # than all queries: nearly all that there is
    free = int(earlier.sum(-1).min()) if window is None else 0
    positions = positions[:, None, free:]
    visible = (positions <= at[None, :, None]) & (positions != EMPTY)
    if window is not None:
        visible &= positions > at[None, :, None] - window
    scores[..., free:].masked_fill_(~visible[:, None], float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.view(heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
