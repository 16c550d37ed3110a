"""Attention over pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, copies, size
from quantkit_kernels.tools.bench_cases.pages import CODINGS, cloned, paged, slot_bytes
from quantkit_kernels.triton.decode_attention import decode_attention
from quantkit_kernels.triton.prefill_attention import prefill_attention, tiles_of


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Codings by contexts; a prompt."""
    for coding in CODINGS:
        for batch, length in shapes.contexts:
            yield _decode(shapes, batch, length, coding, device, dtype)
    for coding in ("bf16", "int8"):
        yield _prefill(shapes, max(shapes.rows), coding, device, dtype)


def _named(kernel: str, coding: str) -> str:
    return kernel if coding == "bf16" else f"{kernel} {coding}"


def _decode(shapes: ModelShapes, batch: int, length: int, coding: str, device: torch.device,
            dtype: torch.dtype) -> BenchCase:
    h, hkv, d = shapes.heads, shapes.kv_heads, shapes.dim
    q = torch.randn(batch, h, d, dtype=dtype, device=device)
    k, v = (torch.randn(batch, hkv, length, d, dtype=dtype, device=device) for _ in range(2))
    pages, tables, step, k, v = paged(k, v, CODINGS[coding])
    held_bytes = int(batch * hkv * length * slot_bytes(pages))
    page_sets = [pages] + [cloned(pages) for _ in range(copies(shapes, held_bytes) - 1)]
    theirs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(copies(shapes, size(k, v)) - 1)]

    def sdpa(at: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], *theirs[at], enable_gqa=True)[:, :, 0]

    return BenchCase(_named("attention", coding), f"b{batch} {length}",
                     lambda at: decode_attention(q, page_sets[at], tables, step, 0, scale=d**-0.5), sdpa,
                     "sdpa", held_bytes + 2 * size(q), size(k, v) + 2 * size(q), 4 * batch * h * length * d,
                     len(page_sets), len(theirs), 0.05)


def _prefill(shapes: ModelShapes, length: int, coding: str, device: torch.device,
             dtype: torch.dtype) -> BenchCase:
    h, hkv, d = shapes.heads, shapes.kv_heads, shapes.dim
    q = torch.randn(length, h, d, dtype=dtype, device=device)
    k, v = (torch.randn(1, hkv, length, d, dtype=dtype, device=device) for _ in range(2))
    pages, tables, step, k, v = paged(k, v, CODINGS[coding], new=length)
    tiles = torch.tensor(tiles_of([0], [length], h // hkv), dtype=torch.int32, device=device)

    def sdpa(at: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True,
                                              enable_gqa=True)[0].transpose(0, 1)

    moved = int(hkv * length * slot_bytes(pages)) + 2 * size(q)
    return BenchCase(_named("prefill", coding), f"m{length}",
                     lambda at: prefill_attention(q, pages, tables, step, 0, tiles, scale=d**-0.5), sdpa,
                     "sdpa", moved, size(k, v) + 2 * size(q), 2 * h * length * (length + 1) * d, 1, 1, 0.05,
                     cold=False)
