"""The two forms of a quantized weight, ``Codes`` and ``QuantizedTensor``, and the formats that convert them.

``Codes`` is what a method decides: a level for every weight, a scale for every group. It knows no
layout. ``QuantizedTensor`` is what a format stores: named tensors, packed. Keeping them apart is
what lets every method write every format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch

from quantkit.formats import e4m3
from quantkit.formats.dtypes import plain_name
from quantkit.formats.spec import QuantSpec

TENSORS = ("codes", "scale", "zero", "minimum", "outer", "outer_minimum", "input_factor")
"""Of :class:`Codes`."""


@dataclass(frozen=True)
class Codes:
    """A quantized weight before packing.

    Attributes:
        spec: says how it is quantized; ``scale_dtype`` is never ``"model"`` here.
        codes: uint8 ``[out, in]``, levels in ``[0, 2 ** bits - 1]``; for ``fp`` the bit patterns, none of
            them NaN's.
        scale: float32 ``spec.scale_shape([out, in])``, already rounded to what the spec says.
        zero: uint8, shape of ``scale``: the level that means 0. ``None`` when symmetric
            (``2 ** (bits - 1)``), with minima, and for other kinds than ``int``.
        notes: every fallback taken, one sentence each, for the manifest.
        minimum: float32, shape of ``scale``, rounded likewise, if the spec has minima.
        outer: float32 ``spec.outer_shape([out, in])``: what scales are multiples of, if there is such a
            thing: a superblock's number, or the tensor's beside ``e4m3`` scales.
        outer_minimum: float32, shape of ``outer``: the same of minima, which are its negative multiples.
        input_factor: float32 ``[1, 1]``: what the scales of groups of a token are multiplied by before they
            are rounded to e4m3, if the spec has ``static_inputs``. It isn't the method's to choose.

    ``int``: ``w = (codes - zero) * scale``, or ``codes * scale + minimum``. ``nf``: ``w = codebook[codes] *
    scale``, ``iq`` likewise. ``fp``: ``w = float(codes) * scale``.
    """

    spec: QuantSpec
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
    minimum: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    outer_minimum: torch.Tensor | None = None
    input_factor: torch.Tensor | None = None

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """The same with every tensor changed, such as moved to another device."""
        def changed(name: str) -> torch.Tensor | None:
            tensor: torch.Tensor | None = getattr(self, name)
            return None if tensor is None else change(tensor)

        return replace(self, codes=change(self.codes), scale=change(self.scale), zero=changed("zero"),
                       minimum=changed("minimum"), outer=changed("outer"),
                       outer_minimum=changed("outer_minimum"), input_factor=changed("input_factor"))

    def to(self, device: torch.device) -> Codes:
        return self.mapped(lambda tensor: tensor.to(device))

    def fault(self, shape: tuple[int, int]) -> str | None:
        """What is wrong with the codes of a weight of this shape: a tensor's type, dtype, shape or values;
        ``None`` if nothing."""
        spec, scales, outer = self.spec, self.spec.scale_shape(shape), self.spec.outer_shape(shape)
        has_zeros = spec.kind == "int" and not spec.symmetric and not spec.minimum
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
            "codes": (torch.uint8, shape),
            "scale": (torch.float32, scales),
            "zero": (torch.uint8, scales) if has_zeros else None,
            "minimum": (torch.float32, scales) if spec.minimum else None,
            "outer": (torch.float32, outer) if outer else None,
            "outer_minimum": (torch.float32, outer) if outer and spec.minimum else None,
        }
        for name, about in wanted.items():
            tensor = getattr(self, name)
            if about is None:
                if tensor is not None:
                    return f"there is a tensor {name}, which {spec.label()} doesn't have"
            elif tensor is None:
                return f"there is no {name}, which {spec.label()} has"
            elif not isinstance(tensor, torch.Tensor):
                return f"{name} is a {type(tensor).__name__}, not a tensor"
            elif (tensor.dtype, tuple(tensor.shape)) != (about[0], tuple(about[1])):
                return (f"{name} is {plain_name(tensor.dtype)} {list(tensor.shape)}, not "
                        f"{plain_name(about[0])} {list(about[1])}")
            elif about[0].is_floating_point and not bool(torch.isfinite(tensor).all()):
                return f"a {name} is not finite"
        return self._reason_against_values()

    def _reason_against_values(self) -> str | None:
        if self.spec.grid == "fp4":
            for name in ("scale", "outer", "input_factor"):
                values = getattr(self, name)
                if values is not None and bool((values < 0 if name == "scale" else values <= 0).any()):
                    return f"a value of {name} is not positive"
        for kind, levels in (("code", self.codes), ("zero point", self.zero)):
            if levels is not None and levels.numel() and int(levels.max()) >= 2**self.spec.bits:
                return f"a {kind} is above {2**self.spec.bits - 1}"
        if self.spec.kind == "fp" and self.spec.bits == 8 and e4m3.has_nan(self.codes):
            return "a code is NaN"
        return None

    @classmethod
    def joined(cls, parts: Sequence[Codes], notes: tuple[str, ...] = ()) -> Codes:
        """Parts of a weight's rows, one below the other; what belongs to the tensor is the first one's."""
        first, shape = parts[0], parts[0].codes.shape

        def below(name: str) -> torch.Tensor | None:
            tensors = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            shared = not tensors or len(parts) == 1 or name == "input_factor" or (
                name != "codes" and first.spec.granularity.strategy == "tensor") or (
                name.startswith("outer") and first.spec.outer_shape((shape[0], shape[1])) == (1, 1))
            return (tensors[0] if tensors else None) if shared else torch.cat(tensors)

        tensors: dict[str, Any] = {name: below(name) for name in TENSORS}
        return cls(first.spec, notes=notes, **tensors)


@dataclass(frozen=True)
class QuantizedTensor:
    """A packed weight.

    Attributes:
        format: name of its format.
        spec: says how it is quantized.
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
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same on another device, with nothing prepared."""
        return QuantizedTensor(self.format, self.spec, self.shape, self.dtype,
                               {suffix: t.to(device) for suffix, t in self.tensors.items()})


@runtime_checkable
class Format(Protocol):
    """A layout. Implementations are stateless; a registered target is an instance.

    Attributes:
        name: the name in the manifest.
        quant_method: the Hugging Face ``quant_method`` that can say it (``compressed-tensors``,
            ``bitsandbytes``), or ``quantkit`` when none can.

    A format may have four attributes more:

    - ``rows(packed, ids)``: int64 ``[n]`` → float32 ``[n, in]``, what :meth:`dequantize` gives for these
      rows, decoding no others; without it an embedding can't have this format.
    - ``scales``: the dtype that it keeps scales in, ``"float16"``, whatever the model's is; methods then
      round to it, unless a recipe says ``scale_dtype``.
    - ``spec``: the only :class:`~quantkit.formats.spec.QuantSpec` that it can hold: a recipe's rule
      needs none then.
    - ``alone``: true if the standard that says it has place for one spec only: all quantized layers of a
      checkpoint are then of this format and of one spec.
    """

    name: str
    quant_method: str

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
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
