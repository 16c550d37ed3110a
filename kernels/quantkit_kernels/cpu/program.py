"""A list of operations in memory, as the driver runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir

from quantkit_kernels.cpu import attention, embedding, matmul, rows
from quantkit_kernels.cpu.compiled import address
from quantkit_kernels.cpu.driver import ARGUMENTS, EACH, FLAGS, KERNEL, NO_BARRIER, RECORD, UNITS
from quantkit_kernels.cpu.isa import Isa

ALIGNMENT = 64


@dataclass(frozen=True)
class Operation:
    """A kernel in a program.

    Attributes:
        name: of the kernel's function.
        emit: writes it.
        arguments: their names, in the record's order.
    """

    name: str
    emit: Callable[[ir.Module], None]
    arguments: Sequence[str]


def operation(kernel: Any, isa: Isa) -> Operation:
    """What a program needs to know of a kernel of this package."""
    if isinstance(kernel, matmul.Matmul):
        return Operation(kernel.name, kernel.emit(isa), matmul.ARGUMENTS)
    names = {rows.Rows: rows.ARGUMENTS, attention.RopeStore: attention.ROPE_ARGUMENTS,
             attention.Attend: attention.ATTEND_ARGUMENTS, attention.Combine: attention.COMBINE_ARGUMENTS,
             embedding.Embed: embedding.ARGUMENTS}
    return Operation(kernel.name, kernel.emit, names[type(kernel)])


class Program:
    """Operations, in order. Arguments may be changed between runs.

    Args:
        isa: what kernels are compiled for.

    Attributes:
        names: of the operations' kernels.
    """

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._operations: list[Operation] = []
        self._initial: list[dict[str, Any]] = []
        self._flags: list[int] = []
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self.names: list[str] = []

    def add(self, kernel: Any, units: int = 1, *, barrier: bool = True, each: bool = False,
            **values: torch.Tensor | int | None) -> int:
        """Append an operation.

        Args:
            kernel: one of this package's.
            units: how many it has.
            barrier: whether the next operation needs its results.
            each: every thread does all units, for itself.
            values: arguments by name: a tensor gives its address and is kept; what is left out is 0.

        Returns:
            Its index.

        Raises:
            TypeError: an argument that the kernel doesn't have.
        """
        made = operation(kernel, self._isa)
        known = [name.lstrip("*") for name in made.arguments]
        if unknown := set(values) - set(known):
            raise TypeError(f"{made.name} has no argument {sorted(unknown)[0]!r}; it has {', '.join(known)}")
        self._operations.append(made)
        self._initial.append({"units": units, **values})
        self._flags.append((0 if barrier else NO_BARRIER) | (EACH if each else 0))
        self.names.append(made.name)
        return len(self._operations) - 1

    def finish(self) -> None:
        """Compile what isn't compiled yet, and lay the records out; then :attr:`records` is there."""
        width = RECORD // 8
        room = np.zeros(len(self._operations) * width + ALIGNMENT // 8, np.int64)
        start = -room.ctypes.data % ALIGNMENT // 8
        self.records: npt.NDArray[np.int64] = room[start:start + len(self._operations) * width].reshape(-1, width)
        found: dict[str, int] = {}
        self._columns: list[dict[str, int]] = []
        for i, one in enumerate(self._operations):
            if one.name not in found:
                found[one.name] = address(one.name, self._isa, one.emit)
            self.records[i, KERNEL // 8], self.records[i, FLAGS // 8] = found[one.name], self._flags[i]
            self._columns.append({"units": UNITS // 8} | {
                name.lstrip("*"): ARGUMENTS // 8 + j for j, name in enumerate(one.arguments)})
            self.set(i, **self._initial[i])
        self._initial = []

    def set(self, index: int, **values: torch.Tensor | int | None) -> None:
        """Change arguments of an operation."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._kept[index, name] = value
                value = value.data_ptr()
            self.records[index, self._columns[index][name]] = value or 0

    def get(self, index: int, name: str) -> int:
        """An argument of an operation, as it stands in its record."""
        return int(self.records[index, self._columns[index][name]])

    def alone(self, index: int, each: bool) -> None:
        """Whether every thread does all of an operation's units for itself; nobody then waits for it."""
        self.records[index, FLAGS // 8] = EACH | NO_BARRIER if each else self._flags[index]
