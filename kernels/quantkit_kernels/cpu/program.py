"""A list of operations in memory, as the driver runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir

from quantkit_kernels.cpu.compiled import address, on_disk
from quantkit_kernels.cpu.driver import ARGUMENTS, EACH, FLAGS, KERNEL, NO_BARRIER, RECORD, RING, TIMES, UNITS
from quantkit_kernels.cpu.isa import Isa

ALIGNMENT = 64
KNOWN = 128
"""Changes that are remembered, at most."""
Report = Callable[[int, int, str], None]
"""Hears how many kernels are compiled, of how many, and which is next."""


class ProgramKernel(Protocol):
    """A kernel that a program may have.

    Attributes:
        arguments: names of its arguments in a record's order; ``*name`` is a pointer.
    """

    arguments: ClassVar[Sequence[str]]

    @property
    def name(self) -> str:
        """The name of its function, which says all that its code depends on."""

    def emit(self, module: ir.Module, isa: Isa) -> None:
        """Write it into a module."""


class Program:
    """Operations, in order. Arguments may be changed between runs.

    Args:
        isa: the instruction set that kernels are compiled for.

    Attributes:
        units_per_row: for each operation how many units a row of activations is; 0 where units depend on
            more.
    """

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._kernels: list[ProgramKernel] = []
        self._initial: list[dict[str, Any]] = []
        self._flags: list[int] = []
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._changes: dict[Hashable, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self._log: dict[int, int] | None = None
        self.units_per_row: list[int] = []

    def __len__(self) -> int:
        return len(self._kernels)

    def add(self, kernel: ProgramKernel, units: int = 1, *, units_per_row: int = 0, barrier: bool = True,
            each: bool = False, **values: Any) -> int:
        """Append an operation.

        Args:
            kernel: the kernel that the operation runs.
            units: the number of units until another is set.
            units_per_row: the units of a row of activations, for :attr:`units_per_row`.
            barrier: whether the next operation needs its results.
            each: every thread does all units, for itself.
            values: arguments by name: a tensor gives its address and is kept; what is left out is 0. The
                kernel doesn't see ``times``, an int64 in memory that the driver multiplies the units by.

        Returns:
            Its index.

        Raises:
            TypeError: an argument that the kernel doesn't have.
        """
        known = _arguments(kernel)
        if unknown := set(values) - {*known, "times"}:
            raise TypeError(f"{kernel.name} has no argument {min(unknown)!r}; it has {', '.join(known)}")
        self._kernels.append(kernel)
        self._initial.append({"units": units, **values})
        self._flags.append(EACH | NO_BARRIER if each else 0 if barrier else NO_BARRIER)
        self.units_per_row.append(units_per_row)
        return len(self._kernels) - 1

    def finish(self, report: Report | None = None) -> None:
        """Compile what isn't compiled yet, and lay the records out; then :attr:`records` is there.

        Args:
            report: hears what is compiled; nothing is said if all of it is on disk.
        """
        width = RECORD // 8
        room = np.zeros(len(self._kernels) * width + ALIGNMENT // 8, np.int64)
        start = -room.ctypes.data % ALIGNMENT // 8
        end = start + len(self._kernels) * width
        self.records: npt.NDArray[np.int64] = room[start:end].reshape(-1, width)
        addresses = self._addresses(report)
        self._columns: list[dict[str, int]] = []
        for i, kernel in enumerate(self._kernels):
            self.records[i, KERNEL // 8] = addresses[kernel.name]
            self.records[i, FLAGS // 8] = self._flags[i]
            self._columns.append({"units": UNITS // 8, "times": TIMES // 8} | {
                name: ARGUMENTS // 8 + j for j, name in enumerate(_arguments(kernel))})
            self.set(i, **self._initial[i])
        self._initial = []
        together = 0
        for flags in self._flags:
            together = together + 1 if flags & NO_BARRIER else 0
            assert together < RING, "too many operations without a barrier"

    def _addresses(self, report: Report | None) -> dict[str, int]:
        kernels = {kernel.name: kernel for kernel in self._kernels}
        new = [name for name in kernels if not on_disk(name, self._isa)]
        addresses: dict[str, int] = {}
        for name, kernel in kernels.items():
            if report is not None and name in new:
                report(new.index(name), len(new), name)
            addresses[name] = address(name, self._isa, functools.partial(kernel.emit, isa=self._isa))
        if report is not None and new:
            report(len(new), len(new), "compiled")
        return addresses

    def set(self, index: int, **values: Any) -> None:
        """Change arguments of an operation."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._kept[index, name] = value
                value = value.data_ptr()
            self._put(index, self._columns[index][name], value or 0)

    def get(self, index: int, name: str) -> int:
        """An argument of an operation, as it stands in its record."""
        return int(self.records[index, self._columns[index][name]])

    def alone(self, index: int, each: bool) -> None:
        """Whether every thread does all of an operation's units for itself; nobody then waits for it."""
        self._put(index, FLAGS // 8, EACH | NO_BARRIER if each else self._flags[index])

    def change(self, key: Hashable, write: Callable[[], None]) -> None:
        """Change arguments as ``write`` does, by calls of :meth:`set` and :meth:`alone`.

        For a key it is called once; after that the same numbers are written at once, which takes microseconds
        for hundreds of operations.

        Args:
            key: says all that the numbers depend on; none of them is a tensor's address.
            write: changes them by calls.
        """
        flat = self.records.reshape(-1)
        if (known := self._changes.get(key)) is not None:
            flat[known[0]] = known[1]
            return
        self._log = {}
        try:
            write()
            if len(self._changes) >= KNOWN:
                self._changes.clear()
            self._changes[key] = (np.fromiter(self._log.keys(), np.int64),
                                  np.fromiter(self._log.values(), np.int64))
        finally:
            self._log = None

    def _put(self, index: int, column: int, value: int) -> None:
        self.records[index, column] = value
        if self._log is not None:
            self._log[index * self.records.shape[1] + column] = value


def _arguments(kernel: ProgramKernel) -> list[str]:
    return [name.lstrip("*") for name in kernel.arguments]
