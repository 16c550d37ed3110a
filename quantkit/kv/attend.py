"""Attention over pages, one sequence at a time: a result can't depend on other sequences in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from quantkit.kv.base import PAGE, KVCodecs, KVPolicy
from quantkit.kv.geometry import LayerGeometry
from quantkit.kv.sequence import LayerState
from quantkit.kv.store import PageStore
from quantkit.ops.attention import Visibility, attention


class PagedAttention:
    """Attends over what one layer's pages hold.

    Args:
        store: the layer's pages.
        codecs: of keys and values.
        geometry: of the layer.
        policy: decides which of the stored positions queries see.
    """

    def __init__(self, store: PageStore, codecs: KVCodecs, geometry: LayerGeometry, policy: KVPolicy) -> None:
        self._store, self._codecs, self._geometry, self._policy = store, codecs, geometry, policy
        # whether all heads hold the same positions, also those of other layers with the same policy
        self._same_positions = policy.keeps_all or policy.visible is not None

    def __call__(self, states: Sequence[LayerState], counts: Sequence[int], q: torch.Tensor,
                 positions: torch.Tensor, window: int | None,
                 step_cache: dict[object, object], sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with each row's queries over what its sequence holds.

        Args:
            states: the rows' sequences; their pages hold the tokens of this step.
            counts: tokens that each row adds in this step.
            q: ``[B, H, T, D]``, rotated (RoPE).
            positions: int64 ``[B, T]``, −1: padding.
            window: the model's own sliding window.
            step_cache: kept for the step, so that layers can share results.
            sinks: of the model, float32 ``[H]``.

        Returns:
            ``[B, H, T, D]`` in q's dtype; zeros at padding.
        """
        out, store, config = torch.zeros_like(q), self._store, self._geometry.config
        for row, (state, count) in enumerate(zip(states, counts, strict=True)):
            for begin, end in self._spans(state, count):
                later = count - end  # tokens of this step that these queries don't see
                lengths = state.lengths.tolist()
                borders = [self._codecs.border(length - later) for length in lengths]
                keys, values = (store.read(state, side, borders) for side in "kv")
                if keys.dtype != values.dtype:  # of different codecs
                    keys, values = keys.float(), values.float()
                # a copy: the memory's alignment must not depend on which other rows there are
                query, at = q[row, :, begin:end].clone(), positions[row, begin:end]
                if (self._same_positions or window is None) and min(lengths) == max(lengths):
                    visible = self._shared_visibility(row, at, later, state, window, step_cache)
                    result = attention(query[None].to(keys.dtype), keys[None], values[None], visible,
                                       config.attention_scale, config.attention_softcap, sinks)
                    out[row, :, begin:end] = result[0].to(q.dtype)
                else:  # heads that hold different positions are the rows of a batch
                    grouped = query.unflatten(0, (len(lengths), -1)).to(keys.dtype)
                    visible = self._visibility(at.expand(len(lengths), -1), store.positions(state), window)
                    result = attention(grouped, keys[:, None], values[:, None], visible,
                                       config.attention_scale, config.attention_softcap,
                                       None if sinks is None else sinks.view(len(lengths), -1))
                    out[row, :, begin:end] = result.flatten(0, 1).to(q.dtype)
        return out

    def _spans(self, state: LayerState, count: int) -> Iterator[tuple[int, int]]:
        """Cut a step's queries into spans that read the same slots as codes."""
        cuts = {0, count}
        if self._store.residual is not None:
            for length in set(state.lengths.tolist()):
                # the border moves where the slots that a query sees, without the residual, are full pages
                first = -(length - count + 1 - self._codecs.residual_length) % PAGE
                cuts.update(range(first, count, PAGE))
        yield from itertools.pairwise(sorted(cuts))

    def _shared_visibility(self, row: int, positions: torch.Tensor, later: int, state: LayerState,
                           window: int | None, step_cache: dict[object, object]) -> Visibility:
        """The visibility where all heads hold equally many slots, and the same positions unless the model has
        no window: it is computed once a step."""
        length = int(state.lengths[0])
        key = (row, later, window, id(self._policy), length)
        visibility = step_cache.get(key)
        if not isinstance(visibility, Visibility):
            if self._same_positions:
                stored = self._store.positions(state)[:1].long()
            else:  # dropped or not, all slots before this step's own tokens are earlier than they are
                stored = torch.arange(length, device=positions.device)[None]
                end = length - later
                positions = stored[0, end - positions.shape[0]:end]
            visibility = step_cache[key] = self._visibility(positions[None], stored, window)
        return visibility

    def _visibility(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> Visibility:
        limit, sinks = self._policy.visible or (None, 0)
        return Visibility(queries, keys, window, limit, sinks)
