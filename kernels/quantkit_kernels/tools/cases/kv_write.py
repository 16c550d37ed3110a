"""Keys and values on their way into pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels import reference
from quantkit_kernels.tools.cases.attention import CODINGS
from quantkit_kernels.tools.cases.case import AotCase, BenchCase, BenchSetup, aot_case, size
from quantkit_kernels.triton import advance, close_pages, rope_store
from quantkit_kernels.triton.cache import (
    PAGE,
    PLAIN,
    LayerPages,
    SequenceTables,
    Side,
    SideLayout,
    StepTokens,
)

TABLES = dict.fromkeys(("rows_ptr", "table_ptr", "length_ptr", "start_ptr"), "*i32")


def bench_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    for coding in ("bf16", "int8"):
        for n in setup.shapes.rows:
            yield _bench_rope(setup, n, coding)
    for n in setup.shapes.rows:
        yield _bench_close(setup, n)


def _bench_rope(setup: BenchSetup, n: int, coding: str) -> BenchCase:
    """n tokens of a prompt: rotated, and stored as they are or as int8."""
    h, hkv = setup.shapes.heads, setup.shapes.kv_heads
    d, device, dtype = setup.shapes.dim, setup.device, setup.dtype
    qkv = setup.normal(n, (h + 2 * hkv) * d)
    turn = torch.rand(n, d // 2, device=device) * 6.3
    cos, sin = turn.cos(), turn.sin()
    count = hkv * -(-n // PAGE)
    sides = [_empty(layout, count, setup) for layout in CODINGS[coding]]
    pages, (tables, step) = LayerPages(sides[0], sides[1]), _sequence(n, 0, setup)
    at = torch.arange(n, device=device)
    slots = (tables.pages[0, 0].long()[:, at // PAGE] * PAGE + at % PAGE).T.contiguous()  # [n, Hkv]
    keys, values = torch.zeros(2, count * PAGE, d, dtype=dtype, device=device)

    def ours(at: int) -> torch.Tensor:
        return rope_store.rope_store(qkv, cos, sin, pages, tables, step, 0, heads=h, kv_heads=hkv, dim=d)

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
    coded = coding == "int8"
    return BenchCase(f"rope{' int8' * coded}", f"m{n}", ours, theirs, "rotate, index_put",
                     read + (2 * n * hkv * (d + 2) if coded else plain), read + plain, cold=False,
                     check=check)


def _bench_close(setup: BenchSetup, n: int) -> BenchCase:
    """Pages of which n tokens are the last: 4-bit keys by channel and values by token."""
    hkv, d, device = setup.shapes.kv_heads, setup.shapes.dim, setup.device
    count = hkv * -(-n // PAGE)
    residual = setup.normal(2, count, PAGE, d)
    sides = []
    for layout, grid, x in zip(CODINGS["int4"], ((PAGE // 32, d), (PAGE, d // 32)), residual):
        codes = torch.zeros(count, PAGE, d // 2, dtype=torch.uint8, device=device)
        scale, low = torch.zeros(2, count, *grid, dtype=torch.bfloat16, device=device)
        sides.append(Side(layout, codes, scale, low, x))
    pages, (tables, step) = LayerPages(sides[0], sides[1]), _sequence(n, -n % PAGE, setup)

    def ours(at: int) -> torch.Tensor:
        close_pages.close_pages(pages, tables, step, 0)
        return sides[0].codes

    def theirs(at: int) -> torch.Tensor:
        return torch.cat([_decoded(*reference.encode_grid(x.float(), 4, axis), axis).flatten()
                          for x, axis in zip(residual, (-2, -1))])

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        ours(0)
        parts = []
        for side, axis in zip(sides, (-2, -1)):
            assert side.scale is not None and side.shift is not None
            codes = torch.stack((side.codes & 15, side.codes >> 4), -1).flatten(-2)
            parts.append(_decoded(codes, side.scale, side.shift, axis).flatten())
        return torch.cat(parts), theirs(0)

    moved = size(residual) + sum(size(side.codes) for side in sides) + 8 * count * PAGE * d // 32
    return BenchCase("close int4", f"m{n}", ours, theirs, "encode", moved, moved, tolerance=0.05, cold=False,
                     check=check)


def _decoded(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, at: int) -> torch.Tensor:
    groups = codes.unflatten(at, (-1, 32)).float()
    return (groups * scale.float().unsqueeze(at) + low.float().unsqueeze(at)).flatten(at - 1, at)


def _empty(layout: SideLayout, count: int, setup: BenchSetup) -> Side:
    plain = layout.kind == PLAIN
    codes = torch.zeros(count, PAGE, setup.shapes.dim, dtype=setup.dtype if plain else torch.int8,
                        device=setup.device)
    return Side(layout, codes, None if plain else codes.new_zeros(count, PAGE, dtype=torch.bfloat16))


def _sequence(n: int, before: int, setup: BenchSetup) -> tuple[SequenceTables, StepTokens]:
    """n more tokens of a sequence in one layer; its pages are shuffled, and those that wait alike."""
    heads, device = setup.shapes.kv_heads, setup.device
    each = -(-(n + before) // PAGE)
    table = torch.randperm(heads * each, device=device).to(torch.int32).view(1, 1, heads, each)
    lengths, starts = (torch.full((1, 1, heads), at, dtype=torch.int32, device=device) for at in (before, 0))
    seen = torch.full((1,), before, dtype=torch.int32, device=device)
    rows = torch.stack((torch.zeros(n), torch.arange(n)), 1).to(torch.int32).to(device)
    return SequenceTables(table, lengths, seen, table, starts), StepTokens(rows, before + n)


def aot_cases(family: str) -> Iterator[AotCase]:
    """One token and many; head dimensions; codings written vector by vector, or 64 together."""
    int8 = CODINGS["int8"]
    simple = [("" if name == "bf16" else f" {name}", CODINGS[name]) for name in ("bf16", "int8", "fp8")]
    for n in (1, 2048):
        for label, codings in simple:
            yield _aot_rope(label, codings, n)
        for bits in (2, 3, 4):
            yield _aot_rope(f" token{bits}", (int8[0], CODINGS[f"int{bits}"][1]), n)
            yield _aot_rope(f" hadamard{bits}", (int8[0], CODINGS[f"hadamard{bits}"][1]), n)
        yield _aot_rope(" residual", CODINGS["int4"], n, has_residual=True)
        for dim in (64, 96, 128, 256):
            yield _aot_rope(" residual H", CODINGS["hadamard4"], n, dim, has_residual=True)  # H: Hadamard
    for dim in (64, 96, 192, 256):
        yield _aot_rope(" norm", CODINGS["bf16"], 1, dim, norm=True)
        yield _aot_rope(" norm int8", int8, 2048, dim, norm=True)
    for n, dim in ((1, 64), (1, 96), (1, 128), (1, 256), (2048, 128)):
        yield _aot_close("4", CODINGS["int4"], n, dim)
        yield _aot_close(" hadamard4", CODINGS["hadamard4"], n, dim)
    for bits in (2, 3):
        for dim in (128, 256):
            yield _aot_close(str(bits), CODINGS[f"int{bits}"], 1, dim)
            yield _aot_close(f" hadamard{bits}", CODINGS[f"hadamard{bits}"], 1, dim)
    for label, codings in simple:
        yield _aot_close(label or " plain", codings, 1)
    yield aot_case("advance", advance.advance_kernel,
                   dict.fromkeys(("rows_ptr", "length_ptr", "seen_ptr"), "*i32") | {"n": "i32"},
                   advance.constants(32, 8))


def _pages(codings: tuple[SideLayout, SideLayout], has_residual: bool) -> LayerPages:
    number = torch.empty(0, dtype=torch.int32, device="meta")
    keys, values = (Side(coding, number, residual=number if has_residual else None) for coding in codings)
    return LayerPages(keys, values, number, number if has_residual else None)


def _side(name: str, coding: SideLayout, has_residual: bool) -> dict[str, str]:
    """Types of a side's pointers: see :func:`~quantkit_kernels.triton.kv_encode.pointers`."""
    codes = "*bf16" if has_residual or coding.kind == PLAIN else "*i8" if coding.bits == 8 else "*i32"
    rest = codes if codes == "*bf16" else "*i16"
    return {f"{name}c_ptr": codes, f"{name}s_ptr": rest, f"{name}l_ptr": rest}


