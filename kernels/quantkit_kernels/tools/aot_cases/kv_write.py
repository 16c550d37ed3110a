"""Keys and values on their way into pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels.tools.aot_cases.case import AotCase, made
from quantkit_kernels.triton import advance, close_pages, rope_store
from quantkit_kernels.triton.cache import (
    CHANNEL,
    FP8,
    HADAMARD,
    INT8,
    PLAIN,
    TOKEN,
    LayerPages,
    Side,
    SideLayout,
)

PLAINS = SideLayout(PLAIN, 16), SideLayout(PLAIN, 16)
EIGHT = SideLayout(INT8, 8), SideLayout(INT8, 8)
TABLES = dict.fromkeys(("rows_ptr", "table_ptr", "length_ptr", "start_ptr"), "*i32")


def cases(family: str) -> Iterator[AotCase]:
    """One token and many; head dimensions; codings written vector by vector, or 64 together."""
    fp8 = SideLayout(FP8, 8), SideLayout(FP8, 8)
    grid, turned = ({bits: (SideLayout(kind, bits, kind == HADAMARD), SideLayout(other, bits))
                     for bits in (2, 3, 4)}
                    for kind, other in ((CHANNEL, TOKEN), (HADAMARD, HADAMARD)))
    for n in (1, 2048):
        for name, codings in (("", PLAINS), (" int8", EIGHT), (" fp8", fp8)):
            yield _rope(name, codings, n)
        for bits in (2, 3, 4):
            yield _rope(f" token{bits}", (EIGHT[0], grid[bits][1]), n)
            yield _rope(f" hadamard{bits}", (EIGHT[0], turned[bits][1]), n)
        yield _rope(" residual", grid[4], n, has_residual=True)
        for dim in (64, 96, 128, 256):
            yield _rope(" residual H", turned[4], n, dim, has_residual=True)  # H: Hadamard
    for dim in (64, 96, 192, 256):
        yield _rope(" norm", PLAINS, 1, dim, norm=True)
        yield _rope(" norm int8", EIGHT, 2048, dim, norm=True)
    for n, dim in ((1, 64), (1, 96), (1, 128), (1, 256), (2048, 128)):
        yield _close("4", grid[4], n, dim)
        yield _close(" hadamard4", turned[4], n, dim)
    for bits in (2, 3):
        yield _close(str(bits), grid[bits], 1)
        yield _close(f" hadamard{bits}", turned[bits], 1)
        yield _close(f" hadamard{bits}", turned[bits], 1, 256)
        yield _close(str(bits), grid[bits], 1, 256)
    for name, codings in ((" plain", PLAINS), (" int8", EIGHT), (" fp8", fp8)):
        yield _close(name, codings, 1)
    yield made("advance", advance.advance_kernel,
               dict.fromkeys(("rows_ptr", "length_ptr", "seen_ptr"), "*i32"), advance.constants(32, 8))


def _pages(codings: tuple[SideLayout, SideLayout], has_residual: bool) -> LayerPages:
    number = torch.empty(0, dtype=torch.int32, device="meta")
    keys, values = (Side(coding, number, residual=number if has_residual else None) for coding in codings)
    return LayerPages(keys, values, number, number if has_residual else None)


def _side(name: str, coding: SideLayout, has_residual: bool) -> dict[str, str]:
    """Types of a side's pointers: see :func:`~quantkit_kernels.triton.kv_encode.pointers`."""
    codes = "*bf16" if has_residual or coding.kind == PLAIN else "*i8" if coding.bits == 8 else "*i32"
    rest = codes if codes == "*bf16" else "*i16"
    return {f"{name}c_ptr": codes, f"{name}s_ptr": rest, f"{name}l_ptr": rest}


def _rope(name: str, codings: tuple[SideLayout, SideLayout], n: int, dim: int = 128, *,
          has_residual: bool = False, norm: bool = False) -> AotCase:
    names = ("q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr", "out_ptr")
    return made(f"rope{name} d{dim} n{n}", rope_store.rope_store_kernel,
                {**dict.fromkeys(names, "*bf16"),
                 **dict.fromkeys(("cos_ptr", "sin_ptr", "signs_ptr", "mix_ptr"), "*fp32"),
                 **_side("k", codings[0], has_residual), **_side("v", codings[1], has_residual), **TABLES,
                 "at_ptr": "*i32", "seen_ptr": "*i32", "eps": "fp32",
                 **dict.fromkeys(("n", "layer", "width", "first", "q_step", "k_step", "v_step"), "i32")},
                {"LAYERS": 32, "R": dim, "NORM": norm,
                 **rope_store.constants(n, 32, 8, dim, _pages(codings, has_residual))},
                multiples=("q_step", "k_step", "v_step"))


def _close(name: str, codings: tuple[SideLayout, SideLayout], n: int, dim: int = 128) -> AotCase:
    return made(f"close{name} d{dim} n{n}", close_pages.close_pages_kernel,
                {**_side("k", codings[0], False), **_side("v", codings[1], False), "kw_ptr": "*bf16",
                 "vw_ptr": "*bf16", "residual_ptr": "*i32", "at_ptr": "*i32", "atw_ptr": "*i32", **TABLES,
                 **dict.fromkeys(("n", "layer", "width", "residual_width", "residual_length", "first"),
                                 "i32")},
                {"LAYERS": 32, **close_pages.constants(n, 8, dim, _pages(codings, True))}, wide_loads=1)
