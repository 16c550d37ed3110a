"""Which kernels are compiled ahead of time, and how: the shapes of an 8B Llama, launched as in production.

Compile-time arguments come from the same functions that launch the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quantkit_kernels.triton import matmul, nf4, paged_attention, rms_norm, rope_kv, w4a16, w8a16
from quantkit_kernels.triton.fragment import MAGIC, ROWS

FAMILIES = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "gfx942": "cdna"}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a block may have."""
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
            torch.int64: "*i64", torch.int16: "*i16", torch.int8: "*i8"}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A kernel, its arguments and what is expected of it.

    Attributes:
        name: unique for a target.
        kernel: the jitted function.
        signature: type of every runtime argument.
        constants: value of every compile-time argument.
        options: ``num_warps`` and the like.
        multiples: runtime integers that are multiples of 16 in production. Pointers always are.
        wide_loads: at least so many 128-bit loads in the loop: those of the weights, or of keys and values.
        matrix: whether tensor cores are meant.
        weights: numbers that a thread decodes in one turn of the loop.
        most: instructions a weight, at most, on sm_90.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    multiples: tuple[str, ...] = ()
    wide_loads: int = 0
    matrix: bool = False
    weights: float | None = None
    most: float | None = None


def _case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], **about: Any) -> Case:
    """Splits options from compile-time arguments."""
    options = {key: constants[key] for key in OPTIONS if key in constants}
    rest = {key: value for key, value in constants.items() if key not in options}
    return Case(name, kernel, signature, rest, options, **about)


def cases(target: str) -> Iterator[Case]:
    """Everything that ships for ``sm_80``, ``sm_90``, ``sm_100`` or ``gfx942``."""
    family = FAMILIES[target]
    for m in (16, 64, 2048):
        for group in w4a16.GROUPS:
            for mode in ("symmetric", "bfloat16"):
                yield _weights("w4a16", w4a16.decode_int4, 4, group, mode, m, family,
                               most=2.6 if (group, mode, m) == (128, "symmetric", 16) else None)
        yield _weights("w8a16", w8a16.decode_int8, 8, 0, "row", m, family, most=3.8 if m == 16 else None)
        yield _weights("nf4", nf4.decode_nf4, 4, 64, _nf4_mode(family), m, family)
    yield _weights("w4a16", w4a16.decode_int4, 4, 128, "symmetric", 32, family)
    yield _weights("w8a16", w8a16.decode_int8, 8, 0, "row", 32, family)
    yield _weights("nf4", nf4.decode_nf4, 4, 64, _nf4_mode(family), 32, family)
    yield _weights("w4a16", w4a16.decode_int4, 4, 128, "symmetric", 16, family, FP16)
    yield _weights("w4a16", w4a16.decode_int4, 4, 128, "float16", 16, family, FP16)
    yield _weights("w8a16", w8a16.decode_int8, 8, 0, "row", 16, family, FP16)
    yield _weights("nf4", nf4.decode_nf4, 4, 64, _nf4_mode(family), 16, family, FP16)
    yield _weights("w4a16", w4a16.decode_int4, 4, 128, "symmetric", 16, family, n=128256)
    yield _weights("w8a16", w8a16.decode_int8, 8, 0, "row", 16, family, n=128256, k=1000)
    for scaled in (False, True):
        yield _case(f"add segments{' scaled' * scaled}", matmul.add_segments_kernel,
                    {"part_ptr": "*fp32", "s_ptr": "*fp32", "y_ptr": "*bf16", "m": "i32", "n": "i32"},
                    {"SEGMENTS": 8, "SCALED": scaled, "BLOCK": matmul.BLOCK}, multiples=("n",))
    for add in (False, True):
        for n in (4096, rms_norm.LONGEST):
            yield _case(f"rms_norm{' add' * add} {n}", rms_norm.rms_norm_kernel,
                        {**dict.fromkeys(("x_ptr", "r_ptr", "w_ptr", "y_ptr", "h_ptr"), "*bf16"),
                         "eps": "fp32"}, {"ADD": add, **rms_norm.constants(n)}, wide_loads=1)
    for n in (1, 2048):
        for coded in (False, True):
            yield _rope(n, coded)
    for coded in (False, True):
        for dim in (64, 96, 192, 256):
            yield _attention(dim, coded, False, family)
        for limited in (False, True):
            yield _attention(128, coded, limited, family)
    yield _case("join d128", paged_attention.join_kernel,
                {"o_ptr": "*fp32", "m_ptr": "*fp32", "l_ptr": "*fp32", "length_ptr": "*i32", "y_ptr": "*bf16",
                 "pieces": "i32"}, {"JOIN": paged_attention.JOIN, **paged_attention.constants(32, 8, 128)})


