"""Whether a kernel's product is right: checked once for a stranger's kernel when it prepares a weight.

The rule is that of our own kernels: at most twice the error of the same product by torch in the activations'
dtype, both against float64. Nothing is required below one rounding of the weights and of the result, nor
below one float32 rounding of its terms, where only the order of summation makes a difference. For weights of
at most 4 bits activations may be rounded to int8 with a scale for each 32: that costs far less than such
weights do.
"""

from __future__ import annotations

from typing import Any

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import plain_name
from quantkit.ops.dispatch import DECODE_ROWS, LinearKernel, Phase
from quantkit.ops.tokens import quantize_tokens, round_groups
from quantkit.plugins.manager import describe_entry, is_builtin, registry
from quantkit.plugins.registry import described
from quantkit.support.errors import PluginError, QuantkitError

TIMES = 2.0
"""Times torch's error, at most."""
_BLOCK = 1 << 22
"""Weights in float64 at a time."""
_PROBED: set[tuple[object, ...]] = set()


def prepare(kernel: LinearKernel, weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
            phase: Phase) -> Any:
    """:meth:`~quantkit.ops.dispatch.LinearKernel.prepare`. A stranger's kernel multiplies a few rows besides,
    once for each format, spec, dtype and phase.

    Raises:
        PluginError: the product is wrong, or the kernel raised something. One of our own errors and an
            exhausted memory are raised as they are.
    """
    if is_builtin("kernels", kernel.name) and registry("kernels").get(kernel.name) is kernel:
        return kernel.prepare(weight)
    try:
        prepared = kernel.prepare(weight)
        key = (id(kernel), weight.format, weight.spec, dtype, device.type, phase)
        if key not in _PROBED:
            x = probe(weight.shape[1], 3 if phase == "decode" else DECODE_ROWS + 1, dtype, device)
            given = x.clone()
            y = kernel.run(x, prepared)
            fault = "run wrote to its input" if not torch.equal(x, given) else product_fault(x, y, weight)
            if fault is not None:
                raise PluginError(f"{describe_entry('kernels', kernel.name)}: {fault}",
                                  why=f"it was asked for {weight.format} {weight.spec.label()} "
                                      f"{list(weight.shape)} by {plain_name(dtype)}",
                                  next="correct the kernel: quantkit.ops.dispatch says what it promises")
            _PROBED.add(key)
    except (QuantkitError, MemoryError, torch.OutOfMemoryError):  # the kernel isn't what to mend
        raise
    except Exception as error:  # a stranger's kernel may raise anything
        raise PluginError(f"{describe_entry('kernels', kernel.name)} raises {described(error)}",
                          why=f"it took {weight.format} {weight.spec.label()} {list(weight.shape)}",
                          next="decline what it can't run") from error
    return prepared


def probe(columns: int, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Activations ``[rows, columns]`` to multiply with."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def product_fault(x: torch.Tensor, y: object, weight: QuantizedTensor) -> str | None:
    """What is wrong with ``y``, a kernel's product of ``x [m, k]``; ``None`` if nothing."""
    shape = (x.shape[0], weight.shape[0])
    if not isinstance(y, torch.Tensor):
        return f"run returned a {type(y).__name__}, not a tensor"
    if y.dtype != x.dtype or tuple(y.shape) != shape:
        return f"run returned {plain_name(y.dtype)} {list(y.shape)}, not {plain_name(x.dtype)} {list(shape)}"
    if not bool(torch.isfinite(y).all()):
        return "run returned a value that is not finite"
    error, limit = errors(x, y, weight)
    if error > limit:
        return f"its product has an error of {error:.3g}, where {limit:.3g} is the most that is right"
    return None


def errors(x: torch.Tensor, y: torch.Tensor, weight: QuantizedTensor) -> tuple[float, float]:
    """The error of a product ``y`` of ``x [m, k]`` against float64, and the largest that is right."""
    form = registry("formats").get(weight.format)
    plain: torch.Tensor = form.dequantize(weight)
    wide = x.double()
    if weight.spec.activations == "group":
        wide = round_groups(x, weight.spec, form.unpack(weight).input_factor).double()
    elif weight.spec.activations:
        rows, scale = quantize_tokens(x, weight.spec)
        wide = rows.double() * scale.double()
    sums = torch.zeros(6, dtype=torch.float64)
    coarse = _int8(wide) if weight.spec.bits <= 4 else wide
    one_rounding = 0.22 * torch.finfo(x.dtype).eps  # on average, of a number
    step = max(1, _BLOCK // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        part = plain[first:first + step]
        exact = wide @ part.double().T
        results = (y[:, first:first + step], wide.to(x.dtype) @ part.to(x.dtype).T, exact.to(x.dtype))
        differences = [(result.double() - exact).square().sum() for result in results]
        terms = 2.0**-24 * (wide.abs() @ part.double().abs().T)
        of_weights = one_rounding**2 * (wide.square() @ part.double().square().T)
        of_inputs = (coarse - wide) @ part.double().T
        sums += torch.stack([*differences, terms.square().sum(), of_weights.sum(),
                             of_inputs.square().sum()]).cpu()
    error, *allowed = sums.sqrt().tolist()
    luck = 1 + 2 / y.numel() ** 0.5  # the errors of few numbers aren't their average
    return error, TIMES * luck * max(allowed)


def _int8(x: torch.Tensor) -> torch.Tensor:
    """``x [m, k]`` float64, rounded to 255 levels with a scale for each 32."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, :x.shape[1]]
