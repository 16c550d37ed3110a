"""How long a run may take, from the plan's layers and this machine's arithmetic, before it begins."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from quantkit.quantization.planning.plan import Plan
from quantkit.quantization.transforms.channel_scales import AWQ_ROWS

PROBE = 512
"""Rows and columns of the product that is timed."""
OPENING = 0.5
"""Seconds that every run takes to open the model and to finish the checkpoint."""
ROUNDED = 2.5e3
"""Operations a weight of reading, rounding, packing, writing and rereading."""
TRELLIS = 17
"""Operations a weight and state of searching a trellis."""
SOLVED = 16.0
"""Products of a weight with its Hessian that solving it is as long as, with AVX-512; with AVX2, where the
timed product is slower and our kernels are not, it is about half as many."""
FACTORED = 1.5
"""Operations of factorizing a Hessian, over the cube of its side."""
OBSERVED = 0.6
"""Products of the calibration tokens with themselves that summing up a Hessian is as long as."""
WALKS = 2.0
"""Products of the calibration tokens with all weights that a calibrated run is as long as."""
WEIGHED = 0.5
"""What weighing tokens adds to that."""
AWQ_SCALES = 42
"""Scales that awq tries for a layer, each a product of some rows with the Hessian."""
KNOWN_TRANSFORMS = {"awq", "smoothquant"}
"""Transforms whose time is known; smoothquant takes none to speak of."""
FASTEST = 0.6
SLOWEST = 2.0
"""What an estimate is multiplied by for its ends.

The constants were measured on a model of 135M and on one of 1.5B parameters, on AMD EPYCs with AVX2 and with
AVX-512, on 27 November 2026.
"""


class Duration(NamedTuple):
    """Seconds that a run takes at least and at most."""

    least: float
    most: float


def operations() -> float:
    """Operations a second of a product in float32 on all threads, in a tenth of a second."""
    left, right = torch.randn(PROBE, PROBE), torch.randn(PROBE, PROBE)
    runs, begin = 0, time.perf_counter()
    left @ right
    while (spent := time.perf_counter() - begin) < 0.1 or runs < 2:
        left @ right
        runs += 1
    return 2 * PROBE ** 3 * runs / spent


def expected_seconds(plan: Plan, rate: float) -> Duration | None:
    """The time that the run takes on a CPU.

    Args:
        rate: operations a second, as :func:`operations` measures them.

    Returns:
        ``None`` where nothing is known: a plugin's method or transform, learned rounding, a recovery, or text
        that the model writes first.
    """
    spec, transforms = plan.calibration, {transform.name for transform in plan.recipe.transforms}
    if plan.recipe.recover is not None or (spec is not None and spec.self_written) or (
            not transforms <= KNOWN_TRANSFORMS):
        return None
    total = 0.0
    inputs: dict[tuple[int | None, str], int] = {}
    for row in plan.rows:
        weights = row.shape[0] * row.shape[1]
        if row.method is None:
            continue
        if row.method not in ("rtn", "nf4", "gptq"):
            return None
        total += ROUNDED * weights
        if "hessian" in plan.measured.get(row.name, ()):
            inputs[row.layer, row.shares] = row.shape[1]
        if row.method == "gptq" and row.name in plan.measured:
            total += 2 * SOLVED * weights * row.shape[1]
        if "awq" in transforms and row.layer is not None and row.name in plan.measured:
            total += 2 * AWQ_SCALES * min(AWQ_ROWS, row.shape[0]) * row.shape[1] ** 2
        if row.spec is not None and row.spec.window is not None:
            total += TRELLIS * 2**row.spec.window * weights
    if spec is not None:
        tokens = spec.windows * spec.window
        weights = sum(row.shape[0] * row.shape[1] for row in plan.rows if row.layer is not None)
        total += 2 * (WALKS + WEIGHED * plan.weighed) * weights * tokens
        total += sum(FACTORED * size ** 3 + 2 * OBSERVED * tokens * size ** 2 for size in inputs.values())
    seconds = OPENING + total / rate
    return Duration(FASTEST * seconds, SLOWEST * seconds)
