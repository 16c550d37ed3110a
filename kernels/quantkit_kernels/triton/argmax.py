"""The most likely token of every row, in two stages: of each part of a row, then of them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PART = 4096
"""Logits that one program looks at."""
WARPS = 4
LONGEST = 1 << 20
"""Logits of a row, at most."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INFINITY = tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def peak_kernel(x_ptr: tl.tensor, value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor,
                step: tl.tensor, v: tl.tensor, PARTS: tl.constexpr, PART: tl.constexpr) -> None:
    """Of one part of a row: the largest logit, its lowest id, and whether all are finite.

    x ``[B, v]``, ``step`` elements from row to row; value float32, id int32, finite int32 ``[B, PARTS]``.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    rv = part * PART + tl.arange(0, PART)
    x = tl.load(x_ptr + row.to(tl.int64) * step + rv, mask=rv < v, other=-INFINITY).to(tl.float32)
    good = tl.abs(x) < INFINITY
    x = tl.where(good, x, -INFINITY)
    most = tl.max(x)
    here = row * PARTS + part
    tl.store(value_ptr + here, most)
    tl.store(id_ptr + here, tl.min(tl.where(x == most, rv, _NOWHERE)))
    tl.store(finite_ptr + here, tl.min(tl.where(good | (rv >= v), 1, 0)))


@triton.jit
def join_peaks_kernel(value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor, out_ptr: tl.tensor,
                      good_ptr: tl.tensor, PARTS: tl.constexpr, PAD: tl.constexpr) -> None:
    """One row: its parts' peaks → the id, int64, and whether all is finite, int32."""
    row = tl.program_id(0)
    _, best, good = peak_of(value_ptr, id_ptr, finite_ptr, row, PARTS, PAD)
    tl.store(out_ptr + row, best.to(tl.int64))
    tl.store(good_ptr + row, good)


@triton.jit
def peak_of(value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor, row: tl.tensor,
            PARTS: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    """A row's largest logit, the lowest id of equals, and 1 if all are finite."""
    rp = tl.arange(0, PAD)
    here, there = row * PARTS + rp, rp < PARTS
    value = tl.load(value_ptr + here, mask=there, other=-INFINITY)
    most = tl.max(value)
    ids = tl.load(id_ptr + here, mask=there, other=_NOWHERE)
    good = tl.load(finite_ptr + here, mask=there, other=1)
    return most, tl.min(tl.where(value == most, ids, _NOWHERE)), tl.min(good)


@dataclass(frozen=True)
class LogitSplits:
    """How rows of logits are cut.

    Attributes:
        parts: of a row.
        pad: the power of two above.
        size: of a part.
    """

    parts: int
    pad: int
    size: int


def cut(v: int) -> LogitSplits:
    """A row of v logits."""
    parts = -(-v // PART)
    return LogitSplits(parts, triton.next_power_of_2(parts), PART)


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of every row, the lowest id of equals.

    Args:
        logits: ``[B, V]``, bfloat16, float16 or float32; rows may be apart.
        out: int64 ``[B]``, contiguous: where the ids are written.

    Returns:
        Ids int64 ``[B]`` (``out`` if given), below V in any case, and int32 ``[B]``: 1 where all logits of a
        row are finite.

    Raises:
        ValueError: another shape or dtype.
    """
    logits, out, good = checked(logits, out)
    if logits.shape[0]:
        c = cut(logits.shape[1])
        join_peaks_kernel[(len(logits),)](*peaks(logits, c), out, good, PARTS=c.parts, PAD=c.pad, num_warps=1)
    return out, good


def checked(logits: torch.Tensor,
            out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits whose rows have no gaps, and where ids and flags go. Raises ValueError as :func:`argmax`."""
    if logits.ndim != 2 or logits.dtype not in DTYPES or not 0 < logits.shape[1] <= LONGEST:
        raise ValueError(f"logits must be [B, V] in bfloat16, float16 or float32, V at most {LONGEST}, "
                         f"not {list(logits.shape)} {logits.dtype}")
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    elif out.shape != logits.shape[:1] or out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous int64 [{logits.shape[0]}], "
                         f"not {list(out.shape)} {out.dtype}")
    return (logits if logits.stride(1) == 1 else logits.contiguous(), out,
            torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device))


def peaks(logits: torch.Tensor, c: LogitSplits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every part the largest logit, its id, and 1 if all are finite, ``[B, parts]``."""
    b, v = logits.shape
    value = torch.empty(b, c.parts, dtype=torch.float32, device=logits.device)
    ids, finite = (torch.empty(b, c.parts, dtype=torch.int32, device=logits.device) for _ in range(2))
    peak_kernel[(b, c.parts)](logits, value, ids, finite, logits.stride(0), v, PARTS=c.parts, PART=c.size,
                              num_warps=WARPS)
    return value, ids, finite
