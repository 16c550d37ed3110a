"""What a format of weights is to a product: how much a subgroup of it takes, and what unpacks that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I8, I16, Type, Value, vec

SUB = 32
"""Values of a row in a subgroup: what shares one scale of the activations."""
STRIPE = 32
"""The rows of a weight are padded to a multiple of this, and units are multiples of it."""


@dataclass(frozen=True)
class Family:
    """How activations come to a product, and what multiplies them.

    Attributes:
        name: the family's part of a kernel's name.
        width: bytes of an activation, and of an unpacked weight.
        step: values of a row that one multiplication takes.
        direct_rows: rows up to which weights are unpacked for every few of them; for more, unpacking once is
            faster.
        levels: the largest code of an activation; 0: activations are float32 as they were.
        real: activations and unpacked weights are floating-point numbers, and weights lie row after row;
            else they are integers.
        rounded: whether activations are rounded to bfloat16. Where they are float32 afterwards, of each 32
            the odd ones come first, then the even ones.
        by_token: a row of activations has one scale; else each subgroup has a scale and a sum.
        unsigned: unpacked weights and zero points are unsigned, unless the decoder is ``signed``.
    """

    name: str
    width: int
    step: int
    direct_rows: int
    levels: int = 0
    real: bool = False
    rounded: bool = False
    by_token: bool = False
    unsigned: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def sums_rows(self) -> bool:
        """Whether an output is one exact sum of integers over a whole row."""
        return self.by_token and not self.real

    def element(self) -> Type:
        """The type of an activation, and of an unpacked weight; int16 stands for bfloat16."""
        return {1: I8, 2: I16, 4: F32}[self.width]

    def vector(self, lanes: int) -> Type:
        """The unpacked weights of a step, and its activations in every lane."""
        return vec(self.element(), self.step * lanes)

    def dot(self, isa: Isa, signed: bool) -> Callable[[Emitter, Value, Value, Value], Value]:
        """What adds the products of a step of integers to their sum."""
        if self.width == 2:
            return isa.words_dot
        if self.by_token:
            return isa.int8_dot
        return isa.offset_dot if signed else isa.bytes_dot


BYTES = Family("bytes", 1, 4, 16, 127, unsigned=True)
WORDS = Family("words", 2, 2, 8, 8191)
"""A subgroup's 32 products of 8191 · 8191 just fit an int32."""
FLOATS = Family("floats", 4, 1, 16, real=True)
ROUNDED = Family("rounded", 4, 1, 16, real=True, rounded=True)
BF16 = Family("bf16", 2, 1, 16, real=True, rounded=True)
"""The same numbers as ``ROUNDED``, for CPUs that multiply pairs of bfloat16."""
INT8 = Family("int8", 1, 4, 8, 127, by_token=True)
E4M3 = Family("e4m3", 4, 1, 16, 448, real=True, by_token=True)
"""Activations are those float32 that e4m3 has."""


@dataclass(frozen=True)
class WeightDecoder:
    """A format of weights.

    Attributes:
        family: how the activations come that its unpacked values are multiplied with.
        bytes: the size of a subgroup of one row in each plane.
        unpack: ``(e, isa, pointer to a subgroup in each plane)`` → for every step along k a vector of
            ``lanes · step`` values of each block that is unpacked together. Of a real family: ``(e, pointer
            to a subgroup of one row)`` → its two halves, float32 ``[16]`` each; of bfloat16 the odd values,
            then the even ones.
        planes: parts of a weight that lie one after another, each with some bits of all values.
        zero_level: the unpacked integer that means 0 where a group has no zero point of its own.
        fits_int16: whether half a subgroup's products fit 16 bits, though not all of them (family ``bytes``).
        signed: whether unpacked values are int8, plus the instruction set's ``offset`` (family ``bytes``).
    """

    name: str
    family: Family
    bytes: int
    unpack: Callable[..., Iterator[Any]]
    rows: int = 0
    planes: int = 1
    zero_level: int = 0
    fits_int16: bool = False
    signed: bool = False

    @property
    def unsigned(self) -> bool:
        """Whether unpacked integers are unsigned on every instruction set."""
        return self.family.unsigned and not self.signed

    def zero(self, isa: Isa) -> int:
        """What an unpacked integer is when the level is 0."""
        return isa.offset if self.signed else self.zero_level

    def blocks_per_unpack(self, isa: Isa) -> int:
        """Blocks that are unpacked together: their subgroups lie side by side."""
        return self.rows // isa.lanes or 1