def _aot_rope(label: str, codings: tuple[SideLayout, SideLayout], n: int, dim: int = 128, *,
              has_residual: bool = False, norm: bool = False) -> AotCase:
    names = ("q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr", "out_ptr")
    return aot_case(f"rope{label} d{dim} n{n}", rope_store.rope_store_kernel,
                    {**dict.fromkeys(names, "*bf16"),
                     **dict.fromkeys(("cos_ptr", "sin_ptr", "signs_ptr", "mix_ptr"), "*fp32"),
                     **_side("k", codings[0], has_residual), **_side("v", codings[1], has_residual), **TABLES,
                     "at_ptr": "*i32", "seen_ptr": "*i32", "eps": "fp32",
                     **dict.fromkeys(("n", "layer", "width", "first", "q_step", "k_step", "v_step"), "i32")},
                    {"LAYERS": 32, "R": dim, "NORM": norm,
                     **rope_store.constants(n, 32, 8, dim, _pages(codings, has_residual))},
                    multiples=("q_step", "k_step", "v_step"))


def _aot_close(label: str, codings: tuple[SideLayout, SideLayout], n: int, dim: int = 128) -> AotCase:
    return aot_case(f"close{label} d{dim} n{n}", close_pages.close_pages_kernel,
                    {**_side("k", codings[0], False), **_side("v", codings[1], False), "kw_ptr": "*bf16",
                     "vw_ptr": "*bf16", "residual_ptr": "*i32", "at_ptr": "*i32", "atw_ptr": "*i32", **TABLES,
                     **dict.fromkeys(("n", "layer", "width", "residual_width", "residual_length", "first"),
                                     "i32")},
                    {"LAYERS": 32, **close_pages.constants(n, 8, dim, _pages(codings, True))}, wide_loads=1)
