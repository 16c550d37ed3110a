"""Builds the arguments of the attention kernels from tensors: pointers, numbers, compile-time arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from quantkit_kernels.triton.cache import (
    CHANNEL,
    FP8,
    HADAMARD,
    INT8,
    PLAIN,
    TOKEN,
    LayerPages,
    SequenceTables,
    Side,
    SideLayout,
    StepTokens,
)
from quantkit_kernels.triton.fragment import family_of

FARTHEST = 1 << 30
"""Larger windows and sinks are clamped to this."""
KEYS = {PLAIN: (16,), INT8: (8,), FP8: (8,), CHANNEL: (2, 3, 4), HADAMARD: (2, 3, 4)}
VALUES = {PLAIN: (16,), INT8: (8,), FP8: (8,), TOKEN: (2, 3, 4), HADAMARD: (2, 3, 4)}
"""The kinds and bits that the kernels read. Only keys may be centered."""
HEADS = 16
"""Largest number of query heads that share a key head."""
CHANGING = ["window", "limit", "sinks", "residual_length", "first", "layer", "layers", "width",
            "residual_width", "splits"]
"""Integer arguments whose values don't cause recompilation."""


def reason_against(k: SideLayout, v: SideLayout, dim: int, family: str) -> str | None:
    """Say why no kernel reads keys and values of these layouts and head dimension; ``None`` if one does.

    ``family``: see :func:`~quantkit_kernels.triton.fragment.family_of`.
    """
    for name, layout, known in (("keys", k, KEYS), ("values", v, VALUES)):
        if layout.kind != PLAIN and layout.bits not in known.get(layout.kind, ()):
            return f"no kernel reads {name} of kind {layout.kind} at {layout.bits} bits"
        if layout.bits < 8 and dim % 32:
            return f"the head dimension must be a multiple of 32, not {dim}"
        if family == "cdna" and layout.kind in (CHANNEL, TOKEN) and dim > 128:
            return f"the head dimension must be at most 128, not {dim}"
    if dim % 4 or dim > 256:
        return f"the head dimension must be a multiple of 4 and at most 256, not {dim}"
    return "no kernel reads centered values" if v.centered else None


def check(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, step: StepTokens, layer: int) -> None:
    """Raise ValueError if no kernel reads these pages, or if shapes and dtypes don't match."""
    reason = reason_against(pages.k.coding, pages.v.coding, q.shape[-1], family_of(q.device))
    if reason is not None:
        raise ValueError(reason)
    n, h, d = q.shape
    rows, layers, hkv, _ = tables.pages.shape
    sides = (pages.k, pages.v)
    indexes = [tables.pages, tables.lengths, tables.seen, step.rows]
    indexes += [t for t in (tables.residual, tables.starts, pages.positions, pages.residual_positions)
              if t is not None]
    if (q.stride()[1:] != (d, 1) or h % hkv or h // hkv > HEADS or not 0 <= layer < layers
            or tables.lengths.shape != (rows, layers, hkv) or step.rows.shape != (n, 2)
            or any(t.dtype != torch.int32 or not t.is_contiguous() for t in indexes)
            or (pages.k.residual is None) != (pages.v.residual is None)
            or pages.has_residual != (tables.residual is not None and tables.starts is not None)
            or any(not _fits(side, q.dtype, d) for side in sides)):
        raise ValueError("the shapes, dtypes or strides of q, pages, tables and step don't match")


def _fits(side: Side, dtype: torch.dtype, d: int) -> bool:
    bits = side.codes.element_size() * 8 if side.coding.kind == PLAIN else side.coding.bits
    parts = [t for t in (side.codes, side.scale, side.shift, side.residual) if t is not None]
    return (side.codes.shape[1:] == (64, d * bits // side.codes.element_size() // 8)
            and all(t.is_contiguous() for t in parts)
            and (side.coding.kind != PLAIN or side.codes.dtype == dtype)
            and (side.residual is None or side.residual.dtype == dtype)
            and all(t.dtype == torch.bfloat16 for t in (side.scale, side.shift) if t is not None)
            and (side.coding.kind == PLAIN or side.scale is not None)
            and (side.shift is not None) == (side.coding.kind in (CHANNEL, TOKEN) or side.coding.centered))


def pointers(q: torch.Tensor, pages: LayerPages, tables: SequenceTables,
             step: StepTokens) -> dict[str, torch.Tensor]:
    """Return the kernels' pointers by name. A missing tensor is replaced by another one, which isn't read."""
    unused = tables.lengths
    arguments = {"q_ptr": q}
    for name, side in (("k", pages.k), ("v", pages.v)):
        arguments[f"{name}_ptr"] = side.codes if side.coding.kind == PLAIN else side.codes.view(torch.int32)
        for part, t in (("scale", side.scale), ("shift", side.shift)):
            arguments[f"{name}_{part}_ptr"] = unused if t is None else t.flatten().view(torch.int32)
        arguments[f"{name}_residual_ptr"] = q if side.residual is None else side.residual
    others = {"at_ptr": pages.positions, "residual_at_ptr": pages.residual_positions,
              "table_ptr": tables.pages, "residual_table_ptr": tables.residual, "start_ptr": tables.starts,
              "length_ptr": tables.lengths, "seen_ptr": tables.seen, "rows_ptr": step.rows}
    return arguments | {name: unused if t is None else t for name, t in others.items()}


def numbers(q: torch.Tensor, tables: SequenceTables, layer: int, scale: float, window: int | None,
            limit: int | None, sinks: int, softcap: float | None) -> dict[str, int | float]:
    """Return the kernels' runtime arguments by name."""
    e = math.log2(math.e)
    factor, cap = (scale * e, 0.0) if softcap is None else (2 * scale / softcap * e, softcap * e)
    return {"factor": factor, "cap": cap, "window": _at_most(window), "limit": _at_most(limit),
            "sinks": min(sinks, FARTHEST), "residual_length": tables.residual_length, "first": tables.first,
            "layer": layer, "layers": tables.pages.shape[1], "width": tables.pages.shape[3],
            "residual_width": 0 if tables.residual is None else tables.residual.shape[3],
            "q_step": q.stride(0)}


def _at_most(positions: int | None) -> int:
    return FARTHEST if positions is None else min(positions, FARTHEST)


def constants(k: SideLayout, v: SideLayout, h: int, hkv: int, d: int, has_residual: bool, limited: bool,
              placed: bool, capped: bool, asm: bool) -> dict[str, Any]:
    """Return the kernels' compile-time arguments."""
    return {"HKV": hkv, "G": h // hkv, "D": d, "DP": max(16, triton.next_power_of_2(d)),
            "KK": k.kind, "KB": k.bits, "KC": k.centered, "VK": v.kind, "VB": v.bits,
            "HAS_RESIDUAL": has_residual, "LIMITED": limited, "PLACED": placed and limited, "CAPPED": capped,
            "ASM": asm}


def constants_of(q: torch.Tensor, pages: LayerPages, tables: SequenceTables, window: int | None,
                 limit: int | None, softcap: float | None) -> dict[str, Any]:
    """Return :func:`constants` for these tensors."""
    asm = q.is_cuda and torch.version.hip is None and q.dtype != torch.float32
    return constants(pages.k.coding, pages.v.coding, q.shape[1], tables.pages.shape[2], q.shape[2],
                     pages.has_residual, window is not None or limit is not None, pages.positions is not None,
                     softcap is not None, asm)
