"""4-bit NormalFloat, as bitsandbytes rounds it: blocks scaled to [-1, 1], nearest codebook entry.

QLoRA, https://arxiv.org/abs/2305.14314. Codes and scales equal bitsandbytes' bit for bit, down to
its multiplying by the reciprocal in whole blocks and dividing in a last, shorter one. Data-free.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes
from quantkit.formats.dtypes import resolve, scale_dtype
from quantkit.formats.level_values import codebook
from quantkit.formats.spec import QuantSpec
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import require_finite

_SMALLEST = 1e-38


def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
             options: MethodOptions) -> Codes:
    """Round ``weight`` (float32 ``[out, in]``) to the codebook; ``stats`` isn't looked at.

    A block of zeros keeps the scale 0, as in bitsandbytes. With ``spec.nested`` the scales are
    returned as measured: the format rounds them, since their rounding is part of the layout.

    Raises:
        SpecError: the weight isn't finite.
    """
    require_finite(weight)
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


METHOD = Method(name="nf4", paper="https://arxiv.org/abs/2305.14314", quantize=quantize,
                kinds=frozenset({"nf"}))
