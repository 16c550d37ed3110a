"""The GPU's way through the cache: one kernel rotates, encodes and stores, another reads the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.kv.held import HeldLayer
    from quantkit.kv.read import Rows
    from quantkit.models.layers import Step
    from quantkit_kernels.triton.rope_kv import Pages


def fits(cache: KVCache, q: torch.Tensor) -> bool:
    """Whether both kernels take this cache with queries like ``q [B, H, T, D]``."""
    if not (q.is_cuda or gpu.SIMULATE) or not cache.plain:
        return False
    codings, group = cache.codings, q.shape[1] // cache.heads
    if codings.keys.name != codings.values.name or cache.stores[0].waiting is not None:
        return False
    codes = cache.pages[0].parts.get("k.codes", cache.pages[0].parts.get("k.values"))
    return codes is not None and codes.device == q.device and gpu.kv_declines(
        q.device.type, q.dtype, q.shape[-1], group, cache.codings.keys.name, codes.dtype) is None


def rotate_and_store(cache: KVCache, layer: int, rows: Rows, q: torch.Tensor, k: torch.Tensor,
                     v: torch.Tensor, step: Step, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotated queries ``[B, H, T, D]``; keys and values of the step are in the pages."""
    from quantkit_kernels.triton.rope_kv import rope_kv

    batch, heads, length, dim = q.shape
    slots = torch.full((batch, k.shape[1], length), -1, dtype=torch.int64)
    for row, (held, count) in enumerate(rows):
        new = cache.stores[layer].allocate(held, count)
        slots[row, :, :count] = torch.tensor(new, dtype=torch.int64).view(-1, count)
    cos, sin = (t[:, 0].expand(batch, length, dim).reshape(-1, dim).float() for t in (cos, sin))
    half = sin[:, dim // 2:]  # the model's tables have the first half negated
    q, k, v = (t.transpose(1, 2).reshape(batch * length, -1, dim) for t in (q, k, v))
    pages = _pages(cache, layer)
    out = rope_kv(q, k, v, cos, torch.cat((half, half), 1), pages,
                  slots.transpose(1, 2).reshape(batch * length, -1).to(q.device),
                  None if pages.positions is None else step.positions.reshape(-1))
    return out.view(batch, length, heads, dim).transpose(1, 2)


def decodes(cache: KVCache, rows: Rows, q: torch.Tensor, window: int | None) -> bool:
    """Whether the kernel attends for this step: one query a sequence, at most one window."""
    return q.shape[2] == 1 and window is None and all(count == 1 for _, count in rows)


def decode_attention(cache: KVCache, layer: int, rows: Rows, q: torch.Tensor,
                     positions: torch.Tensor) -> torch.Tensor:
    """``q [B, H, 1, D]`` over the pages of each row's sequence → the same shape."""
    from quantkit_kernels.triton.paged_attention import paged_attention

    held = [one for one, _ in rows]
    window, sinks = cache.policies[layer].visible or (None, 0)
    lengths = torch.tensor([one.lengths.tolist() for one in held], dtype=torch.int32).to(q.device)
    out = paged_attention(q[:, :, 0], _pages(cache, layer), _tables(cache, layer, held), lengths,
                          window=window, sinks=sinks, query_positions=positions[:, 0])
    return out[:, :, None]


def _pages(cache: KVCache, layer: int) -> Pages:
    from quantkit_kernels.triton.rope_kv import Pages

    parts = cache.pages[layer].parts
    name = "codes" if "k.codes" in parts else "values"
    return Pages(parts[f"k.{name}"], parts[f"v.{name}"], parts.get("k.scale"), parts.get("v.scale"),
                 parts.get("positions"))


def _tables(cache: KVCache, layer: int, held: list[HeldLayer]) -> torch.Tensor:
    """int32 ``[B, Hkv, W]``, filled up with page 0."""
    tables = [cache.stores[layer].table(one) for one in held]
    most = max(table.shape[1] for table in tables)
    return torch.stack([torch.nn.functional.pad(table, (0, most - table.shape[1]))
                        for table in tables]).to(torch.int32)
