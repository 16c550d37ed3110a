"""The two forms of a quantized weight, ``Codes`` and ``QuantizedTensor``, and the formats that convert them.

``Codes`` is what a method decides: a level for every weight, a scale for every group. It knows no
layout. ``QuantizedTensor`` is what a format stores: named tensors, packed. Keeping them apart is
what lets every method write every format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from quantkit.spec import QuantSpec


@dataclass(frozen=True)
class Codes:
    """A quantized weight before packing.

    Attributes:
        spec: what it is; ``scale_dtype`` is never ``"model"`` here.
        codes: uint8 ``[out, in]``, levels in ``[0, 2 ** bits - 1]``; for ``fp`` the bit patterns, none of
            them NaN's.
        scale: float32 ``spec.scale_shape([out, in])``, already rounded to ``spec.scale_dtype``.
        zero: uint8, shape of ``scale``: the level that means 0. ``None`` when symmetric
            (``2 ** (bits - 1)``) and for ``nf`` and ``fp``.
        notes: every fallback taken, one sentence each, for the manifest.

    ``int``: ``w = (codes - zero) * scale``. ``nf``: ``w = codebook[codes] * scale``.
    ``fp``: ``w = e4m3(codes) * scale``.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    notes: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Codes:
        """The same on another device."""
        return Codes(self.spec, self.codes.to(device), self.scale.to(device),
                     None if self.zero is None else self.zero.to(device), self.notes)


@dataclass(frozen=True)
class QuantizedTensor:
    """A packed weight.

    Attributes:
        format: name of its format.
        spec: what it is.
        shape: logical ``(out, in)``.
        dtype: logical dtype, that of the model.
        tensors: stored tensors by the suffix they have on disk (``weight_packed``); the full name
            is ``f"{layer}.{suffix}"``.
    """

    format: str
    spec: QuantSpec
    shape: tuple[int, int]
    dtype: torch.dtype
    tensors: Mapping[str, torch.Tensor]
    cache: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same on another device, with nothing prepared."""
        return QuantizedTensor(self.format, self.spec, self.shape, self.dtype,
                               {suffix: t.to(device) for suffix, t in self.tensors.items()})


@runtime_checkable
class Format(Protocol):
    """A layout. Implementations are stateless; a registered target is an instance.

    Attributes:
        name: what the manifest calls it.
        quant_method: the Hugging Face ``quant_method`` that can say it (``compressed-tensors``,
            ``bitsandbytes``), or ``quantkit`` when none can.

    A format may have three attributes more:

    - ``rows(packed, ids)``: int64 ``[n]`` → float32 ``[n, in]``, what :meth:`dequantize` gives for these
      rows, decoding no others; without it an embedding can't have this format.
    - ``scales``: the dtype that it keeps scales in, ``"float16"``, whatever the model's is; methods then
      round to it, unless a recipe says ``scale_dtype``.
    - ``alone``: true if the standard that says it has place for one spec only: all quantized layers of a
      checkpoint are then of this format and of one spec.
    """

    name: str
    quant_method: str

    def refuses(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Why this layout can't hold such a weight, with the remedy; ``None`` if it can."""

    def layout(self, spec: QuantSpec, shape: tuple[int, int],
               dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Stored tensors by suffix: dtype and shape. Exact, so that a plan's bytes are."""

    def pack(self, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
        """Codes → stored tensors; ``dtype`` is the model's."""

    def unpack(self, packed: QuantizedTensor) -> Codes:
        """The inverse of :meth:`pack`."""

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """The weight ``[out, in]`` in float32, in memory of its own: the reference that every kernel is
        tested against."""
