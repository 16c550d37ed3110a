"""The Linear slot: the one place where a model meets a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight, StoredWeight

Watcher = Callable[..., None]
"""Takes a Linear's inputs or results; and, if they aren't all, which of the step's tokens they are."""


class Linear:
    """``y = x Wᵀ + b``. ``name`` is the layer's full name, ``model.layers.0.self_attn.q_proj``.

    ``observer``, when set, sees every input ``[..., in]`` before it is multiplied, ``on_output`` every
    result ``[..., out]``; calibration is their only user. An expert's are also told which of the step's
    tokens it was given, int64 ``[n]``.
    """

    __slots__ = ("bias", "name", "observer", "on_output", "weight")

    def __init__(self, name: str, weight: LinearWeight, bias: torch.Tensor | None = None) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.observer: Watcher | None = None
        self.on_output: Watcher | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def __call__(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        if self.observer is not None:
            self.observer(x) if rows is None else self.observer(x, rows)
        y = self.weight.multiply(x, self.bias)
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
        device: the device on which tensors are put.
        pack: turns a stored weight into the one that a Linear keeps; without it they are the same.
        ready: weights by name that are such already: nothing is read of these.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor], has: Callable[[str], bool],
                 dtype: torch.dtype, quantized: Callable[[str], QuantizedTensor | None] = lambda n: None,
                 device: torch.device | str = "cpu",
                 pack: Callable[[StoredWeight], LinearWeight] | None = None,
                 ready: Mapping[str, LinearWeight] = MappingProxyType({})) -> None:
        self._tensor = tensor
        self.has = has
        self._quantized = quantized
        self._pack = pack
        self._ready = ready
        self.dtype, self.device = dtype, torch.device(device)

    def with_changed(self, changed: Mapping[str, torch.Tensor]) -> Weights:
        """The same, some tensors in place of its own."""
        return Weights(lambda name: changed[name] if name in changed else self._tensor(name), self.has,
                       self.dtype, self._quantized, self.device, self._pack, self._ready)

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor in the model's dtype."""
        return self._tensor(name).to(device=self.device, dtype=self.dtype)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 ``[n]``) of a plain tensor, in the model's dtype: an embedding is large."""
        return self._tensor(name)[ids].to(device=self.device, dtype=self.dtype)

    def table(self, name: str, tied: bool = False) -> LinearWeight:
        """The embedding ``name``: ``name.weight``, or packed if it is quantized or ``tied`` to the head."""
        if (ready := self._ready.get(name)) is not None:
            return ready
        weight = self._stored(name)
        return weight if weight.spec is None and not tied else self.kept(weight)

    def linear(self, name: str, bias: bool = False) -> Linear:
        """The layer ``name`` with ``name.weight`` (packed if it is quantized) and ``name.bias``."""
        weight = self._ready.get(name)
        if weight is None:
            weight = self.kept(self._stored(name))
        return Linear(name, weight, self.tensor(f"{name}.bias") if bias else None)

    def kept(self, weight: StoredWeight) -> LinearWeight:
        """A stored weight as a Linear keeps it."""
        return weight if self._pack is None else self._pack(weight)

    def _stored(self, name: str) -> StoredWeight:
        quantized = self._quantized(name)
        return PlainWeight(self.tensor(f"{name}.weight")) if quantized is None else QuantizedWeight(quantized)
