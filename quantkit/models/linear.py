"""The Linear slot: the one place where a model meets a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.device_weight import DeviceWeight
from quantkit.ops.embedding import Table
from quantkit.ops.linear import linear

Watcher = Callable[..., None]
"""Takes a Linear's inputs or results; and, if they aren't all, which of the step's tokens they are."""


class Linear:
    """``y = x Wᵀ + b``. ``name`` is the layer's full name, ``model.layers.0.self_attn.q_proj``.

    ``observer``, when set, sees every input ``[..., in]`` before it is multiplied, ``on_output`` every
    result ``[..., out]``; calibration is their only user. An expert's are also told which of the step's
    tokens it was given, int64 ``[n]``.
    """

    __slots__ = ("bias", "name", "observer", "on_output", "weight")

    def __init__(self, name: str, weight: torch.Tensor | QuantizedTensor | CpuWeight | DeviceWeight,
                 bias: torch.Tensor | None = None) -> None:
        self.name, self.weight, self.bias = name, weight, bias
        self.observer: Watcher | None = None
        self.on_output: Watcher | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return (int(self.weight.shape[0]), int(self.weight.shape[1]))

    def __call__(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        if self.observer is not None:
            self.observer(x) if rows is None else self.observer(x, rows)
        assert not isinstance(self.weight, DeviceWeight), "a program has this weight"
        y = linear(x, self.weight, self.bias)
        if self.on_output is not None:
            self.on_output(y) if rows is None else self.on_output(y, rows)
        return y


class Weights:
    """Where a model's layers get their tensors, one at a time.

    Args:
        tensor: name → tensor; raises for an unknown name.
        dtype: every plain tensor is converted to it.
        quantized: layer name → its packed weight, or ``None`` if that layer isn't quantized.
        has: whether a tensor exists.
        device: where tensors are put.
        pack: makes of a weight that is multiplied by what is kept of it.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor], has: Callable[[str], bool],
                 dtype: torch.dtype, quantized: Callable[[str], QuantizedTensor | None] = lambda n: None,
                 device: torch.device | str = "cpu",
                 pack: Callable[[torch.Tensor | QuantizedTensor], CpuWeight | QuantizedTensor] | None = None,
                 ) -> None:
        self._tensor, self.has, self._quantized, self._pack = tensor, has, quantized, pack
        self.dtype, self.device = dtype, torch.device(device)

    def with_changed(self, changed: Mapping[str, torch.Tensor]) -> Weights:
        """The same, some tensors in place of its own."""
        return Weights(lambda name: changed[name] if name in changed else self._tensor(name), self.has,
                       self.dtype, self._quantized, self.device, self._pack)

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor in the model's dtype."""
        return self._tensor(name).to(device=self.device, dtype=self.dtype)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 ``[n]``) of a plain tensor, in the model's dtype: an embedding is large."""
        return self._tensor(name)[ids].to(device=self.device, dtype=self.dtype)

    def table(self, name: str, tied: bool = False) -> Table:
        """The embedding ``name``: ``name.weight``, or packed if it is quantized or ``tied`` to the head."""
        found = self._quantized(name)
        weight = self.tensor(f"{name}.weight") if found is None else found
        return weight if self._pack is None or (found is None and not tied) else self._pack(weight)

    def linear(self, name: str, bias: bool = False) -> Linear:
        """The layer ``name`` with ``name.weight`` (packed if it is quantized) and ``name.bias``."""
        found = self._quantized(name)
        weight = self.tensor(f"{name}.weight") if found is None else found
        return Linear(name, weight if self._pack is None else self._pack(weight),
                      self.tensor(f"{name}.bias") if bias else None)
