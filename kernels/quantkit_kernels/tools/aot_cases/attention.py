"""Attention over pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from quantkit_kernels.tools.aot_cases.case import AotCase, made, threads
from quantkit_kernels.triton import attention_weights, decode_attention, dependent, prefill_attention
from quantkit_kernels.triton.attention_arguments import constants, reason_against
from quantkit_kernels.triton.cache import CHANNEL, FP8, HADAMARD, INT8, PLAIN, TOKEN, SideLayout

HEADS, KV_HEADS = 32, 8
CODINGS = {
    "bf16": (SideLayout(PLAIN, 16), SideLayout(PLAIN, 16)),
    "int8": (SideLayout(INT8, 8), SideLayout(INT8, 8)), "fp8": (SideLayout(FP8, 8), SideLayout(FP8, 8)),
    **{f"int{bits}": (SideLayout(CHANNEL, bits), SideLayout(TOKEN, bits)) for bits in (4, 3, 2)},
    **{f"hadamard{bits}": (SideLayout(HADAMARD, bits, True), SideLayout(HADAMARD, bits))
       for bits in (4, 3, 2)},
    "int8/int4": (SideLayout(INT8, 8), SideLayout(TOKEN, 4))}
"""Keys and values."""
NARROW = 24
"""Copies of a page's scales, and of what else is small. Codes in copies of 4 bytes are 64 more."""
MAIN = ("bf16", "int8", "fp8", "int4", "hadamard4")
POINTERS = {"q_ptr": "*bf16", "k_residual_ptr": "*bf16", "v_residual_ptr": "*bf16",
            **dict.fromkeys(("k_scale_ptr", "k_shift_ptr", "v_scale_ptr", "v_shift_ptr", "at_ptr",
                             "residual_at_ptr", "table_ptr", "residual_table_ptr", "start_ptr", "length_ptr",
                             "seen_ptr", "rows_ptr"), "*i32")}
NUMBERS = {**dict.fromkeys(("factor", "cap"), "fp32"),
           **dict.fromkeys(("window", "limit", "sinks", "residual_length", "first", "layer", "layers",
                            "width", "residual_width", "q_step"), "i32")}


def cases(family: str) -> Iterator[AotCase]:
    """Head dimensions, codings, windows."""
    for coding in CODINGS:
        for dim in (64, 96, 128, 256) if coding in MAIN else (128,):
            if reason_against(*CODINGS[coding], dim, family) is None:
                yield _decode(dim, coding, family)
                yield _prefill(dim, coding, family)
    for coding in MAIN:
        yield _decode(128, coding, family, limited=True)
        yield _prefill(128, coding, family, limited=True)
        yield _weights(128, coding, family)
    for cases_of in (_decode, _prefill):
        yield cases_of(128, "int8", family, limited=True, placed=True)
        yield cases_of(256, "bf16", family, capped=True)
    yield made("join d128", decode_attention.reduce_kernel,
               {**dict.fromkeys(("o_ptr", "m_ptr", "l_ptr"), "*fp32"),
                **dict.fromkeys(("length_ptr", "rows_ptr"), "*i32"), "y_ptr": "*bf16",
                **dict.fromkeys(("layer", "layers", "y_step", "splits"), "i32")},
               {"HKV": KV_HEADS, "G": HEADS // KV_HEADS, "D": 128, "DP": 128, "COUNT": decode_attention.PIECE,
                "JOIN": decode_attention.JOIN, "WIDTH": decode_attention.WIDTH,
                "EARLY": family in dependent.FAMILIES, "num_warps": 1}, multiples=("y_step",))


def _common(d: int, coding: str, family: str, limited: bool, placed: bool,
            capped: bool) -> tuple[str, dict[str, str], dict[str, Any]]:
    k, v = CODINGS[coding]
    has_residual = k.bits < 8 or v.bits < 8
    name = f"d{d} {coding}{' SWA' * (limited and not placed)}{' placed' * placed}{' cap' * capped}"
    types = {f"{side}_ptr": "*bf16" if layout.kind == PLAIN else "*i32"
             for side, layout in (("k", k), ("v", v))}
    common = constants(k, v, HEADS, KV_HEADS, d, has_residual, limited, placed, capped, family != "cdna")
    return name, POINTERS | types | NUMBERS, common


def _decode(d: int, coding: str, family: str, limited: bool = False, placed: bool = False,
            capped: bool = False) -> AotCase:
    name, signature, common = _common(d, coding, family, limited, placed, capped)
    k, v = CODINGS[coding]
    options = decode_attention.options(family, k, v, d)
    each = threads(options, family)
    return made(f"decode {name}", decode_attention.split_kv_kernel,
                {**signature, **dict.fromkeys(("o_ptr", "m_ptr", "l_ptr"), "*fp32"), "splits": "i32"},
                {**common, "VALUES": True, "COUNT": decode_attention.PIECE, **options},
                multiples=("q_step"), matrix=True, wide_loads=1, narrow=NARROW if d == 128 else None,
                weights=2 * 64 * d / each)


def _prefill(d: int, coding: str, family: str, limited: bool = False, placed: bool = False,
             capped: bool = False) -> AotCase:
    name, signature, common = _common(d, coding, family, limited, placed, capped)
    k, v = CODINGS[coding]
    options = prefill_attention.options(family, k, v, d)
    # all threads together load a page's side, which may be less than 16 bytes each
    wide = 64 * d * max(k.bits, v.bits) // 8 >= 16 * threads(options, family)
    return made(f"prefill {name}", prefill_attention.tile_kernel,
                {**signature, "tile_ptr": "*i32", "y_ptr": "*bf16", "y_step": "i32"},
                {**common, "GP": triton.next_power_of_2(HEADS // KV_HEADS),
                 **options},
                multiples=("q_step", "y_step"), matrix=True, wide_loads=wide)


def _weights(d: int, coding: str, family: str) -> AotCase:
    name, signature, common = _common(d, coding, family, False, False, False)
    return made(f"weights {name}", attention_weights.weights_kernel,
                {**signature, **dict.fromkeys(("m_ptr", "l_ptr", "w_ptr"), "*fp32"),
                 **dict.fromkeys(("splits", "slots"), "i32")},
                {**common, "PEAKS": False, "COUNT": decode_attention.PIECE, "JOIN": attention_weights.JOIN,
                 **attention_weights.options(family)},
                multiples=("q_step"), matrix=True, wide_loads=1)
