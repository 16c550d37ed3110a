"""What a format of weights is to a product: how much a subgroup of it takes, and what unpacks that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import Value

SUB = 32
"""Values of a row in a subgroup: what shares one scale of the activations."""
STRIPE = 32
"""The rows of a weight are padded to a multiple of this, and units are multiples of it."""
Family = Literal["bytes", "words", "floats", "int8", "e4m3"]
"""How activations come: int8 or int16 with a scale and a sum a subgroup, or float32; the last two with one
scale a row: int8, with one sum too, or those float32 that e4m3 has."""
WIDTH = {"bytes": 1, "words": 2, "floats": 4, "int8": 1, "e4m3": 4}
"""Bytes of an activation, and of an unpacked weight."""
STEP = {"bytes": 4, "words": 2, "floats": 1, "int8": 4, "e4m3": 1}
"""Values of a row that one multiplication takes."""
FLOATS = ("floats", "e4m3")
TOKENS = ("int8", "e4m3")
"""Families with one scale a row of activations."""
CHAIN = 8
"""Products that are added one to another where a decoder's sums are made of parts; a subgroup's parts are
added, then the subgroups."""


@dataclass(frozen=True)
class WeightDecoder:
    """A format of weights.

    Attributes:
        name: of the format.
        family: what its unpacked values are multiplied with.
        bytes: that a subgroup of one row takes, in each plane.
        unpack: ``(e, isa, pointer to a subgroup in each plane)`` → for every step along k a vector of
            ``lanes · STEP`` values of each block that is unpacked together.
        rows: that are unpacked together; 0: those of a block.
        parts: whether sums over k are made of parts of :data:`CHAIN` products: of float32 activations, as
            exactly as a library would.
        planes: parts of a weight that lie one after another, each with some bits of all values.
        middle: the unpacked integer that means 0 where a group has no zero point of its own.
        narrow: of the family ``bytes``: half a subgroup's products fit 16 bits, and not all of them.
        signed: of the family ``bytes``: unpacked values are int8, plus the instruction set's ``offset``.
    """

    name: str
    family: Family
    bytes: int
    unpack: Callable[..., Iterator[Sequence[Value]]]
    rows: int = 0
    parts: bool = False
    planes: int = 1
    middle: int = 0
    narrow: bool = False
    signed: bool = False

    def zero(self, isa: Isa) -> int:
        """What an unpacked integer is when the level is 0."""
        return isa.offset if self.signed else self.middle

    def together(self, isa: Isa) -> int:
        """Blocks that are unpacked together: their subgroups lie side by side."""
        return self.rows // isa.lanes or 1
