"""Matrix products with packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit_kernels import tuned
from quantkit_kernels.tools.aot_cases.case import POINTERS, AotCase, made, threads
from quantkit_kernels.triton import (
    dependent,
    embedding,
    fp4,
    fp8,
    iq4,
    matmul,
    nf4,
    w4a4,
    w4a16,
    w8a8,
    w8a16,
    w16a16,
)
from quantkit_kernels.triton.fragment import MAGIC, ROWS
from quantkit_kernels.triton.packed import TritonDecoder, TritonWeight

BF16, FP16, INT8, E4M3 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
FLOAT32, WORD = torch.float32, torch.int32


@dataclass(frozen=True)
class ProductFormat:
    """A format: what its ``pack`` makes, for a weight of any shape.

    ``bits``: of a number; ``words``: dtype that they are loaded as; ``scale``: dtype of scales; ``x``: of
    activations; ``most``: instructions a weight with 16 rows of activations; ``layout``: of scales.
    """

    name: str
    decoder: TritonDecoder
    bits: int
    bk: int
    group: int = 0
    mode: str = ""
    words: torch.dtype = WORD
    scale: torch.dtype | None = FLOAT32
    x: torch.dtype = BF16
    most: float | None = None
    layout: str = "word"

    def packed(self, n: int, k: int, family: str, gated: bool = False) -> TritonWeight:
        """A packed weight on the meta device, without memory."""
        each = ROWS * self.bk * self.bits // 8 // self.words.itemsize
        words = torch.empty(-(-n // ROWS), -(-k // self.bk), each, dtype=self.words, device="meta")
        scale = None if self.scale is None else torch.empty(0, dtype=self.scale, device="meta")
        return TritonWeight(words, scale, n, k, self.bk, self.group, self.mode, family, self.decoder, gated,
                            self.layout)


def kinds(family: str) -> dict[str, ProductFormat]:
    """All kinds by name."""
    select = "select" if family == "cdna" else "prmt"
    native = family in ("hopper", "blackwell")
    every = [ProductFormat("w16a16", w16a16.PLAIN, 16, w16a16.BK, mode="plain", words=BF16, scale=None),
             ProductFormat("w8a16", w8a16.INT8, 8, w8a16.BK, mode="row", most=3.8),
             ProductFormat("fp8", fp8.E4M3, 8, fp8.BK, mode="row", most=3.8),
             ProductFormat("nf4", nf4.NF4, 4, 64, 64, select, most=3.5),
             ProductFormat("w8a8", w8a8.INT8, 8, w8a8.BK, mode="int8", words=INT8, x=INT8),
             ProductFormat("fp8a8", w8a8.NATIVE, 8, w8a8.BK, mode="e4m3", words=E4M3, x=E4M3) if native else
             ProductFormat("fp8a8", w8a8.HALF, 8, fp8.BK, mode="row", x=FP16)]
    for group in w4a16.GROUPS:
        # 3.9 is what a 4-bit weight may take where bytes are time; scales and zero points of few columns more
        limits = {128: (2.6, 3.1), 64: (2.6, 3.3), 32: (3.4, 4.4)}[group]
        every += [ProductFormat(f"w4a16 g{group}", w4a16.INT4, 4, group, group, "symmetric", most=limits[0]),
                  ProductFormat(f"w4a16 g{group} zp", w4a16.INT4, 4, group, group, "bfloat16", scale=WORD,
                                most=limits[1])]
    every += _in_groups(select)
    if family not in w4a4.NATIVE:  # there codes of both are multiplied
        every += [replace(kind, name=f"{kind.name} a4", decoder=decoder) for kind in every
                  for name, decoder in (("mxfp4", w4a4.COARSE), ("nvfp4", w4a4.FINE)) if kind.name == name]
    return {kind.name: kind for kind in every}


def _in_groups(select: str) -> Iterator[ProductFormat]:
    """Minima, scales of few bits, groups of 16, tables and tiles."""
    def four(name: str, decoder: TritonDecoder, group: int, layout: str, mode: str = "") -> ProductFormat:
        words = FLOAT32 if layout in ("fine", "float32") else WORD
        return ProductFormat(name, decoder, 4, min(group, 128) or 64, group, mode or layout, scale=words,
                             layout=layout)

    for group in w4a16.GROUPS:
        yield four(f"w4a16 g{group} min", w4a16.UINT4, group, "bfloat16 low")
    yield four("w4a16 super", w4a16.UINT4, 32, "superblock")
    yield four("w4a16 g16", w4a16.INT4_FINE, 0, "fine", "float16")
    yield four("mxfp4", fp4.E2M1, 32, "e8m0")
    yield four("nvfp4", fp4.E2M1_FINE, 0, "fine", "e4m3")
    yield four("iq4", iq4.IQ4, 32, "float16", select)
    for group, decoder, layout in ((32, w8a16.INT8_GROUPS, "float16"), (64, w8a16.INT8_GROUPS, "bfloat16"),
                                   (64, w8a16.UINT8_GROUPS, "bfloat16 low")):
        yield ProductFormat(f"w8a16 g{group}{' min' if 'low' in layout else ''}", decoder, 8, group, group,
                            layout, scale=WORD, layout=layout)
    yield ProductFormat("w8a16 g16", w8a16.INT8_FINE, 8, w8a16.BK, mode="float16", layout="fine")
    yield ProductFormat("fp8 tiles", fp8.E4M3, 8, fp8.BK, 128, "row")


def cases(family: str) -> Iterator[AotCase]:
    """Few rows and many; groups; both dtypes; a head; every epilogue."""
    known = kinds(family)
    for kind in known.values():
        for m in (16, 64, 2048):
            yield _product(kind, m, family)
    for name in ("w4a16 g128", "w8a16", "nf4", "w16a16"):
        yield _product(known[name], 32, family)
        yield _product(known[name], 16, family, FP16)
    yield _product(known["fp8"], 16, family, FP16)
    for kind in known.values():
        for m in (16, 2048):
            yield _product(kind, m, family, n=28672, gated="silu")
    for name in ("w4a16 g128 zp", "w8a16", "w8a8"):
        yield _product(known[name], 2048, family, full=True)
    yield _product(known["w4a16 g128"], 16, family, n=128256)
    yield _product(known["w8a16"], 16, family, n=128256, k=1000)
    yield _product(known["w16a16"], 16, family, n=128256)
    for kind, gated, full in ((known["w4a16 g128"], None, False), (known["w8a16"], None, True),
                              (known["w8a16"], "silu", False), (known["w8a8"], "gelu_tanh", True)):
        yield _segments(kind, gated, full)
    if family in dependent.FAMILIES:
        for kind in known.values():
            yield _product(kind, 16, family, early=True)
        yield _product(known["w4a16 g128"], 16, family, n=28672, gated="silu", early=True)
        yield _segments(known["w4a16 g128"], None, False, early=True)
    for kind in known.values():
        yield _lookup(kind, family)


def _lookup(kind: ProductFormat, family: str) -> AotCase:
    scale: dict[str, Any] = {"s_ptr": kind.scale and POINTERS[kind.scale]}
    return made(f"embed {kind.name}", embedding.embed_kernel,
                {"ids_ptr": "*i64", "w_ptr": POINTERS[kind.words], "y_ptr": "*bf16", "y_row": "i32",
                 **(scale if kind.scale else {})},
                {**({} if kind.scale else scale), "num_warps": 4,
                 **embedding.constants(kind.packed(128256, 4096, family))}, multiples=("y_row",))


def _epilogue(kind: ProductFormat, full: bool, scale: bool) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the arguments that are given, and the others."""
    pointers = {}
    if kind.decoder.levels:
        pointers["t_ptr"] = "*fp32"
    if scale and kind.scale is not None:
        pointers["s_ptr"] = POINTERS[kind.scale]
    if full:
        pointers |= {"b_ptr": "*bf16", "r_ptr": "*bf16"}
    return pointers, {key: None for key in ("t_ptr", "s_ptr", "b_ptr", "r_ptr") if key not in pointers}


