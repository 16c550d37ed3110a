"""One number for several weights whose scales are e4m3's multiples of one each.

Engines fuse Linears that see the same input, such as q, k and v, and their kernels multiply all of a fused
weight by one number. A number that is a power of 2 can be moved: the scales beside it are divided by what it
grows by, which loses nothing as long as they stay normal e4m3 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.ops import packing
from quantkit.plugins.manager import registry


def with_one_outer(weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """The same weights under the largest of their numbers; as they were if one would lose by it, or has none.

    Args:
        weights: of specs with e4m3 scales, or any others.

    Raises:
        PluginError: a format breaks its promises.
    """
    unchanged = list(weights)
    if len(weights) < 2 or any(weight.spec.scale_dtype != "e4m3" for weight in weights):
        return unchanged
    forms: list[Format] = [registry("formats").get(weight.format) for weight in weights]
    all_codes: list[Codes] = [form.unpack(weight) for form, weight in zip(forms, weights, strict=True)]
    outer = torch.stack([codes.outer for codes in all_codes if codes.outer is not None]).amax(dim=0)
    moved = []
    for form, weight, codes in zip(forms, weights, all_codes, strict=True):
        if codes.outer is not None and not torch.equal(codes.outer, outer):
            weight = packing.pack(form, replace(codes, outer=outer), weight.dtype)
            if not torch.equal(form.unpack(weight).scale, codes.scale):
                return unchanged
        moved.append(weight)
    return moved
