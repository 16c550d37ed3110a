"""Intel's AMX: eight tiles of at most 16 rows of 64 bytes, and instructions that multiply two of them."""

from __future__ import annotations

import contextlib
import ctypes
import sys

from llvmlite import ir

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import I8, I16, I64, Value, vec

ROWS, TILE_BYTES = 16, 1024
REQUEST, TILE_DATA, SYSTEM_CALL = 0x1023, 18, 158
"""Linux's ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``."""


class Tiles:
    """Emits the instructions.

    Args:
        e: writes the kernel.
    """

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def begin(self) -> None:
        """Give each of the eight tiles 16 rows of 64 bytes."""
        e = self.e
        shape = e.room(64)
        e.store(shape, e.const(vec(I8, 64), 0))
        e.store(shape, e.const(I8, 1))
        e.store(shape, e.const(vec(I16, 8), [64] * 8), 16)
        e.store(shape, e.const(vec(I8, 8), [ROWS] * 8), 48)
        self._run("ldtilecfg", shape)

    def end(self) -> None:
        self._run("tilerelease")

    def clear(self, tile: int) -> None:
        self._run("tilezero", self._number(tile))

    def load(self, tile: int, start: Value, stride: Value) -> None:
        self._run("tileloadd64", self._number(tile), start, stride)

    def store(self, tile: int, start: Value) -> None:
        """Rows of 64 bytes, one behind the other."""
        self._run("tilestored64", self._number(tile), start, self.e.const(I64, 64))

    def multiply(self, total: int, left: int, right: int) -> None:
        """Add a product of bfloat16 to the tile ``total``, float32 ``[16, 16]``: ``left`` is ``[16, k]``,
        ``right`` has a row for two of k, pairs side by side."""
        self._run("tdpbf16ps", *map(self._number, (total, left, right)))

    def _number(self, tile: int) -> Value:
        return self.e.const(I8, tile)

    def _run(self, name: str, *arguments: Value) -> None:
        self.e.intrinsic(f"llvm.x86.{name}", ir.VoidType(), *arguments)


def permitted() -> bool:
    """Whether the system lets this process use tiles; it is asked once, and holds for all threads."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None, use_errno=True).syscall(SYSTEM_CALL, REQUEST, TILE_DATA) == 0
    return False

