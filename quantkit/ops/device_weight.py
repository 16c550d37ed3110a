"""What a Linear keeps of a weight that a GPU program holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.ops.dispatch import Phase


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
