"""What a Linear and an embedding need of a weight, however it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quantkit.ops.dispatch import Phase


class LinearWeight(Protocol):
    """A weight ``[out, in]``.

    :class:`~quantkit.ops.stored_weight.PlainWeight` and :class:`~quantkit.ops.stored_weight.QuantizedWeight`
    are as a checkpoint stores them. :class:`~quantkit.ops.cpu_weight.CpuWeight` is packed for our CPU
    kernels, and :class:`~quantkit.ops.linear_weight.DeviceWeight` stands for one that a GPU program holds.
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


@dataclass(frozen=True)
class DeviceWeight:
    """The weight's kernel, its shape ``(out, in)`` and its bytes on the device; only the program multiplies
    by it."""

    name: str
    shape: tuple[int, int]
    nbytes: int = 0

    def kernel_name(self, dtype: torch.dtype, device: torch.device, phase: Phase) -> str:
        """See :class:`~quantkit.ops.linear_weight.LinearWeight`: one kernel serves both phases."""
        return self.name

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Raises RuntimeError: the weight belongs to the GPU program."""
        raise RuntimeError("a GPU program holds this weight; call the model, not its Linear")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError, as :meth:`multiply` does."""
        raise RuntimeError("a GPU program holds this embedding; call the model instead")


def embed(ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """int64 ``[...]`` → ``[..., size]`` in ``dtype``: of a quantized table ``[vocab, size]`` only these rows
    are decoded.

    Raises:
        IndexError: an id isn't in the table.
    """
    flat = ids.reshape(-1)
    if not len(flat):
        return torch.empty(*ids.shape, table.shape[1], dtype=dtype, device=ids.device)
    # a GPU isn't waited for
    if ids.device.type == "cpu" and not 0 <= int(flat.min()) <= int(flat.max()) < table.shape[0]:
        raise IndexError(f"a token id isn't in 0 … {table.shape[0] - 1}")
    return table.rows(flat).to(dtype).reshape(*ids.shape, table.shape[1])
