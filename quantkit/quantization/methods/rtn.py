"""Round to nearest: every weight to the closest level of its group's grid. Data-free.

The baseline that every other method is compared with, as in LLM.int8(),
https://arxiv.org/abs/2208.07339, and ZeroQuant, https://arxiv.org/abs/2206.01861.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods import trellis
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import (
    join,
    require_finite,
    round_to_grid,
    row_parts,
    to_codes,
)
from quantkit.quantization.methods.group_scales import GRIDS, choose_grid

_TOGETHER = 1 << 22
"""Weights that are rounded at a time."""


class RtnOptions(MethodOptions):
    """Options of ``rtn``.

    Attributes:
        clip_search: choose each group's range by squared error instead of by its extremes.
    """

    clip_search: bool = False


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``) to nearest; ``stats`` isn't looked at.

    Raises:
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, RtnOptions)
    require_finite(weight)
    if spec.kind == "trellis":
        return trellis.nearest(weight, spec)
    grid = choose_grid(weight, spec, search=options.clip_search)
    return join([to_codes(round_to_grid(weight[part], grid.rows(part), spec), grid.rows(part), spec)
                 for part in row_parts(weight, spec, _TOGETHER)])


METHOD = Method(name="rtn", paper="https://arxiv.org/abs/2208.07339", quantize=quantize, options=RtnOptions,
                kinds=GRIDS)
