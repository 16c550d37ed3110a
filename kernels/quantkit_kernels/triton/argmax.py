"""Argmax over the logits of every row, in two stages: over each part of a row, then over its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quantkit_kernels.triton.fragment import family_of

PART = 4096
"""Logits that one program reads."""
WARPS = 4
LONGEST = 1 << 20
"""Largest number of logits in a row."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INFINITY = tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def peak_kernel(x_ptr: tl.tensor, value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor,
                step: tl.tensor, v: tl.tensor, PARTS: tl.constexpr, PART: tl.constexpr) -> None:
    """Find the largest logit of one part of a row, the lowest id that has it, and whether all are finite.

    x is ``[B, v]`` with ``step`` elements from one row to the next; value float32, id int32 and finite int32
    are ``[B, PARTS]``.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    rv = part * PART + tl.arange(0, PART)
    x = tl.load(x_ptr + row.to(tl.int64) * step + rv, mask=rv < v, other=-INFINITY).to(tl.float32)
    finite = tl.abs(x) < INFINITY
    x = tl.where(finite, x, -INFINITY)
    highest = tl.max(x)
    index = row * PARTS + part
    tl.store(value_ptr + index, highest)
    tl.store(id_ptr + index, tl.min(tl.where(x == highest, rv, _NOWHERE)))
    tl.store(finite_ptr + index, tl.min(tl.where(finite | (rv >= v), 1, 0)))


@triton.jit
def join_peaks_kernel(value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor, out_ptr: tl.tensor,
                      good_ptr: tl.tensor, PARTS: tl.constexpr, PAD: tl.constexpr) -> None:
    """Reduce the peaks of one row's parts to the id, int64, and whether all logits are finite, int32."""
    row = tl.program_id(0)
    _, best, finite = peak_of(value_ptr, id_ptr, finite_ptr, row, PARTS, PAD)
    tl.store(out_ptr + row, best.to(tl.int64))
    tl.store(good_ptr + row, finite)


@triton.jit
def peak_of(value_ptr: tl.tensor, id_ptr: tl.tensor, finite_ptr: tl.tensor, row: tl.tensor,
            PARTS: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    """Return a row's largest logit, the lowest id that has it, and 1 if all logits are finite."""
    rp = tl.arange(0, PAD)
    index, inside = row * PARTS + rp, rp < PARTS
    value = tl.load(value_ptr + index, mask=inside, other=-INFINITY)
    highest = tl.max(value)
    ids = tl.load(id_ptr + index, mask=inside, other=_NOWHERE)
    finite = tl.load(finite_ptr + index, mask=inside, other=1)
    return highest, tl.min(tl.where(value == highest, ids, _NOWHERE)), tl.min(finite)


@dataclass(frozen=True)
class LogitSplits:
    """How a row of logits is divided into parts.

    Attributes:
        parts: number of parts of a row.
        pad: the number rounded up to a power of two.
        size: logits in a part.
    """

    parts: int
    pad: int
    size: int


def cut(v: int) -> LogitSplits:
    """Return how a row of v logits is divided."""
    parts = -(-v // PART)
    return LogitSplits(parts, triton.next_power_of_2(parts), PART)


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of every row. Of equal logits the lowest id wins.

    Args:
        logits: ``[B, V]``, bfloat16, float16 or float32; rows may have gaps between them.
        out: int64 ``[B]``, contiguous: where the ids are written.

    Returns:
        Ids int64 ``[B]`` (``out`` if given), which are below V in any case, and int32 ``[B]``: 1 where all
        logits of a row are finite.

    Raises:
        ValueError: the shape or dtype of ``logits`` or ``out`` isn't supported.
    """
    logits, out, finite = checked(logits, out)
    if logits.shape[0]:
        splits = cut(logits.shape[1])
        join_peaks_kernel[(len(logits),)](*peaks(logits, splits), out, finite, PARTS=splits.parts,
                                          PAD=splits.pad, num_warps=1)
    return out, finite


def checked(logits: torch.Tensor,
            out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits whose rows are contiguous, and the tensors for ids and flags.

    Raises:
        ValueError: the shape or dtype of ``logits`` or ``out`` isn't supported.
    """
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


def peaks(logits: torch.Tensor, splits: LogitSplits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit of every part, its id, and 1 if all are finite, each ``[B, parts]``."""
    b, v = logits.shape
    value = torch.empty(b, splits.parts, dtype=torch.float32, device=logits.device)
    ids, finite = (torch.empty(b, splits.parts, dtype=torch.int32, device=logits.device) for _ in range(2))
    peak_kernel[(b, splits.parts)](logits, value, ids, finite, logits.stride(0), v, PARTS=splits.parts,
                                   PART=splits.size, **peak_options(family_of(logits.device)))
    return value, ids, finite


def peak_options(family: str) -> dict[str, int]:
    """How the first stage is launched. Without a bound ptxas gives up registers for occupancy there, and
    spills."""
    return {"num_warps": WARPS} | ({"maxnreg": 255} if family == "ampere" else {})
