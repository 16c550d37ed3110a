"""``y = x Wᵀ + b`` for a plain or a quantized weight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_product import multiply
from quantkit.ops.cpu_weight import CpuWeight, pack_plain
from quantkit.ops.device_weight import DeviceWeight
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery, LinearKernel, Phase, choose
from quantkit.ops.hadamard import apply_hadamard

BLOCK_ELEMENTS = 2**20
_HALF = (torch.bfloat16, torch.float16)


def query_for(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
              phase: Phase) -> KernelQuery:
    """The query that :func:`linear` will ask for this weight."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KernelQuery("linear", device.type, capability, dtype, weight.shape[0], weight.shape[1],
                       weight.format, weight.spec, phase)


def kernel_name(weight: torch.Tensor | QuantizedTensor | CpuWeight | DeviceWeight, dtype: torch.dtype,
                device: torch.device, phase: Phase) -> str:
    """Of the kernel with which :func:`linear` multiplies activations of ``dtype`` on ``device``."""
    if isinstance(weight, CpuWeight | DeviceWeight):
        return weight.name
    if isinstance(weight, torch.Tensor):
        return "torch"
    return choose(query_for(weight, dtype, device, phase)).kernel.name


def pack(weight: torch.Tensor | QuantizedTensor, dtype: torch.dtype,
         read: Callable[[], None] = lambda: None) -> CpuWeight | QuantizedTensor:
    """A weight as a CPU kernel of ours multiplies activations of ``dtype`` by it.

    Args:
        weight: plain, in ``dtype``, or quantized.
        dtype: of activations: one of ``cpu_weight.PLAIN``.
        read: called now and then, when some of a plain weight was read.

    Returns:
        The packed weight; a quantized one that none of our CPU kernels takes comes back as it is, and
        :func:`linear` dequantizes it in every call.
    """
    if isinstance(weight, torch.Tensor):
        return pack_plain(weight, read)
    kernel = choose(query_for(weight, dtype, torch.device("cpu"), "decode")).kernel
    return kernel.prepare(weight) if isinstance(kernel, CpuKernel) else weight


def linear(x: torch.Tensor, weight: torch.Tensor | QuantizedTensor | CpuWeight,
           bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply ``x [..., in]`` by a weight ``[out, in]``; returns ``[..., out]`` in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return dense(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if weight.rotated if isinstance(weight, CpuWeight) else weight.spec.rotation:
        rows = apply_hadamard(rows)
    phase: Phase = "decode" if rows.shape[0] <= DECODE_ROWS else "prefill"
    if isinstance(weight, CpuWeight):
        y = multiply(rows, weight)
    else:
        kernel, prepared = _prepared(weight, x, phase)
        y = kernel.run(rows, prepared)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _prepared(weight: QuantizedTensor, x: torch.Tensor, phase: Phase) -> tuple[LinearKernel, Any]:
    """The kernel and its state for this weight; chosen once, then found by two comparisons."""
    hit: Any = weight.cache.get(phase)
    if hit is None or hit[0] is not x.dtype or hit[1] != x.device:
        kernel = choose(query_for(weight, x.dtype, x.device, phase)).kernel
        state = f"state/{kernel.name}/{x.device}"
        if state not in weight.cache:
            weight.cache[state] = kernel.prepare(weight)
        hit = weight.cache[phase] = (x.dtype, x.device, kernel, weight.cache[state])
    return hit[2], hit[3]


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [..., in]`` by a plain weight ``[out, in]``, by torch; returns ``[..., out]`` in x's dtype.

    Models that are loaded to run on a CPU hold no plain weights: :func:`pack` gives them kernels of our own.

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
