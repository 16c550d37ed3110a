"""A row times ``(Hartley_m ⊗ Hadamard_a)``, of a width ``a · m``, m odd and a a power of two.

The factor a is done in place, by sums and differences of pairs that are 1, 2, 4 … apart; the factor m by a
matrix. All sums have one order, whatever the instruction set is.
"""

from __future__ import annotations

import math

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import F32, Value, vec

LANES = 16
PADDING = 128
"""Values behind a row that may be written to."""


def parts(width: int) -> tuple[int, int]:
    """``(m, a)``."""
    span = width & -width
    return width // span, span


def reason_against(width: int) -> str | None:
    """Why rows of this width can't be rotated here."""
    span = width & -width
    return None if span >= LANES else f"rotates widths that are a multiple of {LANES}, not {width}"


def room_bytes(width: int) -> int:
    return 2 * (width + PADDING) * 4


def emit(e: Emitter, room: Value, mix: Value, width: int) -> Value:
    """Rotate the row that lies in ``room``; where the result lies.

    Args:
        e: writes the kernel.
        room: float32 ``[2, width + PADDING]``.
        mix: float32 ``[m, m]``, symmetric.
        width: the row's width, which :func:`reason_against` doesn't.
    """
    count, span = parts(width)
    wide = vec(F32, LANES)
    with e.loop(0, width, LANES) as i:
        value = e.load(room, wide, i * 4)
        step = 1
        while step < LANES:
            signs = tuple(-1.0 if lane & step else 1.0 for lane in range(LANES))
            value = value.shuffle([lane ^ step for lane in range(LANES)]) + value * e.const(wide, signs)
            step *= 2
        e.store(room, value, i * 4)
    step = LANES
    while step < span:
        with e.loop(0, width, 2 * step) as start, e.loop(0, step, LANES) as i:
            left, right = room + (start + i) * 4, room + (start + i + step) * 4
            a, b = e.load(left, wide), e.load(right, wide)
            e.store(left, a + b)
            e.store(right, a - b)
        step *= 2
    scale = 1 / math.sqrt(span)
    if count == 1:
        with e.loop(0, width, LANES) as i:
            e.store(room, e.load(room, wide, i * 4) * scale, i * 4)
        return room
    out = room + (width + PADDING) * 4
    with e.loop(0, span, LANES) as i, e.loop(0, count) as row:
        total = e.var(e.load(room, wide, i * 4) * e.load(mix, F32, row * (count * 4)).spread(LANES))
        with e.loop(1, count) as j:
            factor = e.load(mix, F32, (row * count + j) * 4).spread(LANES)
            total.set(total.get() + e.load(room, wide, (j * span + i) * 4) * factor)
        e.store(out, total.get() * scale, (row * span + i) * 4)
    return out
