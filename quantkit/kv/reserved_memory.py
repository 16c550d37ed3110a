"""Memory that grows and shrinks where it lies: nothing is copied while answers wait for their next token.

A range of addresses is reserved, many times what is needed at first. The system puts memory behind an address
when something is written there; until then zeros are read.
"""

from __future__ import annotations

import functools
import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

SMALLEST = 1 << 20
"""Bytes from which addresses are reserved; copying fewer takes no time that anybody notices."""
TIMES, LEAST = 8, 1 << 32
"""So many times what is needed is reserved, and at least so many bytes: where addresses aren't limited they
cost nothing."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


class ReservedMemory:
    """A range of addresses, of the CPU's memory. Only Linux gives parts of one back and reads zeros there.

    Args:
        size: bytes.

    Raises:
        OSError: the system has no such range.
    """

    def __init__(self, size: int) -> None:
        unbacked = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unbacked)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of it as a tensor, which keeps it alive; not empty."""
        return torch.frombuffer(self._map, dtype=torch.uint8,
                                count=math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def forget(self, begin: int, end: int) -> None:
        """Give bytes from ``begin`` to ``end`` back: zeros are read there again. The system takes whole
        pages of its own; what is left of others is overwritten."""
        first = min(-(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end)
        last = max(end // mmap.PAGESIZE * mmap.PAGESIZE, first)
        try:
            if first < last:
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:  # it is locked in memory
            first = last = end
        self._map[begin:first] = bytes(first - begin)
        self._map[last:end] = bytes(end - last)


def reserve(nbytes: int, device: torch.device) -> ReservedMemory | None:
    """Addresses for what has ``nbytes`` now and will grow; ``None`` where it is small, or addresses are
    limited: others need them too."""
    if device.type != "cpu" or nbytes < SMALLEST or _limited():
        return None
    size = max(LEAST, TIMES * nbytes)
    try:
        return ReservedMemory(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    except (OSError, ValueError, OverflowError):
        return None


@functools.cache
def _limited() -> bool:
    """Whether the process may not have all addresses, or the system counts them as memory."""
    if sys.platform != "linux":
        return True
    import resource

    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
           for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)):
        return True
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == "2"
    except (OSError, ValueError):
        return True
