"""The one number of a Linear's inputs that NVFP4's activations need before a model runs.

A token's groups get e4m3 scales as they come. What those are multiples of is the layer's, and found in
calibration, so that the largest group has a scale near e4m3's largest number, 448.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit.formats import e2m1, e4m3
from quantkit.formats.base import Codes
from quantkit.quantization.methods.base import LayerStats
from quantkit.support.errors import CalibrationError

UNREACHED = 1.0
"""For an expert that no calibration token has reached."""


def with_input_factor(codes: Codes, stats: LayerStats | None) -> Codes:
    """The codes with ``input_factor``, if their spec has ``static_inputs``; else as they are.

    The number is the largest power of 2 with which the largest input keeps below e4m3's range. Larger inputs
    than calibration's are clipped, so a power of 2, rounded down, leaves them room, half a binade on average.

    Raises:
        CalibrationError: nothing was measured.
    """
    if not codes.spec.static_inputs:
        return codes
    if stats is None or stats.largest is None:
        raise CalibrationError(f"{codes.spec.label()} was given no sizes of its inputs",
                               why="its activations' scales are multiples of a number that is calibrated",
                               next="add a calibration section to the recipe")
    largest = stats.largest.max().reshape(1, 1)
    quotient = e2m1.LARGEST * e4m3.LARGEST / largest
    power = torch.ldexp(torch.ones_like(quotient), torch.frexp(quotient).exponent - 1)
    usable = (largest > 0) & torch.isfinite(quotient)
    return replace(codes, input_factor=torch.where(usable, power, UNREACHED).to(codes.codes.device))
