"""Random weights as our CPU kernels read them, for measurements."""

from __future__ import annotations

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.ops import cpu_weight
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import choose
from quantkit.ops.linear import query_for
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.random_codes import random_codes
from quantkit.quantization.recipe import default_format


def packed_weight(shape: tuple[int, int], spec: QuantSpec | None) -> CpuWeight:
    """A weight ``(out, in)`` of random codes as a CPU kernel reads it; ``None``: of plain bf16 numbers."""
    if spec is None:
        return cpu_weight.pack_plain(torch.randn(shape).to(torch.bfloat16))
    codes = random_codes(spec, shape, torch.Generator())
    weight = registry("formats").get(default_format(spec)).pack(codes, torch.bfloat16)
    kernel = choose(query_for(weight, torch.bfloat16, torch.device("cpu"), "decode")).kernel
    packed: CpuWeight = kernel.prepare(weight)
    return packed
