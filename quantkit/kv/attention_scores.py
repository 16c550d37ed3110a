"""What a policy is told: where queries look, so far and from what they were like."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from quantkit.kv import gpu
from quantkit.kv.base import Phase, PolicyView
from quantkit.kv.query_window import SINKS, QueryMoments, QueryWindow
from quantkit.models.layers import ForwardContext
from quantkit.ops import hadamard
from quantkit.ops.attention import attention_weights
from quantkit.ops.rope import apply_rope

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.kv.sequence import LayerState, SequenceState

REDUCTIONS: dict[gpu.Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda weights: weights.sum(1).mean(0), "mean": lambda weights: weights.mean((0, 1)),
    "peak": lambda weights: weights.amax((0, 1))}


def start_tracking(cache: KVCache, sequence: SequenceState, phase: Phase) -> None:
    """Before a step: keep its queries if the policy will ask for them, and none if it won't."""
    policy, config = cache.policy, cache.config
    if (listens := policy.listens(phase)) != (sequence.asked is not None):
        seen = sequence.layers[0].seen
        sequence.start_tracking(QueryWindow(len(sequence.layers), policy.queries, config.num_heads,
                                            config.head_dim, seen, cache.device) if listens else None)


def record_queries(cache: KVCache, layer: int, held: LayerState, q: torch.Tensor) -> None:
    """Keep a step's queries ``[H, n, D]``, rotated; the step's tokens are in the pages."""
    asked, begin = held.asked, held.seen - q.shape[1]
    scale = cache.config.head_dim**-0.5 if cache.scale is None else cache.scale
    if not cache.policies[layer].tracks:
        asked.put(layer, q[:, -asked.size:].float() * scale, held.seen)
        return
    for start in range(0, q.shape[1], asked.size):
        some = q[:, start:start + asked.size].float() * scale
        make_room(cache, layer, held, begin + start, some.shape[1])
        asked.put(layer, some, begin + start + some.shape[1])


def make_room(cache: KVCache, layer: int, held: LayerState, end: int, count: int) -> None:
    """Before queries of so many positions from ``end`` on take the place of others: sum those up.

    Those of a block of positions are summed up together, however they came: sums depend on that.
    """
    if not cache.policies[layer].tracks:
        return
    size = held.asked.size
    if end // size > held.absorbed // size or end + count - held.absorbed > size:
        accumulate(cache, layer, held, end)


def accumulate(cache: KVCache, layer: int, held: LayerState, end: int) -> None:
    """Sum up what isn't yet of the queries before ``end``."""
    count, tracks = end - held.absorbed, cache.policies[layer].tracks
    if tracks is None or not count:
        return
    q = held.asked.last(layer, end, count)
    if tracks == "sums":
        new = _attention_received(cache, layer, held, q, end, "sum")
        if held.sums is not None:
            new[:, :held.sums.shape[1]] += held.sums
        held.sums = new
    elif tracks == "peaks":
        new = _attention_received(cache, layer, held, q, end, "peak")
        if held.sums is not None:
            before = new[:, :held.sums.shape[1]]
            torch.maximum(before, held.sums, out=before)
        held.sums = new
    elif (first := max(0, SINKS - held.absorbed)) < count:
        if held.moments is None:
            held.moments = QueryMoments.none(q.shape[0], q.shape[2], q.device)
        at = torch.arange(end - count + first, end)
        held.moments.add(_unrotated(cache, layer, held, q[:, first:], at))
    held.absorbed = end


def policy_view(cache: KVCache, layer: int, held: LayerState) -> PolicyView:
    """What the policy sees of a layer."""
    store, seen, policy = cache.stores[layer], held.seen, cache.policies[layer]
    alike = [index for index, one in enumerate(cache.policies) if one is policy]

    def weights() -> torch.Tensor:
        q = held.asked.last(layer, seen, policy.queries)
        return _attention_received(cache, layer, held, q, seen, "mean")

    def sums() -> torch.Tensor:
        if policy.reread_prompt is None:
            accumulate(cache, layer, held, seen)
        assert held.sums is not None
        return held.sums

    def future(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        accumulate(cache, layer, held, seen)
        return _future_queries(cache, layer, held, torch.arange(seen, seen + steps))

    return PolicyView(alike.index(layer), len(alike), tuple(held.lengths.tolist()), seen, held.prompt,
                      lambda: store.positions(held), lambda: store.read(held, "k"),
                      lambda: store.read(held, "v"), weights, sums, future)


def _attention_received(cache: KVCache, layer: int, held: LayerState, q: torch.Tensor, end: int,
                        over: gpu.Reduction) -> torch.Tensor:
    """float32 ``[Hkv, S]``: of the weights ``[G, n, S]`` of scaled queries ``[H, n, D]`` up to ``end`` the
    sum or mean over queries, mean over heads; or the largest.

    A key head at a time: that bounds the weights in memory.
    """
    store, config = cache.stores[layer], cache.config
    if gpu.reads(cache):
        return gpu.attention_received(cache, layer, held, q, end, over)
    keys, positions = store.read(held, "k"), store.positions(held)
    heads = zip(q.chunk(len(keys)), keys.split(1), positions.split(1))
    window = config.sliding_windows[layer]
    return torch.stack([REDUCTIONS[over](attention_weights(mine, key, at, end, 1.0, cache.softcap, window)[0])
                        for mine, key, at in heads])


def _unrotated(cache: KVCache, layer: int, held: LayerState, q: torch.Tensor,
               at: torch.Tensor) -> torch.Tensor:
    """Queries ``[H, n, D]`` of positions ``at`` as they were before they were rotated."""
    q = hadamard.undo_hadamard(q) if cache.codings.keys.hadamard else q
    cos, sin = _angles(cache, layer, held, at)
    plain = apply_rope(q[None], cos, -sin)[0]
    # yarn and longrope make vectors longer on the way
    rope = cache.config.rope_of(cache.config.sliding_windows[layer])
    plain[..., :cos.shape[-1]] /= rope.attention_factor**2
    return plain


def _angles(cache: KVCache, layer: int, held: LayerState,
            at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    context = ForwardContext(cache.config, at[None].to(cache.device), torch.float32, held)
    return context.rope_tables(cache.config.sliding_windows[layer])


def _future_queries(cache: KVCache, layer: int, held: LayerState,
                    at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean ``[H, D]`` and covariance ``[H, D, D]`` of the queries so far, rotated as positions ``at`` are in
    the mean."""
    assert held.moments is not None
    mean, covariance = held.moments.mean().float(), held.moments.covariance().float()
    cos, sin = _angles(cache, layer, held, at)
    cos, sin = (wave.mean(2, keepdim=True) for wave in (cos, sin))
    mean = apply_rope(mean[None, :, None], cos, sin)[0, :, 0]
    for _ in range(2):  # its rows, then its columns
        covariance = apply_rope(covariance[None], cos, sin)[0].mT
    if cache.codings.keys.hadamard:
        mean = hadamard.apply_hadamard(mean)
        for _ in range(2):
            covariance = hadamard.apply_hadamard(covariance).mT
    return mean, covariance
