"""``y = x Wᵀ + b`` for a plain or a quantized weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.dispatch import DECODE_ROWS, Choice, KernelQuery, Phase, choose


def query_for(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
              phase: Phase) -> KernelQuery:
    """The query that :func:`linear` will ask for this weight."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KernelQuery("linear", device.type, capability, dtype, weight.shape[0], weight.shape[1],
                       weight.format, weight.spec, phase)


def linear(x: torch.Tensor, weight: torch.Tensor | QuantizedTensor,
           bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply ``x [..., in]`` by a weight ``[out, in]``; returns ``[..., out]`` in x's dtype."""
    if isinstance(weight, torch.Tensor):
        return dense(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    phase: Phase = "decode" if rows.shape[0] <= DECODE_ROWS else "prefill"
    kernel, prepared = _prepared(weight, x, phase)
    y = kernel.run(rows, prepared)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _prepared(weight: QuantizedTensor, x: torch.Tensor, phase: Phase):  # type: ignore[no-untyped-def]
    key = f"{phase}/{x.dtype}/{x.device}"
    if (hit := weight.cache.get(key)) is None:
        choice: Choice = choose(query_for(weight, x.dtype, x.device, phase))
        state = f"state/{choice.kernel.name}/{x.device}"
        if state not in weight.cache:
            weight.cache[state] = choice.kernel.prepare(weight)
        hit = weight.cache[key] = (choice.kernel, weight.cache[state])
    return hit


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A plain multiply. On a CPU without bf16 instructions many rows are multiplied in float32:
    torch's bf16 loop there is nine times slower, and the float32 result is the more exact one."""
    rows = x.numel() // x.shape[-1]
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and rows > 2 and not native_bf16():
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
