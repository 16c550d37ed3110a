"""Ends a decoding step: counts its tokens as stored, by adding them to the lengths of their sequences."""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.triton.cache import SequenceTables, StepTokens

BLOCK = 1024
"""Lengths that a program increments at a time."""


@triton.jit(do_not_specialize=["n"])
def advance_kernel(rows_ptr: tl.tensor, length_ptr: tl.tensor, seen_ptr: tl.tensor, n: tl.tensor,
                   COUNT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A program handles one token. That of a sequence's last token adds all of them to ``length [R, COUNT]``
    and ``seen [R]`` of the sequence."""
    token = tl.program_id(0)
    row = tl.load(rows_ptr + token * 2).to(tl.int64)
    follows = tl.load(rows_ptr + token * 2 + 2, mask=token + 1 < n, other=-1)
    if (row >= 0) & (follows != row):
        more = tl.load(rows_ptr + token * 2 + 1) + 1
        for begin in tl.range(0, COUNT, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            lengths = length_ptr + row * COUNT + at
            tl.store(lengths, tl.load(lengths, mask=at < COUNT, other=0) + more, mask=at < COUNT)
        tl.store(seen_ptr + row, tl.load(seen_ptr + row) + more)


def constants(layers: int, kv_heads: int) -> dict[str, int]:
    """Return the kernel's compile-time arguments and launch options."""
    count = layers * kv_heads
    return {"COUNT": count, "BLOCK": min(BLOCK, triton.next_power_of_2(count)), "num_warps": 4}


def advance(tables: SequenceTables, step: StepTokens) -> None:
    """Add a step's tokens to ``lengths`` of all layers and heads, and to ``seen``, of their sequences.

    Args:
        tables: the tables of a step whose tokens have been written to the pages of all layers.
        step: a sequence's tokens side by side, in order. Tokens that belong to no sequence are skipped.

    Raises:
        ValueError: the tables or the step's rows aren't contiguous.
    """
    if not (tables.lengths.is_contiguous() and tables.seen.is_contiguous() and step.rows.is_contiguous()):
        raise ValueError("tables and rows must be contiguous")
    if len(step.rows):
        advance_kernel[(len(step.rows),)](step.rows, tables.lengths, tables.seen, len(step.rows),
                                          **constants(*tables.lengths.shape[1:]))