def _nf4_mode(family: str) -> str:
    return "select" if family == "cdna" else "prmt"


def _weights(name: str, decode: Any, bits: int, group: int, mode: str, m: int, family: str,
             dtype: torch.dtype = BF16, n: int = 4096, k: int = 4096, most: float | None = None) -> Case:
    bk = w8a16.BK if bits == 8 else min(group, 128)
    words = torch.empty(-(-n // ROWS), -(-k // bk), ROWS * bk * bits // 32, dtype=torch.int32, device="meta")
    scale = torch.float32 if mode in ("symmetric", "row", "prmt", "select") else torch.int32
    packed = matmul.Packed(words, torch.empty(0, dtype=scale, device="meta"), n, k, bk, group, mode, family)
    plan, constants = matmul.arguments(packed, m)
    threads = plan.options["num_warps"] * (64 if family == "cdna" else 32)
    label = {BF16: "", FP16: " fp16"}[dtype]
    shape = "" if (n, k) == (4096, 4096) else f" {n}x{k}"
    zeros = " zp" if mode in ("bfloat16", "float16") else ""
    groups = f" g{group}" if name == "w4a16" else ""
    return _case(f"{name}{groups}{zeros} m{m}{label}{shape}",
                 matmul.matmul_kernel,
                 {"x_ptr": POINTERS[dtype], "w_ptr": "*i32", "s_ptr": POINTERS[scale],
                  "y_ptr": "*fp32" if plan.split else POINTERS[dtype],
                  **dict.fromkeys(("m", "n", "magic"), "i32")},
                 {**constants, "DECODE": decode, **plan.options},
                 multiples=("n", "magic") if MAGIC[dtype] % 16 == 0 else ("n",),
                 wide_loads=ROWS * bk * bits // 8 // threads // 16, matrix=True,
                 weights=ROWS * bk / threads, most=most if dtype == BF16 else None)


def _rope(n: int, coded: bool) -> Case:
    page = "*i8" if coded else "*bf16"
    names = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
    return _case(f"rope_kv{' int8' * coded} n{n}", rope_kv.rope_kv_kernel,
                 {**dict.fromkeys(names, "*bf16"), "cos_ptr": "*fp32", "sin_ptr": "*fp32", "row_ptr": "*i64",
                  "pk_ptr": page, "pv_ptr": page, "sk_ptr": "*i16" if coded else page,
                  "sv_ptr": "*i16" if coded else page, "at_ptr": "*i32", "slot_ptr": "*i64",
                  "pos_ptr": "*i64", "n": "i32", "q_step": "i32", "k_step": "i32", "v_step": "i32"},
                 {"CODED": coded, "INDEXED": False, "PLACED": True, **rope_kv.constants(n, 32, 8, 128)},
                 multiples=("q_step", "k_step", "v_step"))


def _attention(d: int, coded: bool, limited: bool, family: str) -> Case:
    page, scale = ("*i32", "*i32") if coded else ("*bf16", "*i32")
    options = paged_attention.options(family)
    threads = options["num_warps"] * (64 if family == "cdna" else 32)
    size = 1 if coded else 2
    return _case(f"attention d{d}{' int8' * coded}{' window' * limited}", paged_attention.piece_kernel,
                 {"q_ptr": "*bf16", "k_ptr": page, "v_ptr": page, "sk_ptr": scale, "sv_ptr": scale,
                  **dict.fromkeys(("at_ptr", "table_ptr", "length_ptr", "now_ptr"), "*i32"),
                  **dict.fromkeys(("o_ptr", "m_ptr", "l_ptr"), "*fp32"), "factor": "fp32",
                  **dict.fromkeys(("window", "sinks", "magic", "width", "pieces"), "i32")},
                 {"HKV": 8, "CODED": coded, "LIMITED": limited, "PLACED": limited,
                  **paged_attention.constants(32, 8, d), **options},
                 multiples=("magic",), wide_loads=2 * 64 * d * size // threads // 16, matrix=True)
