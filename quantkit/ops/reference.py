"""The kernel that runs everything: dequantize, then multiply; activations are rounded before, if the weight's
spec says so. Others are tested against it. Plain weights are multiplied by :func:`dense` too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.level_values import dequantize, level_values
from quantkit.ops.cpu_machine import reason_against_kernels
from quantkit.ops.cpu_weight import multiply, pack_plain
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery
from quantkit.ops.tokens import quantize_tokens, round_groups

BLOCK_ELEMENTS = 2**20
_HALF = (torch.bfloat16, torch.float16)


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
    return dense(x, plain) if reason_against_kernels() else multiply(x, pack_plain(plain))


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [..., in]`` by a plain weight ``[out, in]``, by torch; returns ``[..., out]`` in x's dtype.

    Models that are loaded to run on a CPU hold no plain weights:
    :meth:`~quantkit.ops.stored_weight.StoredWeight.packed` gives them kernels of our own.

    A row's result doesn't depend on how many others there are, up to ``DECODE_ROWS``. Libraries choose their
    loop by the number of rows, and treat rows at the edge of a tile otherwise than others. So on a CPU each
    row is a call of its own, over memory of its own: torch sees the same shape and alignment every time. On a
    GPU half precision is padded to ``DECODE_ROWS`` rows.
    """
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    count = x.numel() // x.shape[-1]
    half, cpu = x.dtype in _HALF, x.device.type == "cpu"
    if count > DECODE_ROWS:
        slow = half and cpu and not (x.dtype == torch.bfloat16 and native_bf16())
        return _through_float32(x, weight, bias) if slow else F.linear(x, weight, bias)
    rows = x.reshape(count, x.shape[-1])
    if half and not cpu:
        y = F.linear(F.pad(rows, (0, 0, 0, DECODE_ROWS - count)), weight, bias)[:count]
    elif count == 0:
        y = rows.new_empty(0, weight.shape[0])
    else:
        y = torch.cat([F.linear(row.clone(), weight, bias) for row in rows.split(1)])
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _through_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The weight is converted a block of rows at a time: a block stays in the processor's cache, and
    a large head is never in memory twice."""
    wide = x.float()
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        y[..., part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return y


@functools.cache
def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 matrices (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


@contextmanager
def fast_float32() -> Iterator[None]:
    """Multiply float32 matrices by oneDNN's kernels in place of torch's default library, whose kernels are
    half as fast on CPUs of AMD with AVX-512. Results are float32 in full: where oneDNN would round to
    bfloat16, to use AMX, nothing is changed."""
    with nullcontext() if has_tiles() else rounded_products():
        yield


@contextmanager
def rounded_products() -> Iterator[None]:
    """Multiply float32 matrices rounded to bfloat16 where a CPU has tiles for that (AMX), which takes less
    than half as long; sums and results stay float32. Elsewhere nothing is rounded."""
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


REFERENCE = ReferenceKernel()
