"""How long a run may take, from the plan's layers and this machine's arithmetic, before it begins."""

from __future__ import annotations

import time

import torch

from quantkit.quantization.planning.plan import Plan
from quantkit.quantization.transforms.channel_scales import AWQ_ROWS

PROBE = 512
"""Rows and columns of the product that is timed."""
WALKS, WEIGHED = 2.0, 0.5
"""Products of the calibration tokens with all weights that a calibrated run is as long as, and what weighing
tokens adds. Measured, as the constants below, on SmolLM2-135M and on two layers as wide as 1,024, on an AMD
EPYC with AVX2 on 27 November 2026: twelve recipes took 0.7 to 1.7 times what they give."""
SOLVED = 7.0
"""Products of a weight with its Hessian that solving it is as long as."""
SEARCHED = 42
"""Scales that awq tries for a layer, each a product of some rows with the Hessian."""
TRELLIS, ROUNDED = 7e4, 1e3
"""Operations a weight of searching a trellis, and of rounding, packing, writing and rereading."""
KNOWN_TRANSFORMS = {"awq", "rotate", "smoothquant"}
"""All but awq take no time to speak of."""
RANGE = (0.6, 2.0)
"""What an estimate is multiplied by for its ends."""


def operations() -> float:
    """Operations a second of a product in float32 on all threads, in a tenth of a second."""
    left, right = torch.randn(PROBE, PROBE), torch.randn(PROBE, PROBE)
    runs, begin = 0, time.perf_counter()
    left @ right
    while (spent := time.perf_counter() - begin) < 0.1 or runs < 2:
        left @ right
        runs += 1
    return 2 * PROBE ** 3 * runs / spent


def expected_seconds(plan: Plan, rate: float) -> tuple[float, float] | None:
    """Seconds that the run takes on a CPU at least and at most.

    Args:
        plan: of the run.
        rate: operations a second, of :func:`operations`.

    Returns:
        ``None`` where nothing is known: a plugin's method or transform, learned rounding, a recovery, or text
        that the model writes first.
    """
    spec, transforms = plan.calibration, {transform.name for transform in plan.recipe.transforms}
    if plan.recipe.recover is not None or (spec is not None and spec.text == "self") or (
            not transforms <= KNOWN_TRANSFORMS):
        return None
    total = 0.0
    for row in plan.rows:
        weights = row.shape[0] * row.shape[1]
        if row.method is None:
            continue
        if row.method not in ("rtn", "nf4", "gptq") or row.options.get("learning_steps"):
            return None
        total += ROUNDED * weights
        if row.method == "gptq" and row.name in plan.measured:
            total += 2 * SOLVED * weights * row.shape[1]
        if "awq" in transforms and row.layer is not None and row.name in plan.measured:
            total += 2 * SEARCHED * min(AWQ_ROWS, row.shape[0]) * row.shape[1] ** 2
        if row.spec is not None and row.spec.kind == "trellis":
            total += TRELLIS * weights
    if spec is not None:
        weights = sum(row.shape[0] * row.shape[1] for row in plan.rows if row.layer is not None)
        total += 2 * (WALKS + WEIGHED * plan.weighed) * weights * spec.windows * spec.window
    return RANGE[0] * total / rate, RANGE[1] * total / rate
