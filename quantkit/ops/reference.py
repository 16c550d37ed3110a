"""The kernel that runs everything: dequantize, then multiply. Others are tested against it."""

from __future__ import annotations

import torch

from quantkit.formats.base import Format, QuantizedTensor
from quantkit.ops.dispatch import KernelQuery
from quantkit.ops.linear import dense


class Reference:
    """Keeps nothing between calls: memory is the packed weight, plus one dequantized layer while it runs."""

    name = "reference"
    order = 1000

    def declines(self, query: KernelQuery) -> str | None:
        """Never, for a linear layer."""
        return None if query.op == "linear" else f"implements linear, not {query.op}"

    def prepare(self, weight: QuantizedTensor) -> tuple[Format, QuantizedTensor]:
        """Finds the format; copies nothing."""
        from quantkit.plugins import registry

        return registry("formats").get(weight.format), weight

    def run(self, x: torch.Tensor, prepared: tuple[Format, QuantizedTensor]) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]`` in x's dtype. On a CPU the product is float32; elsewhere the
        dequantized weight is rounded to x's dtype first, so that the device's matrix units are used."""
        form, weight = prepared
        plain = form.dequantize(weight)
        if x.device.type == "cpu":
            return (x.to(plain.dtype) @ plain.T).to(x.dtype)
        return dense(x, plain.to(x.dtype))


REFERENCE = Reference()
