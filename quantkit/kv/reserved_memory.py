"""Memory that grows and shrinks in place, so that no step has to copy the KV cache.

A range of virtual addresses is reserved that is much larger than what is needed at first. The system
allocates physical memory when an address is written; until then it reads as zero.
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
"""Tensors of fewer bytes are copied when they grow."""
GROWTH, MINIMUM = 8, 1 << 32
"""A reservation has 8 times the bytes that are needed now, and at least 4 GiB. Reserved addresses take no
memory."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


class ReservedMemory:
    """A reserved range of virtual addresses. It needs Linux, where a part can be released and reads as zero
    afterwards.

    Args:
        size: bytes.

    Raises:
        OSError: the range can't be reserved.
    """

    def __init__(self, size: int) -> None:
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name since 3.13
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of the range as a tensor, which keeps it alive; ``shape`` has no 0."""
        return torch.frombuffer(self._map, dtype=torch.uint8,
                                count=math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)

    def release(self, begin: int, end: int) -> None:
        """Give the memory of the bytes from ``begin`` to ``end`` back to the system. They read as zero
        afterwards: the system takes whole pages, and the rest at both ends is overwritten."""
        first = min(-(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end)
        last = max(end // mmap.PAGESIZE * mmap.PAGESIZE, first)
        try:
            if first < last:
                self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:  # the pages are locked in memory, by mlockall for instance
            first = last = end
        self._map[begin:first] = bytes(first - begin)
        self._map[last:end] = bytes(end - last)


def reserve(nbytes: int, device: torch.device) -> ReservedMemory | None:
    """Reserve addresses for a tensor that has ``nbytes`` now and will grow.

    Returns:
        ``None`` if it should be copied when it grows: it is small or on a GPU, or addresses are limited, so
        that a reservation would take them from other allocations.
    """
    if device.type != "cpu" or nbytes < SMALLEST or _addresses_limited():
        return None
    size = max(MINIMUM, GROWTH * nbytes)
    try:
        return ReservedMemory(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    except (OSError, ValueError, OverflowError):
        return None


@functools.cache
def _addresses_limited() -> bool:
    """Whether this isn't Linux, ``ulimit`` limits the process's addresses, or the system counts reserved
    addresses as memory (``vm.overcommit_memory=2``)."""
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
