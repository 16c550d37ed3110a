"""The multiple-choice knapsack: one option for each group, the least cost that fits.

Solved as an integer program by HiGHS (https://highs.dev) in scipy, which proves what it finds the best but
for :data:`GAP`.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

COST, SIZE = 1e4, 1e3
"""What the greatest differences of costs and sizes are scaled to: the solver's tolerances are absolute."""
GAP = 1e-5
"""At which the solver stops: of the least cost, relatively."""


def allocate(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]],
             limit: int) -> list[int] | None:
    """Choose.

    Args:
        costs: the costs of each group's options, finite.
        sizes: the sizes of the same, whole numbers.
        limit: the size that all chosen options together may have.

    Returns:
        The option of each group; ``None`` if even the smallest don't fit.
    """
    if sum(map(min, sizes)) > limit:
        return None
    beyond = [size - min(options) for options in sizes for size in options]
    unit = math.gcd(*beyond) or 1
    scale = SIZE / (max(beyond) // unit or 1)
    flat = scale * np.array([size // unit for size in beyond], dtype=float)
    cost = np.concatenate([np.asarray(options, dtype=float) - min(options) for options in costs])
    cost *= COST / (cost.max() or 1.0)
    count = len(cost)
    owner = np.repeat(np.arange(len(sizes)), [len(options) for options in sizes])
    one_choice = csr_array((np.ones(count), (owner, np.arange(count))), shape=(len(sizes), count))
    cuts = np.cumsum([len(options) for options in sizes])[:-1]
    room = (limit - sum(map(min, sizes))) // unit
    while True:
        with _silent():
            solution = milp(cost, integrality=np.ones(count), bounds=Bounds(0, 1), constraints=[
                LinearConstraint(one_choice, 1, 1), LinearConstraint(flat[None], -np.inf, scale * room)],
                options={"mip_rel_gap": GAP})
        if solution.x is None:  # the smallest options fit: it isn't the problem's fault
            raise RuntimeError(f"HiGHS: {solution.message}")
        chosen = [int(part.argmax()) for part in np.split(solution.x, cuts)]
        taken = sum(options[index] for options, index in zip(sizes, chosen))
        if taken <= limit:
            return chosen
        room -= 1  # within the solver's tolerance, but not within the limit


@contextmanager
def _silent() -> Iterator[None]:
    """Where undoing its presolve costs precision, HiGHS writes a line to stdout, where it has no business."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        (ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
