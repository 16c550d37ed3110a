"""How long a run may take, from the plan's layers and this machine's arithmetic, before it begins."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from quantkit.ops.reference import fast_float32
from quantkit.quantization.memory import PlanRow
from quantkit.quantization.planning.plan import Plan
from quantkit.quantization.planning.steps import (
    handle_operations,
    measure_operations,
    solve_operations,
    walk_operations,
)
from quantkit.quantization.transforms.channel_scales import AWQ_ROWS

PROBE = 512
"""Rows and columns of the product that is timed."""
OPENING = 0.5
"""Seconds that every run takes to open the model and to finish the checkpoint."""
WEIGHED = 5.0
"""Walks of the tokens of ``importance_windows`` through layers and head that weighing tokens is as long
as."""
AWQ_SCALES = 42
"""Scales that awq tries for a layer, each a product of some rows with the Hessian."""
KNOWN_TRANSFORMS = {"awq", "smoothquant"}
"""Transforms whose time is known; smoothquant takes none to speak of."""
MEASURED_RATE = 4.3e11
"""Operations a second of the machine on which :mod:`~quantkit.quantization.planning.steps` was measured. One
with slower arithmetic has not so much slower memory."""
FASTEST = 0.7
SLOWEST = 1.4
"""What an estimate is multiplied by for its ends."""


class Duration(NamedTuple):
    """Seconds that a run takes at least and at most."""

    least: float
    most: float


def operations() -> float:
    """Operations a second of a product in float32 on all threads, in a tenth of a second."""
    left, right = torch.randn(PROBE, PROBE), torch.randn(PROBE, PROBE)
    with fast_float32():
        left @ right
        runs, begin = 0, time.perf_counter()
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
    total = handling = 0.0
    inputs: dict[tuple[int | None, str], PlanRow] = {}
    for row in plan.rows:
        if row.method is None:
            continue
        if row.method not in ("rtn", "nf4", "gptq"):
            return None
        total += solve_operations(row, plan)
        handling += handle_operations(row)
        if "hessian" in plan.measured.get(row.name, ()):
            inputs[row.layer, row.shares] = row
        if "awq" in transforms and row.layer is not None and row.name in plan.measured:
            total += 2 * AWQ_SCALES * min(AWQ_ROWS, row.shape[0]) * row.shape[1] ** 2
    if spec is not None:
        tokens = spec.windows * spec.window
        weights = sum(row.shape[0] * row.shape[1] for row in plan.rows if row.layer is not None)
        total += (1 + bool(plan.drift)) * walk_operations(weights, tokens)
        if plan.weighed:
            outside = sum(row.shape[0] * row.shape[1] for row in plan.rows if row.layer is None)
            total += WEIGHED * walk_operations(weights + outside,
                                               min(spec.windows, spec.importance_windows) * spec.window)
        total += sum(measure_operations(row.shape[1], tokens, row.name in plan.drift)
                     for row in inputs.values())
    seconds = OPENING + total / rate + handling / (rate * MEASURED_RATE) ** 0.5
    return Duration(FASTEST * seconds, SLOWEST * seconds)
