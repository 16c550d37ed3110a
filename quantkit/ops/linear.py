"""``y = x Wᵀ + b`` of a plain weight by torch, and the query by which a quantized one's kernel is chosen."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery, Phase

BLOCK_ELEMENTS = 2**20
_HALF = (torch.bfloat16, torch.float16)


def query_for(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
              phase: Phase) -> KernelQuery:
    """The query by which the kernel for this weight is chosen."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KernelQuery("linear", device.type, capability, dtype, weight.shape[0], weight.shape[1],
                       weight.format, weight.spec, phase)


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
