"""The kernel that runs everything: dequantize, then multiply; activations are rounded before, if the weight's
spec says so. Others are tested against it."""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.level_values import dequantize, level_values
from quantkit.ops.cpu_machine import reason_against_kernels
from quantkit.ops.cpu_weight import multiply, pack_plain
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery, dense
from quantkit.ops.tokens import quantize_tokens, round_groups


class ReferenceKernel:
    """Keeps nothing between calls: memory is the packed weight, plus one dequantized layer while it runs."""

    name = "reference"
    order = 1000

    def reason_against(self, query: KernelQuery) -> str | None:
        """Never, for a linear layer."""
        return None if query.op == "linear" else f"implements linear, not {query.op}"

    def prepare(self, weight: QuantizedTensor) -> tuple[Format, QuantizedTensor]:
        """Finds the format; copies nothing."""
        from quantkit.plugins.manager import registry

        return registry("formats").get(weight.format), weight

    def run(self, x: torch.Tensor, prepared: tuple[Format, QuantizedTensor]) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype. On a GPU the dequantized weight is rounded to x's dtype.
        On a CPU the product is float32, by a kernel whose rows don't depend on one another."""
        form, weight = prepared
        if weight.spec.activations and len(x):
            return _rounded(x, form.unpack(weight))
        return _product(x, form.dequantize(weight)).to(x.dtype)


def _rounded(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """``x [m, k]``, quantized a token or a group of a token at a time. With a scale a token and a row or a
    tensor, levels go into the product and scales come after it: levels of both kinds are exact in bfloat16
    too."""
    if codes.spec.activations == "group":
        return _product(round_groups(x, codes.spec, codes.input_factor), dequantize(codes)).to(x.dtype)
    rows, scale = quantize_tokens(x, codes.spec)
    gpu = x.device.type != "cpu"
    product = _product(rows.to(x.dtype) if gpu and x.dtype == torch.bfloat16 else rows, level_values(codes))
    return (product.float() * scale * codes.scale.T).to(x.dtype)


def _product(x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """``x [m, k]`` by ``plain [n, k]`` in float32, in x's dtype or in float32."""
    if x.device.type != "cpu":
        return dense(x, plain)
    x = x.to(plain.dtype)
    # packing takes longer than a few rows, which dense multiplies one at a time
    few = len(x) <= DECODE_ROWS
    return dense(x, plain) if few or reason_against_kernels() else multiply(x, pack_plain(plain))


REFERENCE = ReferenceKernel()
