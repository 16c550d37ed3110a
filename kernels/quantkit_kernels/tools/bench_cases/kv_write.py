"""Keys and values on their way into pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels import reference
from quantkit_kernels.tools.bench_cases.case import BenchCase, ModelShapes, size
from quantkit_kernels.triton.cache import (
    CHANNEL,
    INT8,
    PAGE,
    PLAIN,
    TOKEN,
    LayerPages,
    SequenceTables,
    Side,
    SideLayout,
    StepTokens,
)
from quantkit_kernels.triton.close_pages import close_pages
from quantkit_kernels.triton.rope_store import rope_store


def cases(shapes: ModelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[BenchCase]:
    """Codecs by rows."""
    for coded in (False, True):
        for n in shapes.rows:
            yield _rope(shapes, n, coded, device, dtype)
    for n in shapes.rows:
        yield _close(shapes, n, device, dtype)


def _rope(shapes: ModelShapes, n: int, coded: bool, device: torch.device, dtype: torch.dtype) -> BenchCase:
    """n tokens of a prompt: rotated, and stored as they are or as int8."""
    h, hkv, d = shapes.heads, shapes.kv_heads, shapes.dim
    qkv = torch.randn(n, (h + 2 * hkv) * d, dtype=dtype, device=device)
    cos, sin = _angles(n, d, device)
    coding = SideLayout(INT8, 8) if coded else SideLayout(PLAIN, 16)
    sides = [_empty(coding, hkv * -(-n // PAGE), d, dtype, device) for _ in range(2)]
    pages, (tables, step) = LayerPages(sides[0], sides[1]), _sequence(n, 0, hkv, device)
    slots = _slots(tables, n)
    keys, values = torch.zeros(2, hkv * -(-n // PAGE) * PAGE, d, dtype=dtype, device=device)

    def ours(at: int) -> torch.Tensor:
        return rope_store(qkv, cos, sin, pages, tables, step, 0, heads=h, kv_heads=hkv, dim=d)

    def theirs(at: int) -> torch.Tensor:
        q, k, v = (x.unflatten(1, (-1, d)) for x in qkv.split((h * d, hkv * d, hkv * d), 1))
        wide = cos.repeat(1, 2), sin.repeat(1, 2)
        keys[slots] = reference.rotate(k.float(), *wide).to(dtype)
        values[slots] = v
        return reference.rotate(q.float(), *wide).to(dtype)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        mine, other = ours(0), theirs(0)
        stored = []
        for side in sides:
            plain = side.codes.double()
            if side.scale is not None:
                plain = plain * side.scale.double()[..., None]
            stored.append(plain.view(-1, d)[slots].flatten())
        return (torch.cat([mine.double().flatten(), *stored]),
                torch.cat([t.double().flatten() for t in (other, keys[slots], values[slots])]))

    read = size(qkv, cos, sin) + n * h * d * qkv.element_size()
    plain = 2 * n * hkv * d * qkv.element_size()
    return BenchCase(f"rope{' int8' * coded}", f"m{n}", ours, theirs, "rotate, index_put",
                     read + (2 * n * hkv * (d + 2) if coded else plain), read + plain, 0, 1, 1, 0.02,
                     cold=False, check=check)


def _close(shapes: ModelShapes, n: int, device: torch.device, dtype: torch.dtype) -> BenchCase:
    """Pages of which n tokens are the last: 4-bit keys by channel and values by token."""
    hkv, d, each = shapes.kv_heads, shapes.dim, -(-n // PAGE)
    count = hkv * each
    residual = torch.randn(2, count, PAGE, d, dtype=dtype, device=device)
    sides = []
    for kind, grid, x in ((CHANNEL, (PAGE // 32, d), residual[0]), (TOKEN, (PAGE, d // 32), residual[1])):
        codes = torch.zeros(count, PAGE, d // 2, dtype=torch.uint8, device=device)
        scale, low = torch.zeros(2, count, *grid, dtype=torch.bfloat16, device=device)
        sides.append(Side(SideLayout(kind, 4), codes, scale, low, x))
    pages, (tables, step) = LayerPages(sides[0], sides[1]), _sequence(n, -n % PAGE, hkv, device)

    def ours(at: int) -> torch.Tensor:
        close_pages(pages, tables, step, 0)
        return sides[0].codes

    def theirs(at: int) -> torch.Tensor:
        parts = [_decoded(*reference.encode_grid(x.float(), 4, axis), axis)
                 for x, axis in ((residual[0], -2), (residual[1], -1))]
        return torch.cat([part.flatten() for part in parts])

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        ours(0)
        parts = []
        for side, axis in zip(sides, (-2, -1)):
            assert side.scale is not None and side.shift is not None
            codes = torch.stack((side.codes & 15, side.codes >> 4), -1).flatten(-2)
            parts.append(_decoded(codes, side.scale, side.shift, axis).flatten())
        return torch.cat(parts), theirs(0)

    moved = size(residual) + sum(size(side.codes) for side in sides) + 8 * count * PAGE * d // 32
    return BenchCase("close int4", f"m{n}", ours, theirs, "encode", moved, moved, 0, 1, 1, 0.05, cold=False,
                     check=check)


def _decoded(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, at: int) -> torch.Tensor:
    groups = codes.unflatten(at, (-1, 32)).float()
    return (groups * scale.float().unsqueeze(at) + low.float().unsqueeze(at)).flatten(at - 1, at)


def _empty(coding: SideLayout, count: int, d: int, dtype: torch.dtype, device: torch.device) -> Side:
    if coding.kind == PLAIN:
        return Side(coding, torch.zeros(count, PAGE, d, dtype=dtype, device=device))
    scale = torch.zeros(count, PAGE, dtype=torch.bfloat16, device=device)
    return Side(coding, torch.zeros(count, PAGE, d, dtype=torch.int8, device=device), scale)


def _sequence(n: int, before: int, hkv: int, device: torch.device) -> tuple[SequenceTables, StepTokens]:
    """n more tokens of a sequence in one layer; its pages are shuffled, and those that wait alike."""
    each = -(-(n + before) // PAGE)
    table = torch.randperm(hkv * each, device=device).to(torch.int32).view(1, 1, hkv, each)
    lengths, starts = (torch.full((1, 1, hkv), at, dtype=torch.int32, device=device) for at in (before, 0))
    seen = torch.full((1,), before, dtype=torch.int32, device=device)
    rows = torch.stack((torch.zeros(n), torch.arange(n)), 1).to(torch.int32).to(device)
    return SequenceTables(table, lengths, seen, table, starts), StepTokens(rows, before + n)


def _slots(tables: SequenceTables, n: int) -> torch.Tensor:
    """Where n tokens of :func:`_sequence` lie, int64 ``[n, Hkv]``."""
    at = torch.arange(n, device=tables.pages.device)
    return (tables.pages[0, 0].long()[:, at // PAGE] * PAGE + at % PAGE).T.contiguous()


def _angles(n: int, d: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.rand(n, d // 2, device=device) * 6.3
    return turn.cos(), turn.sin()
