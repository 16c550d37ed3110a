"""Dynamic quantization of activations: one scale for each token, or for each group of a token's values.

A token's scale is ``max|x| / 127`` for integers, as in ZeroQuant (https://arxiv.org/abs/2206.01861), and
``max|x| / 448`` for e4m3. Groups are those of the weight's columns:

- e4m3 in groups of a square's columns: ``max|x| / 448`` in float32, as in DeepSeek-V3
  (https://arxiv.org/abs/2412.19437).
- MXFP4: the power of 2 of ``max|x|``, rounded up from 1.75 of it on, over 4. The OCP's own rule
  (https://arxiv.org/abs/2310.10537) always rounds down; this one, of compressed-tensors and vLLM, clips less.
- NVFP4: ``max|x| / 6`` times a number that calibration has found for the layer, rounded to e4m3
  (https://arxiv.org/abs/2509.25149).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.formats import e2m1
from quantkit.formats.e4m3 import LARGEST, nearest_
from quantkit.formats.spec import QuantSpec

SMALLEST = 2.0**-100
"""A token's largest value is taken to be at least this: its scale stays above 0."""
NO_SCALE = 0.125
"""What stands in the place of an e4m3 scale that is rounded to 0: all levels are 0 then."""
_ROUND = 1 << 21
"""A quarter of a float32's power of 2, added to its bits."""
_OVER = 2
"""The largest power of 2 of e2m1 is 2²."""


def quantize_tokens(x: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to the nearest level, ties to even.

    Args:
        x: ``[m, k]``, any floating dtype.
        spec: the spec of the weight that they are multiplied with; it has ``activations``.

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


def round_groups(x: torch.Tensor, spec: QuantSpec, factor: torch.Tensor | None = None) -> torch.Tensor:
    """Round every group of a row to the nearest levels, ties to even.

    Args:
        x: ``[m, k]``, any floating dtype.
        spec: the spec of the weight that they are multiplied with; its ``activations`` are ``group``.
        factor: float32 ``[1, 1]``: what NVFP4's scales are multiplied by before they are rounded to e4m3.

    Returns:
        Levels times scales, float32 ``[m, k]``. In a group that isn't finite all values are NaN.
    """
    size, columns = spec.granularity.size or 1, x.shape[1]
    groups = F.pad(x.float(), (0, -columns % size)).unflatten(1, (-1, size))
    top = groups.abs().amax(-1, keepdim=True)
    round_ = nearest_
    if spec.bits == 8:
        top = top.clamp(min=SMALLEST)
        scale = top / torch.full_like(top, LARGEST)
    elif spec.scale_dtype == "e8m0":
        round_, scale = e2m1.nearest_, _power(top)
    else:
        assert factor is not None
        round_ = e2m1.nearest_
        stored = nearest_(top / torch.full_like(top, e2m1.LARGEST) * factor)
        scale = torch.where(stored == 0, NO_SCALE, stored) / factor
    scale = torch.where(torch.isfinite(top), scale, torch.nan)
    return (round_(groups / scale) * scale).flatten(1)[:, :columns]


def _power(top: torch.Tensor) -> torch.Tensor:
    """MXFP4's scales for groups with these largest sizes, float32: worked out by the bits of ``top``."""
    exponent = ((top.view(torch.int32) + _ROUND) >> 23) - _OVER
    return torch.ldexp(torch.ones_like(top), exponent.clamp_(0, e2m1.E8M0_NAN - 1) - e2m1.E8M0_BIAS)
