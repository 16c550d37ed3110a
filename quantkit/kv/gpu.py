"""What GPU kernels do with a cache, and its pages as they are given them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit.kv.base import KVCodecs
    from quantkit.kv.cache import KVCache
    from quantkit.kv.sequence import LayerState
    from quantkit.kv.store import Store
    from quantkit_kernels.triton.cache import LayerPages, Side, SideLayout

MAX_GROUP, MAX_HEAD = 16, 256
MAX_WEIGHTS = 1 << 26
"""Weights that are in memory at once, at most."""
OPERATIONS = ("rms_norm", "rope + KV write", "decode attention", "prefill attention")
"""What isn't a matrix product, for people."""
Reduction = Literal["sum", "mean", "peak"]
_NAMES = re.compile(r"(?:(none|bf16)|(int8)|(fp8)|(channel|token|hadamard)([234])(c?))$")


@dataclass(frozen=True)
class OperationChoice:
    """Who runs an operation: ``triton``, ``cpu`` (kernels of ours) or ``torch``, and why torch."""

    op: str
    kernel: str
    reason: str | None


def choices(codings: KVCodecs, dtype: torch.dtype, hidden: int, dim: int, group: int, device: str,
            refused: str | None = None) -> Iterator[OperationChoice]:
    """Who runs what isn't a matrix product, for people.

    Args:
        codings, dtype, dim, group, device: as for :func:`declines`.
        hidden: size of the rows that are normalized.
        refused: why the model isn't run as a program.
    """
    norm = gpu.norm_declines(device, dtype, hidden)
    yield OperationChoice(OPERATIONS[0], "torch" if norm else "triton", norm)
    reason = refused or declines(codings, dtype, dim, group, device)
    for op in OPERATIONS[1:]:
        yield OperationChoice(op, "torch" if reason else "triton", reason)


def declines(codings: KVCodecs, dtype: torch.dtype, dim: int, group: int, device: str) -> str | None:
    """Why no kernel writes and reads such a cache; ``None`` if they do.

    Args:
        codings: of keys and values.
        dtype: of queries, keys and values.
        dim: of a head.
        group: query heads that share a key head.
        device: where pages lie.
    """
    if (reason := gpu.unavailable(device, dtype)) is not None:
        return reason
    for one, other in ((codings.keys, "token"), (codings.values, "channel")):
        if not (found := _NAMES.fullmatch(one.name)) or found[4] == other:
            return f"has no kernel for the KV coding {one.name!r}"
        if one.name == "bf16" and dtype != torch.bfloat16:
            return f"takes pages of the model's dtype, not {one.name}"
    return heads_decline(dim, group)


def heads_decline(dim: int, group: int) -> str | None:
    """Why no kernel attends with such heads, however they are kept; ``None`` if they do. As for
    :func:`declines`."""
    if dim % 32 or dim > MAX_HEAD:
        return f"takes head dimensions up to {MAX_HEAD} that 32 divides, not {dim}"
    if group > MAX_GROUP:
        return f"takes up to {MAX_GROUP} query heads a key head, not {group}"
    return None


def side_layout_of(name: str, dtype: torch.dtype) -> SideLayout:
    """What kernels call a coding that :func:`declines` doesn't."""
    from quantkit_kernels.triton.cache import FP8, INT8, PLAIN, SideLayout

    found = _NAMES.fullmatch(name)
    assert found is not None
    if found[1]:
        return SideLayout(PLAIN, 8 * dtype.itemsize)
    if found[4]:
        return SideLayout(found[4], int(found[5]), bool(found[6]))
    return SideLayout(INT8 if found[2] else FP8, 8)


def pages_of(store: Store, codings: KVCodecs, dtype: torch.dtype) -> LayerPages:
    """A layer's, as they lie now."""
    from quantkit_kernels.triton.cache import LayerPages, Side

    parts = store.pages.parts
    residual = {} if store.residual is None else store.residual.parts

    def side(letter: str, name: str) -> Side:
        return Side(side_layout_of(name, dtype),
                    parts[f"{letter}.values" if f"{letter}.values" in parts else f"{letter}.codes"],
                    parts.get(f"{letter}.scale"), parts.get(f"{letter}.low", parts.get(f"{letter}.mean")),
                    residual.get(f"{letter}.values"))

    return LayerPages(side("k", codings.keys.name), side("v", codings.values.name), parts.get("positions"),
                      residual.get("positions"))


def reads(cache: KVCache) -> bool:
    """Whether kernels read this cache."""
    config = cache.config
    return declines(cache.codings, cache.dtype, config.head_dim, config.num_heads // config.num_kv_heads,
                    cache.device.type) is None


def attention_received(cache: KVCache, layer: int, held: LayerState, q: torch.Tensor, end: int,
                       over: Reduction) -> torch.Tensor:
    """Where queries look.

    Args:
        cache, layer, held: a layer of a sequence; nothing was dropped since the first of these queries.
        q: ``[H, n, D]`` of the positions before ``end``, rotated and scaled.
        end: the position after the last.
        over: of the weights over queries the sum or mean, mean over a key head's query heads; or the largest.

    Returns:
        float32 ``[Hkv, S]``.
    """
    from quantkit_kernels.triton.attention_weights import attention_weights
    from quantkit_kernels.triton.cache import SequenceTables, StepTokens

    store, config, codings = cache.stores[layer], cache.config, cache.codings
    count, most = q.shape[1], int(held.lengths.max())
    scale = config.head_dim**-0.5 if cache.scale is None else cache.scale

    def whole(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=cache.device)[None, None].contiguous()

    has_residual = store.residual is not None
    seen = torch.full((1,), end, dtype=torch.int32, device=cache.device)
    tables = SequenceTables(whole(store.table(held)), whole(held.lengths.copy()), seen,
                            whole(store.table(held, "residual")) if has_residual else None,
                            whole(held.starts.copy()) if has_residual else None, codings.residual_length,
                            codings.first)
    # as they were computed: what they were multiplied by is taken back, and rounding is undone
    rows = (q / scale).to(cache.dtype).transpose(0, 1).contiguous()
    pages = pages_of(store, codings, cache.dtype)
    found = torch.zeros(cache.heads, most, device=cache.device)
    for start in range(0, count, portion := max(1, MAX_WEIGHTS // (cache.heads * most))):
        some = rows[start:start + portion]
        places = torch.arange(start - count, start - count + len(some), dtype=torch.int32,
                              device=cache.device)
        step = StepTokens(torch.stack((torch.zeros_like(places), places), 1).contiguous(), most)
        weights = attention_weights(some, pages, tables, step, 0, scale=scale, softcap=cache.softcap,
                                    window=config.sliding_windows[layer], peaks=over == "peak")
        found = torch.maximum(found, weights.amax(0)) if over == "peak" else found + weights.sum(0)
    return found / count if over == "mean" else found
