"""Dynamic per-token quantization of activations: 8 bits, one scale for each token.

The scale is ``max|x| / 127`` for integers, as in ZeroQuant (https://arxiv.org/abs/2206.01861), and
``max|x| / 448`` for e4m3.
"""

from __future__ import annotations

import torch

from quantkit.formats.e4m3 import LARGEST, nearest_
from quantkit.spec import QuantSpec

SMALLEST = 2.0**-100
"""A token's largest value is taken to be at least this: its scale stays above 0."""


def quantize_tokens(x: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to the nearest level, ties to even.

    Args:
        x: ``[m, k]``, any floating dtype.
        spec: of the weight that they are multiplied with; it has ``activations``.

    Returns:
        Levels float32 ``[m, k]`` (whole numbers within ±127, or e4m3's) and scales float32 ``[m, 1]``. In a
        row that isn't finite, the product of both has a NaN.
    """
    wide = x.float()
    top = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    # on a GPU torch multiplies by a number's reciprocal where it should divide
    if spec.kind == "fp":
        scale = top / torch.full_like(top, LARGEST)
        return nearest_(wide / scale), scale
    scale = top / torch.full_like(top, 127)
    return (wide / scale).round_(), scale
