"""What a Linear and an embedding need of a weight, however it is stored."""

from __future__ import annotations

from typing import Protocol

import torch

from quantkit.ops.dispatch import Phase


class LinearWeight(Protocol):
    """A weight ``[out, in]``.

    :class:`~quantkit.ops.stored_weight.PlainWeight` and :class:`~quantkit.ops.stored_weight.QuantizedWeight`
    are as a checkpoint stores them. :class:`~quantkit.ops.cpu_weight.CpuWeight` is packed for our CPU
    kernels, and :class:`~quantkit.ops.device_weight.DeviceWeight` stands for one that a GPU program holds.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def kernel_name(self, dtype: torch.dtype, device: torch.device, phase: Phase) -> str:
        """The name of the kernel with which :meth:`multiply` takes activations of ``dtype`` on ``device``."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., in]`` → ``x Wᵀ + bias``, ``[..., out]`` in x's dtype."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows ``ids``, int64 ``[m]`` → ``[m, in]``: an embedding's vectors. No other row is decoded."""
