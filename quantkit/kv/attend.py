"""Attention over pages, a sequence at a time: its result can't depend on its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quantkit.kv.base import PAGE
from quantkit.ops.attention import Visibility, attention

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.kv.sequence import LayerState


class StepRows:
    """The rows of a step in one layer: what each sequence holds, and how many tokens it adds."""

    def __init__(self, held: list[LayerState], counts: list[int]) -> None:
        self._held, self._counts = held, counts

    def __iter__(self) -> Iterator[tuple[LayerState, int]]:
        return zip(self._held, self._counts, strict=True)


def attend(cache: KVCache, layer: int, rows: StepRows, q: torch.Tensor, positions: torch.Tensor,
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
    out, store = torch.zeros_like(q), cache.stores[layer]
    for row, (held, count) in enumerate(rows):
        for begin, end in _spans(cache, held, count):
            ahead = count - end  # tokens of this step that these queries don't see
            borders = [cache.codings.border(length - ahead) for length in held.lengths.tolist()]
            keys, values = (store.read(held, side, borders) for side in "kv")
            if keys.dtype != values.dtype:  # of different codecs
                keys, values = keys.float(), values.float()
            # in memory of its own: where it lies doesn't depend on who else is there
            query, at = q[row, :, begin:end].clone(), positions[row, begin:end]
            heads = held.lengths.tolist()
            if (_same(cache, layer) or window is None) and min(heads) == max(heads):
                seen = _seen(cache, layer, row, at, ahead, held, window, shared)
                got = attention(query[None].to(keys.dtype), keys[None], values[None], seen, cache.scale,
                                cache.softcap)
                out[row, :, begin:end] = got[0].to(q.dtype)
            else:  # heads that hold different positions are the rows of a batch
                grouped = query.unflatten(0, (len(heads), -1)).to(keys.dtype)
                seen = _visibility(cache, layer, at.expand(len(heads), -1), store.positions(held), window)
                got = attention(grouped, keys[:, None], values[:, None], seen, cache.scale, cache.softcap)
                out[row, :, begin:end] = got.flatten(0, 1).to(q.dtype)
    return out


def _spans(cache: KVCache, held: LayerState, count: int) -> Iterator[tuple[int, int]]:
    """A step's queries in pieces that read the same slots as codes."""
    cuts = {0, count}
    if cache.stores[0].residual is not None:
        for length in set(held.lengths.tolist()):
            # the border moves where the slots that a query sees, less those that wait, are whole pages
            first = -(length - count + 1 - cache.codings.residual_length) % PAGE
            cuts.update(range(first, count, PAGE))
    places = sorted(cuts)
    yield from itertools.pairwise(places)


def _same(cache: KVCache, layer: int) -> bool:
    """Whether all heads hold the same positions, also those of other layers with the same policy."""
    policy = cache.policies[layer]
    return policy.keeps_all or policy.visible is not None


def _seen(cache: KVCache, layer: int, row: int, positions: torch.Tensor, ahead: int, held: LayerState,
          window: int | None, shared: dict[object, object]) -> Visibility:
    """All heads hold equally many, and the same positions unless the model has no window: the answer is
    then worked out once a step."""
    key = (row, ahead, window, id(cache.policies[layer]), int(held.lengths[0]))
    found = shared.get(key)
    if not isinstance(found, Visibility):
        if _same(cache, layer):
            stored = cache.stores[layer].positions(held)[:1].long()
        else:  # dropped or not, all that stands before this step's own tokens is earlier than they are
            stored = torch.arange(int(held.lengths[0]), device=positions.device)[None]
            end = int(held.lengths[0]) - ahead
            positions = stored[0, end - positions.shape[0]:end]
        found = shared[key] = _visibility(cache, layer, positions[None], stored, window)
    return found


def _visibility(cache: KVCache, layer: int, queries: torch.Tensor, keys: torch.Tensor,
                window: int | None) -> Visibility:
    limit, sinks = cache.policies[layer].visible or (None, 0)
    return Visibility(queries, keys, window, limit, sinks)
