"""What policies know of queries: the attention that each slot received, and statistics of future queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.kv import gpu
from quantkit.kv.base import KVCodecs, KVPolicy
from quantkit.kv.sequence import SINKS, LayerState, QueryMoments
from quantkit.kv.store import PageStore
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext, HasMaxLengths
from quantkit.ops.attention import attention_weights
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.ops.rope import apply_rope

MAX_WEIGHTS = 1 << 26
"""Attention weights that are in memory at once, at most."""
Reduction = Literal["sum", "mean", "max"]
REDUCTIONS: dict[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda weights: weights.sum(1).mean(0), "mean": lambda weights: weights.mean((0, 1)),
    "max": lambda weights: weights.amax((0, 1))}


@dataclass(frozen=True)
class LayerGeometry:
    """What the cache of a layer must know of the model.

    Attributes:
        layer: index of the layer.
        dtype: in which the model computes keys and values.
    """

    config: ModelConfig
    layer: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def window(self) -> int | None:
        """The model's own sliding window in this layer."""
        return self.config.sliding_windows[self.layer]

    @property
    def scale(self) -> float:
        scale = self.config.attention_scale
        return self.config.head_dim**-0.5 if scale is None else scale

    @property
    def attention_factor(self) -> float:
        """YaRN and longrope make rotated vectors longer by this factor."""
        return self.config.rope_of(self.window).attention_factor

    def rope_tables(self, positions: torch.Tensor,
                    lengths: HasMaxLengths) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``sin`` of :func:`quantkit.ops.rope.tables` in float32, for positions int64 ``[n]``."""
        context = ForwardContext(self.config, positions[None].to(self.device), torch.float32, lengths)
        return context.rope_tables(self.window)


class AttentionScores:
    """Computes a layer's scores from the queries that are kept.

    Args:
        geometry: the shape of attention in the layer.
        policy: says what is tracked.

    Attributes:
        sinks: the model's attention sinks, float32 ``[H]``, as attention in this layer had them last.
    """

    def __init__(self, store: PageStore, codecs: KVCodecs, geometry: LayerGeometry, policy: KVPolicy) -> None:
        self._store = store
        self._codecs = codecs
        self._geometry = geometry
        self._policy = policy
        self.sinks: torch.Tensor | None = None

    def record_queries(self, state: LayerState, queries: torch.Tensor) -> None:
        """Keep a step's queries ``[H, n, D]``, rotated; the step's tokens are in the pages."""
        window = state.query_window
        begin = state.seen - queries.shape[1]
        layer = self._geometry.layer
        scale = self._geometry.scale
        if not self._policy.tracks:
            window.put(layer, queries[:, -window.size:].float() * scale, state.seen)
            return
        for start in range(0, queries.shape[1], window.size):
            block = queries[:, start:start + window.size].float() * scale
            self.make_room(state, begin + start, block.shape[1])
            window.put(layer, block, begin + start + block.shape[1])

    def make_room(self, state: LayerState, end: int, count: int) -> None:
        """Before the queries of ``count`` positions from ``end`` on replace others: accumulate those.

        The queries of a block of positions are accumulated together, whatever steps they came in: the result
        depends on that.
        """
        if not self._policy.tracks:
            return
        size = state.query_window.size
        if end // size > state.accumulated // size or end + count - state.accumulated > size:
            self.accumulate(state, end)

    def accumulate(self, state: LayerState, end: int) -> None:
        """Accumulate the queries before ``end`` that aren't yet."""
        count = end - state.accumulated
        tracks = self._policy.tracks
        layer = self._geometry.layer
        if tracks is None or not count:
            return
        queries = state.query_window.last(layer, end, count)
        before = state.attention_received
        if tracks == "attention_sum":
            received = self._received(state, queries, end, "sum")
            if before is not None:
                received[:, :before.shape[1]] += before
            state.attention_received = received
        elif tracks == "attention_max":
            received = self._received(state, queries, end, "max")
            if before is not None:
                earlier = received[:, :before.shape[1]]
                torch.maximum(earlier, before, out=earlier)
            state.attention_received = received
        elif (first := max(0, SINKS - state.accumulated)) < count:
            if state.query_moments is None:
                state.query_moments = QueryMoments.none(queries.shape[0], queries.shape[2], queries.device)
            positions = torch.arange(end - count + first, end)
            state.query_moments.add(self._before_rope(state, queries[:, first:], positions))
        state.accumulated = end

    def window_attention(self, state: LayerState) -> torch.Tensor:
        """See :attr:`quantkit.kv.base.PolicyView.window_attention`."""
        queries = state.query_window.last(self._geometry.layer, state.seen, self._policy.query_window)
        return self._received(state, queries, state.seen, "mean")

    def attention_received(self, state: LayerState) -> torch.Tensor:
        """See :attr:`quantkit.kv.base.PolicyView.attention_received`."""
        if self._policy.reread_prompt is None:
            self.accumulate(state, state.seen)
        assert state.attention_received is not None
        return state.attention_received

    def future_queries(self, state: LayerState, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :attr:`quantkit.kv.base.PolicyView.future_queries`: the moments of the queries so far, rotated
        as the next ``steps`` positions are on average."""
        self.accumulate(state, state.seen)
        moments = state.query_moments
        assert moments is not None
        mean, covariance = moments.mean().float(), moments.covariance().float()
        positions = torch.arange(state.seen, state.seen + steps)
        cos, sin = (table.mean(2, keepdim=True) for table in self._geometry.rope_tables(positions, state))
        mean = apply_rope(mean[None, :, None], cos, sin)[0, :, 0]
        for _ in range(2):  # its rows, then its columns
            covariance = apply_rope(covariance[None], cos, sin)[0].mT
        if self._codecs.keys.hadamard:
            mean = apply_hadamard(mean)
            for _ in range(2):
                covariance = apply_hadamard(covariance).mT
        return mean, covariance

    def _received(self, state: LayerState, queries: torch.Tensor, end: int,
                  reduction: Reduction) -> torch.Tensor:
        """float32 ``[Hkv, S]``: the attention weights ``[G, n, S]`` of scaled queries ``[H, n, D]`` before
        ``end``, summed or averaged over queries and averaged over heads, or the largest.

        One KV head at a time, which bounds the memory of the weights.
        """
        store, geometry = self._store, self._geometry
        reason = gpu.reason_against_cache(self._codecs, geometry.dtype, geometry.config.head_dim,
                                          geometry.group, geometry.device.type)
        if self.sinks is None and reason is None:
            return _received_by_kernels(store, self._codecs, geometry, state, queries, end, reduction)
        keys, positions = store.read(state, "k"), store.positions(state)
        sinks = [None] * len(keys) if self.sinks is None else self.sinks.chunk(len(keys))
        heads = zip(queries.chunk(len(keys)), keys.split(1), positions.split(1), sinks)
        cap = geometry.config.attention_softcap
        return torch.stack([REDUCTIONS[reduction](attention_weights(
            head_queries, head_keys, head_positions, end, 1.0, cap, geometry.window, head_sinks)[0])
            for head_queries, head_keys, head_positions, head_sinks in heads])

    def _before_rope(self, state: LayerState, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries ``[H, n, D]`` of ``positions`` as they were before they were rotated."""
        queries = undo_hadamard(queries) if self._codecs.keys.hadamard else queries
        cos, sin = self._geometry.rope_tables(positions, state)
        plain = apply_rope(queries[None], cos, -sin)[0]
        plain[..., :cos.shape[-1]] /= self._geometry.attention_factor**2
        return plain


def _received_by_kernels(store: PageStore, codecs: KVCodecs, geometry: LayerGeometry, state: LayerState,
                         queries: torch.Tensor, end: int, reduction: Reduction) -> torch.Tensor:
    """The attention that slots receive from some queries.

    Args:
        store, codecs, geometry: the layer's.
        state: a sequence there; nothing was dropped since the first of these queries.
        queries: ``[H, n, D]`` of the positions before ``end``, rotated and scaled.
        end: the position after the last one.
        reduction: takes the sum or mean of the weights over queries, averaged over a KV head's query heads;
            or the
            largest.

    Returns:
        float32 ``[Hkv, S]``.
    """
    from quantkit_kernels.triton.attention_weights import attention_weights
    from quantkit_kernels.triton.cache import SequenceTables, StepTokens

    count, device = queries.shape[1], geometry.device
    longest = int(state.lengths.max())

    def table(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)[None, None].contiguous()

    has_residual = store.residual is not None
    seen = torch.full((1,), end, dtype=torch.int32, device=device)
    tables = SequenceTables(table(store.table(state)), table(state.lengths.copy()), seen,
                            table(store.table(state, "residual")) if has_residual else None,
                            table(state.starts.copy()) if has_residual else None,
                            codecs.residual_length, codecs.first)
    # as they were computed: the scale is divided out again, which undoes the rounding
    rows = (queries / geometry.scale).to(geometry.dtype).transpose(0, 1).contiguous()
    pages = gpu.pages_of(store, codecs, geometry.dtype)
    total = torch.zeros(geometry.kv_heads, longest, device=device)
    for start in range(0, count, portion := max(1, MAX_WEIGHTS // (geometry.kv_heads * longest))):
        part = rows[start:start + portion]
        places = torch.arange(start - count, start - count + len(part), dtype=torch.int32, device=device)
        step = StepTokens(torch.stack((torch.zeros_like(places), places), 1).contiguous(), longest)
        weights = attention_weights(part, pages, tables, step, 0, scale=geometry.scale,
                                    softcap=geometry.config.attention_softcap, window=geometry.window,
                                    peaks=reduction == "max")
        total = torch.maximum(total, weights.amax(0)) if reduction == "max" else total + weights.sum(0)
    return total / count if reduction == "mean" else total
