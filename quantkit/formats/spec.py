"""What a quantized tensor is, in numbers: frozen, strict and free of torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from quantkit.support.frozen import Frozen

Kind = Literal["int", "nf", "fp", "iq", "trellis"]
ScaleDtype = Literal["model", "bfloat16", "float16", "float32", "e4m3", "e8m0"]
GRIDS = ("int", "int minima", "int superblocks", "nf", "iq", "fp", "fp tiles", "fp4", "trellis")
"""What kinds of grid there are; see :attr:`QuantSpec.grid`."""
GROUP_SCALES = ("e4m3", "e8m0")
"""Dtypes of the scales of 4-bit floating-point groups: NVFP4's and MXFP4's."""

LEFT_OUT = ("activations", "rotation", "window", "signed", "minimum", "superblock", "scale_bits")
"""Fields that aren't written where they aren't used."""


class Granularity(Frozen):
    """Which weights share one scale.

    For a weight of shape ``[out, in]``:

    - ``tensor``: one scale, shape ``[1, 1]``
    - ``channel``: one a row, ``[out, 1]``
    - ``group``: one for every ``size`` weights along ``in``, ``[out, in / size]``
    - ``block``: one for every ``size`` weights of the row-major flattened tensor (a block may
      cross rows), ``[ceil(out * in / size)]``: bitsandbytes' layout
    - ``tile``: one for every square of ``size`` by ``size`` weights, ``[ceil(out / size), ceil(in / size)]``:
      DeepSeek's layout
    """

    strategy: Literal["tensor", "channel", "group", "block", "tile"]
    size: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _size_belongs(self) -> Granularity:
        if (self.strategy in ("group", "block", "tile")) != (self.size is not None):
            raise ValueError(f"strategy {self.strategy!r} "
                             + ("needs a size" if self.size is None else "takes no size"))
        return self

    def __str__(self) -> str:
        return {"group": f"g{self.size}", "block": f"b{self.size}",
                "tile": f"t{self.size}"}.get(self.strategy, self.strategy)


class QuantSpec(Frozen):
    """How one weight is represented.

    Attributes:
        kind: ``int`` (uniform levels), ``nf`` (the NormalFloat codebook), ``fp`` (floating point of 8 bits,
            OCP's e4m3fn: https://arxiv.org/abs/2209.05433, or of 4 bits, e2m1:
            https://arxiv.org/abs/2310.10537), ``iq`` (the 16 levels of llama.cpp's IQ4_NL) or ``trellis`` (a
            code in which neighbors decide too).
        bits: bits a code.
        symmetric: no zero point; the level ``2 ** (bits - 1)`` means 0.
        granularity: says which weights share a scale.
        scale_dtype: the dtype in which scales are stored and rounded; ``model`` follows the weight's dtype.
            ``e4m3`` are
            floating-point numbers of 8 bits times a float32 of the tensor's, ``e8m0`` powers of 2.
        nested: scales are themselves quantized to 8 bits (``nf`` only).
        signed: scales may be negative, so that the level that is farther from 0 than all others lies on the
            side where a group needs it (``int``, symmetric, in groups).
        minimum: groups have a minimum that isn't a whole number of steps in place of a zero point (``int``,
            asymmetric, in groups only): ``w = code * scale + minimum``.
        superblock: weights along *in* whose groups' scales (and minima) are whole numbers times one number
            of the superblock, which is stored in ``scale_dtype``.
        scale_bits: bits of those whole numbers: unsigned ones with minima, signed ones without.
        rotation: ``hadamard``: the columns are rotated (:mod:`quantkit.ops.hadamard`), and inputs must be.
        window: bits that decide a weight (``trellis`` only): 8, whose values are a learned table, or 10 to
            16, whose values are computed: the wider, the better, and twice the work to quantize for each.
        activations: inputs of the product are rounded too, as they come, to the same kind and
            bits and without zero points. ``token``: with one scale a token. ``group``: with a scale for as
            many values of a token as share one in the weight. ``None``: it isn't.
    """

    kind: Kind = "int"
    bits: int = Field(ge=2, le=8)
    symmetric: bool = True
    granularity: Granularity
    scale_dtype: ScaleDtype = "model"
    nested: bool = False
    signed: bool = False
    minimum: bool = False
    superblock: int | None = Field(default=None, ge=4)
    scale_bits: int | None = Field(default=None, ge=4, le=8)
    rotation: Literal["hadamard"] | None = None
    window: Literal[8, 10, 11, 12, 13, 14, 15, 16] | None = None
    activations: Literal["token", "group"] | None = None

    @property
    def in_bytes(self) -> QuantSpec:
        """Integers of 5 to 7 bits in 8 symmetric ones, which hold the same levels; any other spec as it is.
        Some engines and layouts have 4 and 8 bits alone."""
        between = self.kind == "int" and not (self.superblock or self.minimum) and 4 < self.bits < 8
        return self.model_copy(update={"bits": 8, "symmetric": True}) if between else self

    @property
    def centered(self) -> QuantSpec:
        """Integers with zero points as symmetric ones of a bit more, which hold the same levels; any other
        spec as it is."""
        off = self.kind == "int" and not (self.symmetric or self.minimum or self.superblock) and self.bits < 8
        return self.model_copy(update={"bits": self.bits + 1, "symmetric": True}) if off else self

    @model_validator(mode="after")
    def _coherent(self) -> QuantSpec:
        strategy, size = self.granularity.strategy, self.granularity.size or 0
        if self.kind == "nf" and (self.bits != 4 or strategy != "block"):
            raise ValueError("kind 'nf' means 4 bits in blocks")
        if self.kind == "int" and strategy in ("block", "tile"):
            raise ValueError("kind 'int' takes tensor, channel or group granularity")
        if self.kind == "iq" and not (self.bits == 4 and self.symmetric and strategy == "group"):
            raise ValueError("kind 'iq' means 4 bits, symmetric, in groups")
        if self.kind == "trellis" and (strategy != "channel" or self.bits > 4 or not self.symmetric):
            raise ValueError("kind 'trellis' means 2 to 4 bits, symmetric, a scale a channel")
        if (self.kind == "trellis") != (self.window is not None):
            raise ValueError(f"kind 'trellis' {'needs' if self.window is None else 'alone has'} a window")
        if self.nested and self.kind != "nf":
            raise ValueError("nested scales exist for kind 'nf' only")
        self._coherent_floats(strategy)
        if self.signed and (self.kind != "int" or not self.symmetric or strategy != "group"):
            raise ValueError("signed scales exist for kind 'int', symmetric, in groups")
        if self.minimum and (self.kind != "int" or self.symmetric or strategy != "group"):
            raise ValueError("minima exist for kind 'int', asymmetric, in groups")
        if (self.superblock is None) != (self.scale_bits is None):
            raise ValueError("superblock and scale_bits go together")
        if self.superblock is not None and (
                self.kind != "int" or strategy != "group" or self.superblock % size
                or self.symmetric == self.minimum):
            raise ValueError("superblocks are of whole groups of kind 'int', symmetric or with minima")
        self._coherent_activations(strategy)
        return self

    def _coherent_floats(self, strategy: str) -> None:
        grouped = self.scale_dtype in GROUP_SCALES
        if self.kind == "fp" and self.bits == 4:
            if not (self.symmetric and strategy == "group" and grouped):
                raise ValueError("kind 'fp' of 4 bits is symmetric, in groups, with e4m3 or e8m0 scales")
        elif self.kind == "fp" and not (self.bits == 8 and self.symmetric
                                        and strategy in ("tensor", "channel", "tile")):
            raise ValueError("kind 'fp' means 8 bits, symmetric, with tensor, channel or tile "
                             "granularity, or 4 bits in groups")
        elif grouped:
            raise ValueError(f"{self.scale_dtype} scales are for kind 'fp' of 4 bits")

    def _coherent_activations(self, strategy: str) -> None:
        eight = self.kind in ("int", "fp") and self.bits == 8 and self.symmetric
        if self.activations == "token" and not (eight and strategy in ("tensor", "channel")):
            raise ValueError("quantized activations go with weights of kind 'int' or 'fp', 8 bits, "
                             "symmetric, with tensor or channel granularity")
        if self.activations == "group" and not (self.kind == "fp" and strategy in ("group", "tile")):
            raise ValueError("activations with a scale a group go with weights of kind 'fp' in groups "
                             "or tiles")
        if self.static_inputs and self.rotation:
            raise ValueError("activations with e4m3 scales are measured as they come, not rotated")

    @model_serializer(mode="wrap")
    def _brief(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The spec without what it doesn't use of :data:`LEFT_OUT`."""
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items()
                if name not in LEFT_OUT or value not in (None, False)}

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the scales of a weight ``[out, in]``."""
        rows, cols = shape
        size = self.granularity.size or 1
        return {"tensor": (1, 1), "channel": (rows, 1), "group": (rows, cols // size),
                "block": (-(-rows * cols // size),),
                "tile": (-(-rows // size), -(-cols // size))}[self.granularity.strategy]

    @property
    def grid(self) -> str:
        """Which of :data:`GRIDS` weights are rounded to: in these words methods say what they can produce."""
        if self.kind == "int":
            return "int superblocks" if self.superblock else "int minima" if self.minimum else "int"
        if self.kind == "fp" and self.bits == 4:
            return "fp4"
        return "fp tiles" if self.granularity.strategy == "tile" else self.kind

    @property
    def static_inputs(self) -> bool:
        """Whether a number of the layer's inputs is measured and stored: what the e4m3 scales of their groups
        are multiples of."""
        return self.activations == "group" and self.scale_dtype == "e4m3"

    def outer_shape(self, shape: tuple[int, int]) -> tuple[int, int] | None:
        """Shape of what scales are multiples of, for a weight ``[out, in]``; ``None``: of nothing."""
        if self.superblock is not None:
            return shape[0], shape[1] // self.superblock
        return (1, 1) if self.scale_dtype == "e4m3" else None

    def label(self) -> str:
        """A short name such as ``int4 g64 sym``, ``nf4 b64 nested``, ``fp8 channel a8`` (activations too),
        ``int4 g32 min s6`` (minima, and 6 bits for a scale) or ``trellis3 channel w8 rot``."""
        tail = {"nf": "nested" if self.nested else "", "iq": "", "trellis": f"w{self.window}",
                "fp": self.scale_dtype if self.scale_dtype in GROUP_SCALES else "",
                "int": "sym" if self.symmetric else "min" if self.minimum else "asym"}[self.kind]
        parts = (f"{self.kind}{self.bits}", str(self.granularity), tail,
                 f"s{self.scale_bits}" if self.scale_bits else "", "rot" if self.rotation else "",
                 f"a{self.bits}" if self.activations else "")
        return " ".join(filter(None, parts))
