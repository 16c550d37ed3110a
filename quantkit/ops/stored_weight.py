"""Weights as a checkpoint stores them: plain or quantized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.spec import QuantSpec
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuWeight, pack_plain
from quantkit.ops.dispatch import DECODE_ROWS, LinearKernel, Phase, choose
from quantkit.ops.hadamard import apply_hadamard
from quantkit.ops.kernel_contract import prepare
from quantkit.ops.linear import dense, query_for
from quantkit.ops.linear_weight import LinearWeight


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
