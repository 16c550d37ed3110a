"""``4.25bpw`` or ``5GB`` → a budget; ``16GB`` → bytes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from quantkit.support.errors import UsageError
from quantkit.support.units import amount, bytes_of


@dataclass(frozen=True)
class Budget:
    """How large a checkpoint may be.

    Attributes:
        text: the budget as it was given, ``4.25bpw``.
        bits: stored bits a weight, over all Linears, kept ones too; or ``None``.
        bytes: bytes of all the checkpoint's tensors, embeddings and norms too; or ``None``.
    """

    text: str
    bits: Fraction | None = None
    bytes: int | None = None

    def linear_bytes(self, weights: int, other_bytes: int) -> int:
        """What all Linears together may take.

        Args:
            weights: the number of their weights.
            other_bytes: bytes of all other tensors.
        """
        if self.bits is not None:
            return int(self.bits * weights / 8)
        assert self.bytes is not None
        return self.bytes - other_bytes


def parse_budget(text: str) -> Budget:
    """Read a budget: a number and ``bpw`` (bits a weight), or a unit of bytes (``GB`` is 10⁹, ``GiB`` 2³⁰).

    Raises:
        UsageError: it is neither, or not above 0.
    """
    number, size = amount(text), bytes_of(text)
    if number is not None and number[1] == "bpw" and number[0]:
        return Budget(text.strip(), bits=number[0])
    if size is None:
        raise UsageError(f"{text!r} is no budget", why="it is a number and a unit: bpw (bits a weight) or "
                         "MB, GB, MiB, GiB (of all tensors)", next="--budget 4.25bpw, or --budget 5GB")
    return Budget(text.strip(), bytes=size)


def parse_bytes(text: str, option: str, example: str = "16GB") -> int:
    """``16GB`` (10⁹) or ``16GiB`` (2³⁰) → bytes.

    Raises:
        UsageError: it is no number with such a unit, or not above 0; ``option`` is named.
    """
    if (size := bytes_of(text)) is None:
        raise UsageError(f"{option} {text!r} is no size", next=f"{option} {example}",
                         why="it is a number above 0 and a unit: MB, GB, TB (powers of 1000), MiB, GiB, TiB")
    return size
