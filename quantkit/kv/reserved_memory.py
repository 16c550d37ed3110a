"""Memory that grows and shrinks where it lies: nothing is copied while answers wait for their next token.

A range of addresses is reserved, many times what is needed at first. The system puts memory behind an address
when something is written there; until then zeros are read.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

SMALLEST = 1 << 20
"""Bytes from which addresses are reserved; copying fewer takes no time that anybody notices."""
TIMES, LEAST = 8, 1 << 30
"""So many times what is needed is reserved, and at least so many bytes: addresses cost nothing."""
_FLAGS = 0 if sys.platform != "linux" else (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))


class ReservedMemory:
    """A range of addresses, of the CPU's memory.

    Args:
        size: bytes.

    Raises:
        OSError: the system has no such range, or reserves none.
    """

    def __init__(self, size: int) -> None:
        if not _FLAGS:
            raise OSError("only Linux gives memory back in the middle of a range and reads it as zeros")
        self.size, self._map = size, mmap.mmap(-1, size, flags=_FLAGS)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of it as a tensor, which keeps it alive; not empty."""
        return torch.frombuffer(self._map, dtype=torch.uint8,
                                count=math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def forget(self, begin: int) -> None:
        """Give back what is behind the first ``begin`` bytes: zeros are read there again."""
        page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map[begin:page] = bytes(page - begin)
        if page < self.size:
            self._map.madvise(mmap.MADV_DONTNEED, page, self.size - page)


def reserve(nbytes: int, device: torch.device) -> ReservedMemory | None:
    """Addresses for what has ``nbytes`` now and will grow; ``None`` where it is small, or the system has
    none."""
    if device.type != "cpu" or nbytes < SMALLEST:
        return None
    size = max(LEAST, TIMES * nbytes)
    try:
        return ReservedMemory(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    except (OSError, ValueError, OverflowError):  # a limit on addresses, or a system without overcommitment
        return None
