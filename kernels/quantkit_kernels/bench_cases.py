"""What :mod:`~quantkit_kernels.bench` measures: every kernel at the shapes of an 8B Llama, beside torch.

Weights, keys and values exist in so many copies that a GPU's cache holds nothing of one when it is read
again, as when a whole model is run. Both sides compute the same numbers, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quantkit_kernels import reference
from quantkit_kernels.triton import nf4, w4a16, w8a16
from quantkit_kernels.triton.matmul import Packed
from quantkit_kernels.triton.paged_attention import PAGE, paged_attention
from quantkit_kernels.triton.rms_norm import rms_norm
from quantkit_kernels.triton.rope_kv import Pages, rope_kv

Run = Callable[[int], torch.Tensor]
FLUSH = 256 << 20
"""Bytes read between two reads of the same weight: several times the largest cache of a GPU."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model, and how much of it is run at once.

    Attributes:
        linears: name, outputs, inputs.
        rows: of activations.
        contexts: sequences, and tokens of each.
        heads, kv_heads, dim: of attention.
        flush: see :data:`FLUSH`.
    """

    linears: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    flush: int = FLUSH


LLAMA_8B = Shapes((("qkv", 6144, 4096), ("o", 4096, 4096), ("gate up", 28672, 4096), ("down", 4096, 14336),
                   ("head", 128256, 4096)),
                  (1, 4, 16, 64, 256, 2048), ((1, 8192), (1, 32768), (16, 8192)), 32, 8, 128)
QUICK = replace(LLAMA_8B, linears=LLAMA_8B.linears[1:3], rows=(1, 16, 2048), contexts=((1, 32768),))
HEAD_ROWS = 64
"""A head is only asked for the last token of each sequence."""


@dataclass(frozen=True)
class Case:
    """One kernel on one shape, and what torch does instead.

    Attributes:
        kernel, shape: names.
        ours, theirs: run on the copy of that number, and return the result.
        baseline: what ``theirs`` is.
        bytes, their_bytes: that must be read and written, each once.
        flops: multiplications and additions of the product.
        copies, their_copies: of what is read.
        tolerance: the largest ``|ours − theirs| / |theirs|``, by 2-norm, that rounding explains.
        cold: whether all copies together are more than a GPU's cache holds. Activations aren't, nor are they
            when a model runs.
        check: both sides' results, if they are more than what ``ours`` and ``theirs`` return.
    """

    kernel: str
    shape: str
    ours: Run
    theirs: Run
    baseline: str
    bytes: int
    their_bytes: int
    flops: int
    copies: int
    their_copies: int
    tolerance: float
    cold: bool = True
    check: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None


def cases(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel; what a case needs is made when its turn comes."""
    for linear in shapes.linears:
        for make in (_int4, _int8, _nf4):
            yield from _products(shapes, linear, make, device, dtype)
    for n in shapes.rows:
        yield _norm(shapes, n, device, dtype)
    for coded in (False, True):
        for n in shapes.rows:
            yield _rope(shapes, n, coded, device, dtype)
        for batch, length in shapes.contexts:
            yield _attention(shapes, batch, length, coded, device, dtype)


