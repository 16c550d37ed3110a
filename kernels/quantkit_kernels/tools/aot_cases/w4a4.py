"""Products with rounded 4-bit floats on both sides, and what rounds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels import tuned
from quantkit_kernels.tools.aot_cases.case import POINTERS, AotCase, made, threads
from quantkit_kernels.triton import (
    block_scaled,
    dependent,
    embedding,
    matmul,
    rms_norm,
    token_groups,
    w4a4,
)
from quantkit_kernels.triton.packed import TritonWeight
from quantkit_kernels.triton.token_groups import GroupRounding

NAMES = {16: "nvfp4 a4", 32: "mxfp4 a4"}
INSTRUCTION = {"nvfp4 a4": ("kind::mxf4nvf4.block_scale",), "mxfp4 a4": ("kind::mxf4.block_scale",)}


def cases(family: str) -> Iterator[AotCase]:
    """Rows of hidden states and of what a gate opens, as values and packed; products where tensor cores
    take both."""
    early = family in dependent.FAMILIES
    native = family in w4a4.NATIVE
    for group, name in NAMES.items():
        for packed in (0, block_scaled.BK) if native else (0,):
            how = GroupRounding(group, torch.empty(1) if group == token_groups.FINE else None, packed)
            for n in (4096, 14336):
                yield _rounding(f"round {name}{' packed' * bool(packed)} {n}", n, how, early)
            for n in (4096, rms_norm.LONGEST_GROUPED):
                yield _norm(f"norm {name}{' packed' * bool(packed)} {n}", n, how, early)
        if not native:
            continue
        for m in (16, 32, 64, 2048):
            yield _product(name, group, m)
            yield _product(name, group, m, n=28672, gated="silu")
        yield _product(name, group, 2048, full=True)
        yield _product(name, group, 16, early=True)
        yield _lookup(name, group)


def _rounding(name: str, n: int, how: GroupRounding, early: bool) -> AotCase:
    pointers = {"l_ptr": "*u8" if how.packed else "*bf16", "t_ptr": "*fp32",
                **({} if how.factor is None else {"f_ptr": "*fp32"})}
    return made(name, token_groups.round_groups_kernel, {"x_ptr": "*bf16", **pointers, "x_row": "i32"},
                {**({"f_ptr": None} if how.factor is None else {}), **token_groups.constants(n, how, early)},
                multiples=("x_row",), wide_loads=1)


def _norm(name: str, n: int, how: GroupRounding, early: bool) -> AotCase:
    pointers = {"l_ptr": "*u8" if how.packed else "*bf16", "t_ptr": "*fp32",
                **({} if how.factor is None else {"f_ptr": "*fp32"})}
    absent = {"f_ptr": None} if how.factor is None else {}
    return made(name, rms_norm.rms_norm_groups_kernel,
                {"x_ptr": "*bf16", "w_ptr": "*bf16", **pointers, "eps": "fp32"},
                {**absent, **rms_norm.group_constants(n, how, early)}, wide_loads=1)


def _weight(group: int, n: int, k: int, gated: bool) -> TritonWeight:
    """On the meta device, without memory."""
    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, columns, dtype=dtype, device="meta")

    numbers = torch.empty(1, device="meta") if group == token_groups.FINE else None
    how = GroupRounding(group, numbers, block_scaled.BK)
    return block_scaled.pack(empty(k, torch.uint8), empty(k // group, torch.uint8), numbers, how, "blackwell",
                             gated)


def _product(name: str, group: int, m: int, n: int = 4096, gated: str | None = None, full: bool = False,
             early: bool = False) -> AotCase:
    """``full``: with bias and residual."""
    w = _weight(group, n, 4096, gated is not None)
    with tuned.trial({"pdl": 1} if early else {}):
        plan, constants = matmul.arguments(w, m)
    pointers = {} if plan.split else {"t_ptr": "*fp32"}
    if w.scale is not None:
        pointers["s_ptr"] = "*fp32"
    if full and not plan.split:
        pointers |= {"b_ptr": "*bf16", "r_ptr": "*bf16"}
    absent = {key: None for key in ("t_ptr", "s_ptr", "b_ptr", "r_ptr") if key not in pointers}
    integers = ("m", "n", "x_row", "r_row", "y_row", "magic")
    label = " gated" * bool(gated) + " all" * full + " early" * early
    return made(f"{name} m{m}{label}", block_scaled.block_scaled_kernel,
                {"x_ptr": "*u8", "w_ptr": "*u8", **pointers, "y_ptr": "*fp32" if plan.split else "*bf16",
                 **dict.fromkeys(integers, "i32")},
                {**absent, **constants, "GATED": None if plan.split else gated, **plan.options},
                multiples=tuple(key for key in integers if key != "m"), matrix=True, ptx=INSTRUCTION[name],
                wide_loads=w.words.shape[2] // threads(plan.options, w.family) // 32)


def _lookup(name: str, group: int) -> AotCase:
    w = _weight(group, 128256, 4096, False)
    scale = {} if w.scale is None else {"s_ptr": "*fp32"}
    return made(f"embed {name}", embedding.embed_kernel,
                {"ids_ptr": "*i64", "w_ptr": POINTERS[torch.uint8], "y_ptr": "*bf16", "y_row": "i32",
                 **scale},
                {**({} if scale else {"s_ptr": None}), "num_warps": 4, **embedding.constants(w)},
                multiples=("y_row",))
