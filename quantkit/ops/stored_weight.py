"""Weights as a checkpoint stores them: plain or quantized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import plain_name
from quantkit.formats.spec import QuantSpec
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuWeight, pack_plain
from quantkit.ops.dispatch import DECODE_ROWS, LinearKernel, Phase, choose, query_for
from quantkit.ops.hadamard import apply_hadamard
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.reference import dense
from quantkit.ops.tokens import quantize_tokens, round_groups
from quantkit.plugins.manager import describe_entry, is_builtin, registry
from quantkit.plugins.registry import described
from quantkit.support.errors import PluginError, QuantkitError


class StoredWeight(LinearWeight, ABC):
    """A weight that a runtime can move or pack.

    Attributes:
        spec: how it is quantized; ``None``: it is plain.
    """

    spec: QuantSpec | None = None

    @abstractmethod
    def to(self, device: torch.device) -> StoredWeight:
        """The same weight on another device."""

    @abstractmethod
    def packed(self, dtype: torch.dtype, read: Callable[[], None] = lambda: None) -> LinearWeight:
        """The weight as our CPU kernels multiply activations of ``dtype`` by it.

        Args:
            dtype: the dtype of activations, one of ``cpu_weight.PLAIN``.
            read: called now and then, when a part of a plain weight has been read.

        Returns:
            The packed weight; a quantized one that none of our CPU kernels takes is returned as it is, and
            every product dequantizes it.
        """


class PlainWeight(StoredWeight):
    """A tensor ``[out, in]`` in the model's dtype; torch multiplies by it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, int]:
        return cast(tuple[int, int], tuple(self.tensor.shape))

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def kernel_name(self, dtype: torch.dtype, device: torch.device, phase: Phase) -> str:
        return "torch"

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return dense(x, self.tensor, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.tensor)

    def to(self, device: torch.device) -> PlainWeight:
        return PlainWeight(self.tensor.to(device))

    def packed(self, dtype: torch.dtype, read: Callable[[], None] = lambda: None) -> CpuWeight:
        return pack_plain(self.tensor, read)


class RoundedWeight(PlainWeight):
    """A plain weight in bfloat16 whose products round what is multiplied to bfloat16 too; sums, biases and
    results are in the dtype of what is multiplied. Where a CPU has instructions for such products
    (:func:`~quantkit.ops.reference.native_bf16`) they take a quarter of a float32 product's time."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.to(torch.bfloat16))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = dense(x.to(torch.bfloat16), self.tensor).to(x.dtype)
        return y if bias is None else y.add_(bias)


class QuantizedWeight(StoredWeight):
    """A quantized tensor; the first kernel that accepts it multiplies by it."""

    __slots__ = ("_chosen", "_prepared", "quantized", "spec")

    def __init__(self, quantized: QuantizedTensor) -> None:
        self.quantized, self.spec = quantized, quantized.spec
        self._chosen: dict[Phase, tuple[torch.dtype, torch.device, LinearKernel, Any]] = {}
        self._prepared: dict[tuple[str, torch.device], Any] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return self.quantized.shape

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes

    def kernel_name(self, dtype: torch.dtype, device: torch.device, phase: Phase) -> str:
        return choose(query_for(self.quantized, dtype, device, phase)).kernel.name

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.quantized.spec.rotation:
            rows = apply_hadamard(rows)
        kernel, prepared = self._kernel(x, "decode" if rows.shape[0] <= DECODE_ROWS else "prefill")
        y = kernel.run(rows, prepared)
        if bias is not None:
            y = y + bias
        return y.reshape(*x.shape[:-1], self.shape[0])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        from quantkit.plugins.manager import registry

        return registry("formats").get(self.quantized.format).rows(self.quantized, ids)

    def to(self, device: torch.device) -> QuantizedWeight:
        return QuantizedWeight(self.quantized.to(device))

    def packed(self, dtype: torch.dtype, read: Callable[[], None] = lambda: None) -> LinearWeight:
        cpu = torch.device("cpu")
        kernel = choose(query_for(self.quantized, dtype, cpu, "decode")).kernel
        if not isinstance(kernel, CpuKernel):
            return self
        packed: LinearWeight = prepare(kernel, self.quantized, dtype, cpu, "decode")
        return packed

    def _kernel(self, x: torch.Tensor, phase: Phase) -> tuple[LinearKernel, Any]:
        """The kernel and its state for this weight; chosen once, then found by two comparisons."""
        chosen = self._chosen.get(phase)
        if chosen is None or chosen[0] is not x.dtype or chosen[1] != x.device:
            kernel = choose(query_for(self.quantized, x.dtype, x.device, phase)).kernel
            key = kernel.name, x.device
            if key not in self._prepared:
                self._prepared[key] = prepare(kernel, self.quantized, x.dtype, x.device, phase)
            chosen = self._chosen[phase] = (x.dtype, x.device, kernel, self._prepared[key])
        return chosen[2], chosen[3]


TIMES = 2.0
"""Times torch's error, at most."""
_BLOCK = 1 << 22
"""Weights in float64 at a time."""
_PROBED: set[tuple[object, ...]] = set()


def prepare(kernel: LinearKernel, weight: QuantizedTensor, dtype: torch.dtype, device: torch.device,
            phase: Phase) -> Any:
    """:meth:`~quantkit.ops.dispatch.LinearKernel.prepare`. A stranger's kernel multiplies a few rows besides,
    once for each format, spec, dtype and phase.

    The rule is that of our own kernels: at most twice the error of the same product by torch in the
    activations' dtype, both against float64. Nothing is required below one rounding of the weights and of the
    result, nor below one float32 rounding of its terms, where only the order of summation makes a difference.
    For weights of at most 4 bits activations may be rounded to int8 with a scale for each 32: that costs far
    less than such weights do.

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
            wrote = not torch.equal(x, given)
            fault = "run wrote to its input" if wrote else reason_against_product(x, y, weight)
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


def reason_against_product(x: torch.Tensor, y: object, weight: QuantizedTensor) -> str | None:
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