def _size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _copies(shapes: Shapes, size: int) -> int:
    return max(1, -(-shapes.flush // size))


Weight = tuple[str, Packed, torch.Tensor, Callable[[torch.Tensor, Packed], torch.Tensor]]


def _int4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    scale = torch.rand(n, k // 128, device=device) * 0.01 + 0.01
    dense = ((codes.to(dtype) - 8).view(n, -1, 128) * scale[..., None].to(dtype)).view(n, k)
    return "w4a16 g128", w4a16.pack(codes, scale), dense, w4a16.w4a16


def _int8(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scale = torch.rand(n, device=device) * 0.001 + 0.001
    return "w8a16", w8a16.pack(codes, scale), codes.to(dtype) * scale[:, None].to(dtype), w8a16.w8a16


def _nf4(n: int, k: int, device: torch.device, dtype: torch.dtype) -> Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    absmax = torch.rand(n, k // nf4.BLOCK, device=device) * 0.1 + 0.1
    levels = torch.tensor(nf4.LEVELS, device=device).to(dtype)[codes.int()]
    dense = (levels.view(n, -1, nf4.BLOCK) * absmax[..., None].to(dtype)).view(n, k)
    return "nf4 b64", nf4.pack(codes, absmax.view(-1)), dense, nf4.nf4


def _products(shapes: Shapes, linear: tuple[str, int, int], make: Callable[..., Weight],
              device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    name, n, k = linear
    kernel, packed, dense, run = make(n, k, device, dtype)
    packs = [packed] + [replace(packed, words=packed.words.clone(), scale=packed.scale.clone())
                        for _ in range(_copies(shapes, packed.nbytes) - 1)]
    denses = [dense] + [dense.clone() for _ in range(_copies(shapes, _size(dense)) - 1)]
    for m in shapes.rows:
        if name == "head" and m > HEAD_ROWS:
            continue
        x = torch.randn(m, k, dtype=dtype, device=device)
        moved = _size(x) + m * n * x.element_size()

        def ours(at: int, x: torch.Tensor = x) -> torch.Tensor:
            return run(x, packs[at])

        def theirs(at: int, x: torch.Tensor = x) -> torch.Tensor:
            return F.linear(x, denses[at])

        yield Case(kernel, f"{name} m{m}", ours, theirs, "matmul", packed.nbytes + moved,
                   _size(dense) + moved, 2 * m * n * k, len(packs), len(denses), 0.02)


def _norm(shapes: Shapes, n: int, device: torch.device, dtype: torch.dtype) -> Case:
    hidden = shapes.linears[0][2]
    x, residual = (torch.randn(n, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(hidden, dtype=dtype, device=device) + 0.5
    size = 4 * _size(x) + _size(weight)
    return Case("rms_norm add", f"m{n}", lambda at: rms_norm(x, weight, 1e-5, residual)[0],
                lambda at: F.rms_norm(x + residual, (hidden,), weight, 1e-5), "add, rms_norm",
                size, size, 0, 1, 1, 0.02, cold=False)


def _pages(shapes: Shapes, batch: int, length: int, coded: bool, k: torch.Tensor,
           v: torch.Tensor) -> tuple[Pages, torch.Tensor]:
    """``k, v [batch, kv_heads, length, dim]`` in shuffled pages, and the page table."""
    each = -(-length // PAGE)
    count = batch * shapes.kv_heads * each
    order = torch.randperm(count, device=k.device)
    table = order.to(torch.int32).view(batch, shapes.kv_heads, each)
    parts: list[torch.Tensor] = []
    scales: list[torch.Tensor | None] = []
    for x in (k, v):
        rows = F.pad(x, (0, 0, 0, each * PAGE - length)).reshape(count, PAGE, shapes.dim)
        scale = None
        if coded:
            rows, found = reference.encode_int8(rows.float())
            scale = torch.empty_like(found)
            scale[order] = found
        stored = torch.empty_like(rows)
        stored[order] = rows
        parts.append(stored)
        scales.append(scale)
    return Pages(parts[0], parts[1], scales[0], scales[1]), table


def _rope(shapes: Shapes, n: int, coded: bool, device: torch.device, dtype: torch.dtype) -> Case:
    h, hkv, d = shapes.heads, shapes.kv_heads, shapes.dim
    q, k, v = (torch.randn(n, heads, d, dtype=dtype, device=device) for heads in (h, hkv, hkv))
    turn = torch.rand(n, d // 2, device=device).repeat(1, 2) * 6.3
    cos, sin = turn.cos(), turn.sin()
    each = -(-n // PAGE) * PAGE
    slots = torch.arange(each * hkv, device=device).view(hkv, each)[:, :n].T.contiguous()
    empty = torch.zeros(1, hkv, each, d, dtype=dtype, device=device)
    pages, _ = _pages(shapes, 1, each, coded, empty, empty)
    keys, values = torch.zeros(2, hkv * each, d, dtype=dtype, device=device)

    def theirs(at: int) -> torch.Tensor:
        keys[slots] = reference.rotate(k.float(), cos, sin).to(dtype)
        values[slots] = v
        return reference.rotate(q.float(), cos, sin).to(dtype)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        mine, other = rope_kv(q, k, v, cos, sin, pages, slots), theirs(0)
        stored = []
        for rows, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
            plain = rows.double() if scale is None else rows.double() * scale.double()[..., None]
            stored.append(plain.view(-1, d)[slots].flatten())
        return (torch.cat([mine.double().flatten(), *stored]),
                torch.cat([t.double().flatten() for t in (other, keys[slots], values[slots])]))

    read = 2 * _size(q) + _size(k, v, cos, sin, slots)
    stored = 2 * n * hkv * (d + 2) if coded else _size(k, v)
    return Case(f"rope_kv{' int8' * coded}", f"m{n}",
                lambda at: rope_kv(q, k, v, cos, sin, pages, slots), theirs, "rotate, index_put",
                read + stored, read + _size(k, v), 0, 1, 1, 0.02, cold=False, check=check)


def _attention(shapes: Shapes, batch: int, length: int, coded: bool, device: torch.device,
               dtype: torch.dtype) -> Case:
    h, hkv, d = shapes.heads, shapes.kv_heads, shapes.dim
    q = torch.randn(batch, h, d, dtype=dtype, device=device)
    k, v = (torch.randn(batch, hkv, length, d, dtype=dtype, device=device) for _ in range(2))
    pages, table = _pages(shapes, batch, length, coded, k, v)
    lengths = torch.full((batch, hkv), length, dtype=torch.int32, device=device)
    slot = 2 * (d + 2 if coded else d * k.element_size())
    size = batch * hkv * length * slot
    scales = (pages.k_scale, pages.v_scale)
    held = [pages] + [Pages(pages.k.clone(), pages.v.clone(),
                            *(None if scale is None else scale.clone() for scale in scales))
                      for _ in range(_copies(shapes, size) - 1)]
    theirs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(_copies(shapes, _size(k, v)) - 1)]

    def sdpa(at: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], *theirs[at], enable_gqa=True)[:, :, 0]

    return Case(f"attention{' int8' * coded}", f"b{batch} {length}",
                lambda at: paged_attention(q, held[at], table, lengths), sdpa, "sdpa",
                size + 2 * _size(q), _size(k, v) + 2 * _size(q), 4 * batch * h * length * d,
                len(held), len(theirs), 0.05)