def _segments(kind: ProductFormat, gated: str | None, full: bool, early: bool = False) -> AotCase:
    pointers, absent = _epilogue(kind, full, not kind.group)
    label = " rows" * (not kind.group) + " gated" * bool(gated) + " all" * full + " early" * early
    return made(f"add segments{label}", matmul.add_segments_kernel,
                {"part_ptr": "*i32" if kind.x == INT8 else "*fp32", **pointers, "y_ptr": "*bf16",
                 **dict.fromkeys(("m", "n", "r_row", "y_row"), "i32")},
                {**absent, "NPAD": 4096, "SEGMENTS": 8, "GATED": gated, "BLOCK": matmul.BLOCK, "PDL": early,
                 "num_warps": 4, **({"launch_pdl": True} if early else {})},
                multiples=("n", "r_row", "y_row"))


def _product(kind: ProductFormat, m: int, family: str, dtype: torch.dtype | None = None, n: int = 4096,
             k: int = 4096, gated: str | None = None, full: bool = False, early: bool = False) -> AotCase:
    """``full``: with bias and residual."""
    x = dtype or kind.x
    words = x if kind.words == BF16 else kind.words
    with tuned.trial({"pdl": 1}) if early else nullcontext():
        plan, constants = matmul.arguments(kind.packed(n, k, family, gated is not None), m)
    pointers, absent = _epilogue(kind, full and not plan.split, True)
    if plan.split and pointers.pop("t_ptr", ""):
        absent["t_ptr"] = None
    each = threads(plan.options, family)
    turn = ROWS * kind.bk * plan.unroll
    label = " fp16" * (dtype == FP16) + " gated" * bool(gated) + " all" * full + " early" * early
    shape = "" if n in (4096, 28672) else f" {n}x{k}"
    result = POINTERS[BF16 if kind.decoder.levels else x]
    if plan.split:
        result = "*i32" if x == INT8 else "*fp32"
    integers = ("m", "n", "x_row", "r_row", "y_row", "magic")
    return made(f"{kind.name} m{m}{label}{shape}", matmul.matmul_kernel,
                {"x_ptr": POINTERS[x], "w_ptr": POINTERS[words], **pointers, "y_ptr": result,
                 **dict.fromkeys(integers, "i32")},
                {**absent, **constants, "GATED": None if plan.split else gated, **plan.options},
                multiples=tuple(key for key in integers
                                if key != "m" and (key != "magic" or MAGIC.get(x, 0) % 16 == 0)),
                wide_loads=turn * kind.bits // 8 // each // 16, matrix=True,
                weights=turn / each, most=kind.most if m == 16 and dtype is None else None)
