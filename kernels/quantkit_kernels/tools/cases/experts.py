"""Mixtures of experts: products with each one's weight, and what chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quantkit_kernels.tools.cases.case import POINTERS, AotCase, absent_pointers, aot_case
from quantkit_kernels.tools.cases.products import ProductFormat, kinds
from quantkit_kernels.triton import experts, matmul
from quantkit_kernels.triton.fragment import MAGIC, ROWS

COUNT, CHOSEN = 128, 8
"""Of a Qwen3 30B-A3B, whose experts are 768 wide."""
FORMATS = ("w16a16", "w4a16 g128", "w4a16 g64", "w4a16 super", "w8a16", "fp8", "nf4", "nvfp4", "mxfp4", "iq4",
           "w8a8", "fp8a8")


def aot_cases(family: str) -> Iterator[AotCase]:
    """Few pairs of an expert and many; gates, and what follows them."""
    known = kinds(family)
    for name in FORMATS:
        for size in (16, experts.largest_tile(family)):
            yield _product(known[name], size, family, True)
            yield _product(known[name], size, family, False)
    pointers = {"chosen_ptr": "*i32", "order_ptr": "*i32", "tile_ptr": "*i32"}
    for alone in (True, False):
        yield aot_case(f"route{' alone' * alone}", experts.route_kernel,
                       {"scores_ptr": "*bf16", "rows_ptr": "*i32", "share_ptr": "*fp32", **pointers,
                        "scores_row": "i32"},
                       {"E": COUNT, "EP": COUNT, "CHOSEN": CHOSEN, "NORMALIZED": True, "ALONE": alone,
                        "num_warps": 1}, multiples=("scores_row",))
    yield aot_case("order pairs", experts.order_kernel, {**pointers, "pairs": "i32"},
                   {"E": COUNT, "BM": 64, "BLOCK": experts.BLOCK, "num_warps": 4})
    yield aot_case("combine", experts.combine_kernel,
                   {"x_ptr": "*bf16", "share_ptr": "*fp32", "rows_ptr": "*i32", "r_ptr": "*bf16",
                    "y_ptr": "*bf16", "n": "i32"},
                   {"CHOSEN": CHOSEN, "BLOCK": experts.COLUMNS, "num_warps": 4}, multiples=("n",))


def _product(kind: ProductFormat, size: int, family: str, gated: bool) -> AotCase:
    n, k = (1536, 2048) if gated else (2048, 768)
    weight = kind.packed(COUNT * n, k, family, gated)
    plan, constants = experts.expert_arguments(weight, size, n // ROWS, CHOSEN if gated else 1)
    scale = {} if kind.scale is None else {"s_ptr": POINTERS[kind.scale]}
    scale |= {"t_ptr": "*fp32"} if kind.decoder.levels else {}
    integers = ("m", "n", "x_row", "r_row", "y_row", "magic")
    pointers = {"x_ptr": POINTERS[kind.x], "w_ptr": POINTERS[kind.words], **scale,
                "y_ptr": "*bf16", "tile_ptr": "*i32", "order_ptr": "*i32"}
    absent = absent_pointers(matmul.matmul_kernel, pointers)
    case = aot_case(f"{kind.name} moe m{size}{' gated' * gated}", matmul.matmul_kernel,
                    {**pointers, **dict.fromkeys(integers, "i32")},
                    {**absent, **constants, "GATED": "silu" if gated else None, **plan.options}, matrix=True,
                    multiples=tuple(name for name in integers
                                    if name != "m" and (name != "magic" or MAGIC.get(kind.x, 0) % 16 == 0)))
    return replace(case, wide_loads=1)
