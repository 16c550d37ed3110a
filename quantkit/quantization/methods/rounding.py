"""Rounding without calibration: ``rtn``, to the nearest level of a group's grid, and ``nf4``.

``rtn`` is the baseline that every other method is compared with, as in LLM.int8(),
https://arxiv.org/abs/2208.07339, and ZeroQuant, https://arxiv.org/abs/2206.01861.

``nf4`` is 4-bit NormalFloat as bitsandbytes rounds it, QLoRA, https://arxiv.org/abs/2305.14314: blocks scaled
to [-1, 1], nearest codebook entry. Codes and scales equal bitsandbytes' bit for bit, down to its multiplying
by the reciprocal in whole blocks and dividing in a last, shorter one.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes
from quantkit.formats.dtypes import resolve, scale_dtype
from quantkit.formats.level_values import codebook
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods import trellis
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions, row_parts
from quantkit.quantization.methods.grid import (
    GRIDS,
    check_finite,
    choose_grid,
    round_to_grid,
    to_codes,
)

_AT_ONCE = 1 << 22
"""Weights that are rounded at a time."""
_SMALLEST = 1e-38


class RtnOptions(MethodOptions):
    """Options of ``rtn``.

    Attributes:
        clip_search: choose each group's range by squared error instead of by its extremes.
    """

    clip_search: bool = False


def round_to_nearest(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
                     options: MethodOptions) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``) to nearest; ``stats`` isn't looked at.

    Raises:
        SpecError: the weight isn't finite, or is beyond the range of the scales' dtype.
    """
    assert isinstance(options, RtnOptions)
    check_finite(weight)
    if spec.kind == "trellis":
        return trellis.nearest(weight, spec)
    grid = choose_grid(weight, spec, search=options.clip_search)
    return Codes.joined([to_codes(round_to_grid(weight[part], grid.rows(part), spec), grid.rows(part), spec)
                 for part in row_parts(weight, spec, _AT_ONCE)])


def round_to_codebook(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
                      options: MethodOptions) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``) to the codebook; ``stats`` isn't looked at.

    A block of zeros keeps the scale 0, as in bitsandbytes. With ``spec.nested`` the scales are
    returned as measured: the format rounds them, since their rounding is part of the layout.

    Raises:
        SpecError: the weight isn't finite.
    """
    check_finite(weight)
    size = spec.granularity.size
    assert size is not None
    table = codebook().to(weight.device)
    bounds = (table[:-1] + table[1:]) / 2
    flat = weight.reshape(-1)
    full = flat.numel() // size * size
    blocks, rest = flat[:full].view(-1, size), flat[full:]
    absmax = blocks.abs().amax(dim=1)
    scaled = (blocks * (1 / absmax.clamp(min=_SMALLEST)).unsqueeze(1)).clamp_(-1, 1).reshape(-1)
    if rest.numel():
        last = rest.abs().max().clamp(min=_SMALLEST)
        absmax = torch.cat((absmax, last.unsqueeze(0)))
        scaled = torch.cat((scaled, (rest / last).clamp_(-1, 1)))
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=weight.device)
    for bound in bounds.tolist():  # what bucketize gives, several times faster
        codes += scaled > bound
    return Codes(resolve(spec), codes.reshape(weight.shape), absmax.to(scale_dtype(spec)).float())


RTN = Method(name="rtn", paper="https://arxiv.org/abs/2208.07339", quantize=round_to_nearest,
             options=RtnOptions, kinds=GRIDS)
NF4 = Method(name="nf4", paper="https://arxiv.org/abs/2305.14314", quantize=round_to_codebook,
             kinds=frozenset({"nf"}))
