"""Attention over pages, a sequence at a time: its result can't depend on its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quantkit.ops.attention import Visibility, attention

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.kv.held import HeldLayer


class Rows:
    """The rows of a step in one layer: what each sequence holds, and how many tokens it adds."""

    def __init__(self, held: list[HeldLayer], counts: list[int]) -> None:
        self._held, self._counts = held, counts

    def __iter__(self) -> Iterator[tuple[HeldLayer, int]]:
        return zip(self._held, self._counts, strict=True)

    def __len__(self) -> int:
        return len(self._held)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, H, T, D]`` → ``[n, D]`` without padding: by row, then head, then token."""
        if all(count == x.shape[2] for count in self._counts):
            return x.reshape(-1, x.shape[-1])
        return torch.cat([x[row, :, :count].reshape(-1, x.shape[-1])
                          for row, count in enumerate(self._counts)])


def attend(cache: KVCache, layer: int, rows: Rows, q: torch.Tensor, positions: torch.Tensor,
           window: int | None, shared: dict[object, object]) -> torch.Tensor:
    """Each row's queries over what its sequence holds.

    Args:
        cache: the tokens of this step are in it.
        layer: index.
        rows: the step's.
        q: ``[B, H, T, D]``, rotated.
        positions: int64 ``[B, T]``, −1: padding.
        window: the model's own sliding window.
        shared: kept for the step: what all layers can use.

    Returns:
        ``[B, H, T, D]`` in q's dtype; zeros at padding.
    """
    out = torch.zeros_like(q)
    for row, (held, count) in enumerate(rows):
        if not count:
            continue
        keys, values = cache._read(layer, held, "k"), cache._read(layer, held, "v")
        query = q[row, :, :count]
        heads = held.lengths.tolist()
        if (_same(cache) or window is None) and min(heads) == max(heads):
            seen = _seen(cache, layer, row, positions[row, :count], held, window, shared)
            got = attention(query[None].to(keys.dtype), keys[None], values[None], seen, cache.scale,
                            cache.softcap)
            out[row, :, :count] = got[0].to(q.dtype)
        else:  # heads that hold different positions are the rows of a batch
            grouped = query.unflatten(0, (len(heads), -1)).to(keys.dtype)
            seen = _visibility(cache, positions[row, :count].expand(len(heads), -1),
                               cache._positions(layer, held), window)
            got = attention(grouped, keys[:, None], values[:, None], seen, cache.scale, cache.softcap)
            out[row, :, :count] = got.flatten(0, 1).to(q.dtype)
    return out


def _same(cache: KVCache) -> bool:
    """Whether all heads of all layers hold the same positions."""
    return cache.policy.keeps_all or cache.policy.visible is not None


def _seen(cache: KVCache, layer: int, row: int, positions: torch.Tensor, held: HeldLayer,
          window: int | None, shared: dict[object, object]) -> Visibility:
    """All heads hold equally many, and the same positions unless the model has no window: the answer is
    then worked out once a step."""
    key = (row, window, int(held.lengths[0]))
    found = shared.get(key)
    if not isinstance(found, Visibility):
        if _same(cache):
            stored = cache._positions(layer, held)[:1].long()
        else:  # dropped or not, all that stands before this step's own tokens is earlier than they are
            stored = torch.arange(int(held.lengths[0]), device=positions.device)[None]
            positions = stored[0, int(held.lengths[0]) - positions.shape[0]:]
        found = shared[key] = _visibility(cache, positions[None], stored, window)
    return found


def _visibility(cache: KVCache, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> Visibility:
    limit, sinks = cache.policy.visible or (None, 0)
    return Visibility(queries, keys, window, limit, sinks)
