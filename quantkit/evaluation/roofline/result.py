"""What a roofline shows: the machine's ceilings, and each operator below them."""

from __future__ import annotations

from typing import Literal

from quantkit.evaluation.speed.results import Spread
from quantkit.support.frozen import Frozen


class MachineCeilings(Frozen):
    """The machine's limits, measured in the same run: medians of measurements between all others, as
    :class:`~quantkit_kernels.cpu.ceilings.CpuCeilings` says. What is below them is a median too.

    Attributes:
        read_bytes_s: bytes a second at which all threads read memory.
        operations_s: operations a second of products without memory by what is multiplied, ``bf16``,
            ``float32``, ``int16`` or ``int8``; a multiplication and an addition count as two.
    """

    read_bytes_s: float
    operations_s: dict[str, float]


class OperatorSpeed(Frozen):
    """One operator of one decoder step at one number of rows.

    Attributes:
        operator: ``q+k+v``, ``o``, ``gate+up``, ``down``, ``head``, ``attention``, or ``rest``: what is left
            of a measured step. Where layers differ, format and shape follow.
        arithmetic: the key of :attr:`MachineCeilings.operations_s` for most of its operations.
        rows: tokens that go through it at once; for attention and the rest, sequences with one token each.
        context: tokens in the cache of each sequence, for attention and the rest; else 0.
        bytes: the bytes that it moves: weights or keys and values, inputs and outputs.
        operations: two for each multiplication with an addition.
        seconds: measured, of one layer's.
        predicted_s: the larger of bytes over bandwidth and operations over arithmetic.
        bound: by which of the two.
        bound_from: rows from which on it is bound by arithmetic instead of memory; ``None``: never, or
            unknown.
        layers: the number of layers that have it.
    """

    operator: str
    arithmetic: str
    rows: int
    context: int = 0
    bytes: int
    operations: int
    seconds: Spread
    predicted_s: float
    bound: Literal["memory", "compute"]
    bound_from: int | None = None
    layers: int = 1

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes


class Roofline(Frozen):
    """The operators of one model.

    Attributes:
        model, label: which.
        ceilings: the limits of the machine.
        operators: each at every number of rows.
    """

    model: str
    label: str
    ceilings: MachineCeilings
    operators: tuple[OperatorSpeed, ...] = ()
