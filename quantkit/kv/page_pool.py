"""The allocator: pages of 64 slots, each of one key-value head, in one growing block a layer.

A large block on a CPU grows and shrinks in place, so that no step has to copy the KV cache: a range of
virtual addresses is reserved that is much larger than what is needed at first, and the system allocates
physical memory when an address is written; until then it reads as zero.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.kv.base import PAGE, Layout


@dataclass
class MoveCounter:
    """How often memory came to lie elsewhere."""

    count: int = 0


class PagePool:
    """All pages of one layer.

    Memory grows a little at a time and shrinks when many pages are free, so that what a policy drops
    is given back. On a CPU a large block grows and shrinks in place and its pages keep their numbers: copying
    gigabytes would stall every running answer. New memory is zero: a slot that nobody wrote enters a product
    only masked, and NaN times 0 is NaN.

    Args:
        layout: the parts that each slot holds.
        moves: counts how often ``parts`` were replaced; several may share one.
        shared: the parts that a page holds beside those of its slots.

    Attributes:
        parts: by name, ``[pages, PAGE, *shape]`` or, shared, ``[pages, *shape]``; another object after any
            growth or shrinking.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", moves: MoveCounter | None = None,
                 shared: Layout | None = None) -> None:
        shapes = {name: ((PAGE, *shape), dtype) for name, (shape, dtype) in layout.items()}
        shapes |= shared or {}
        self.parts = {name: torch.zeros(0, *shape, dtype=dtype, device=device)
                      for name, (shape, dtype) in shapes.items()}
        self.shared = frozenset(shared or ())
        self._memory: dict[str, ReservedMemory] = {}  # of the parts that grow in place
        self._released: set[int] = set()  # free pages whose memory was given back
        self._derived: frozenset[str] = frozenset()
        self._free: list[int] = []  # a heap: the lowest is taken
        self._extra_refs: dict[int, int] = {}  # references to a page beside the first
        self._total = 0
        self._preallocated = 0  # pages that stay allocated
        self._moves = moves or MoveCounter()

    @property
    def used(self) -> int:
        """Pages that belong to somebody."""
        return self._total - len(self._free)

    @property
    def shared_pages(self) -> int:
        return len(self._extra_refs)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without what is derived."""
        parts = self.parts  # another thread may ask, and derived parts come and go
        return sum(_page_bytes(part) for name, part in parts.items() if name not in self._derived)

    @property
    def total(self) -> int:
        """Pages that exist, free ones included."""
        return self._total

    @property
    def allocated_bytes(self) -> int:
        """Bytes that exist, free pages included."""
        parts = self.parts  # another thread may ask
        memory = self._memory
        released = len(self._released)
        return sum(part.untyped_storage().nbytes() - (_page_bytes(part) * released if name in memory else 0)
                   for name, part in parts.items())

    def pages_in_use(self) -> list[int]:
        """Pages that belong to somebody."""
        return sorted(set(range(self._total)) - set(self._free))

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, the lowest free ones."""
        if count > len(self._free):
            self._resize(_grown(self._total, self.used + count))
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._released.difference_update(taken)
        return taken

    def preallocate(self, total: int) -> None:
        """Keep ``total`` pages allocated from now on, in use or not; they move only if more are taken. Their
        memory is allocated now, because the system may have none left later."""
        self._preallocated = total
        if (before := self._total) < total:
            self._resize(total)
            for part in self.parts.values():
                part[before:].zero_()

    def add_derived(self, layout: Layout) -> None:
        """Give each slot more parts, whose numbers follow from those of the others: zero until they are
        written. They move with their page and count in :attr:`allocated_bytes` alone."""
        like, memory = next(iter(self.parts.values())), dict(self._memory)
        new = {name: _grown_part(name, like.new_zeros(0, PAGE, *shape, dtype=dtype), 0, self._total, memory)
               for name, (shape, dtype) in layout.items()}
        for part in new.values() if self._preallocated else ():
            part.zero_()  # as preallocate() does: allocate its memory now
        self._derived |= new.keys()  # before the parts are there
        self.parts, self._memory = {**self.parts, **new}, memory
        self._moves.count += 1

    def forget_derived(self) -> None:
        self.parts = {name: part for name, part in self.parts.items() if name not in self._derived}
        self._memory = {name: memory for name, memory in self._memory.items() if name in self.parts}
        self._derived = frozenset()  # after the parts are gone
        self._moves.count += 1

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each: nobody's to write now, and free when all have given it back."""
        for page in pages:
            self._extra_refs[page] = self._extra_refs.get(page, 0) + 1

    def free(self, pages: Iterable[int]) -> None:
        """A holder's pages back."""
        for page in pages:
            if page not in self._extra_refs:
                heapq.heappush(self._free, page)
            elif self._extra_refs[page] == 1:
                del self._extra_refs[page]
            else:
                self._extra_refs[page] -= 1

    def holders(self, page: int) -> int:
        """Number of holders of a page that is taken."""
        return 1 + self._extra_refs.get(page, 0)

    def count_unshared(self, pages: Sequence[int]) -> int:
        """How many of these pages have one holder."""
        return sum(page not in self._extra_refs for page in pages) if self._extra_refs else len(pages)

    def unshare(self, pages: list[int], begin: int) -> bool:
        """Make a holder's pages from the ``begin``-th on its own, in place; whether any was shared."""
        if not self._extra_refs:
            return False
        places = [at for at in range(begin, len(pages)) if pages[at] in self._extra_refs]
        if places:
            old, new = [pages[at] for at in places], self.allocate(len(places))
            for part in self.parts.values():
                part[new] = part[old]
            self.free(old)
            for at, page in zip(places, new):
                pages[at] = page
        return bool(places)

    def shrink(self) -> dict[int, int] | None:
        """Give memory back if more than a quarter of it is free.

        Returns:
            old → new number of every page that moved, or ``None`` if none did. Tables must follow.
        """
        size, total = max(self.used, self._preallocated), self._total - len(self._released)
        if (total - size) * 4 <= total:
            return None
        if self._memory and size:
            self._release(total - size)
            return None
        holes = sorted(page for page in self._free if page < size)
        high = sorted(set(range(size, self._total)) - set(self._free))
        parts = {name: part[:size].clone() for name, part in self.parts.items()}
        for name, part in parts.items() if high else ():
            part[holes[:len(high)]] = self.parts[name][high]
        self.parts.update(parts)  # all or, where memory is short, none
        self._memory, self._released = {}, set()
        self._free, self._total = holes[len(high):], size
        self._moves.count += 1
        moved = dict(zip(high, holes))
        self._extra_refs = {moved.get(page, page): count for page, count in self._extra_refs.items()}
        return moved or None

    def _release(self, count: int) -> None:
        """Give the memory of the highest ``count`` free pages back; no page moves."""
        pages = sorted(set(self._free) - self._released)[-count:]
        released, size = self._released | set(pages), self._total
        while size - 1 in released:
            size -= 1
        parts = {name: self._memory[name].tensor((size, *part.shape[1:]), part.dtype) if name in self._memory
                 else part[:size].clone() for name, part in self.parts.items()}
        self.parts.update(parts)  # all or, where memory is short, none
        self._free = sorted(page for page in self._free if page < size)
        self._released, self._total = {page for page in released if page < size}, size
        self._moves.count += 1
        for name, memory in self._memory.items():
            page_bytes = _page_bytes(parts[name])
            for start, stop in _runs(pages):
                memory.release(start * page_bytes, stop * page_bytes)

    def write(self, slots: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Store tokens.

        Args:
            slots: int64 ``[n]``, ``page * PAGE + offset``.
            values: by name, ``[n, *shape]``.
        """
        for name, value in values.items():
            part = self.parts[name]
            part.view(-1, *part.shape[2:]).index_copy_(0, slots, value.to(part.dtype))

    def write_pages(self, pages: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Store whole pages.

        Args:
            pages: the pages' numbers, int64 ``[n]``.
            values: by name, ``[n, PAGE, *shape]`` or, shared, ``[n, *shape]``.
        """
        for name, value in values.items():
            self.parts[name].index_copy_(0, pages, value.to(self.parts[name].dtype))

    def read(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """Pages int64 ``[Hkv, n]``: ``[Hkv, n, PAGE, *shape]``, shared parts ``[Hkv, n, *shape]``."""
        part = self.parts[name]
        return part.index_select(0, table.reshape(-1)).view(*table.shape, *part.shape[1:])

    def _resize(self, total: int) -> None:
        memory = dict(self._memory)
        parts = {name: _grown_part(name, part, self._total, total, memory)
                 for name, part in self.parts.items()}
        self.parts.update(parts)  # all or, where memory is short, none
        self._memory = memory
        self._free += range(self._total, total)  # above all others: it stays a heap
        self._total = total
        self._moves.count += 1


def _grown_part(name: str, part: torch.Tensor, used: int, total: int,
                memory: dict[str, ReservedMemory]) -> torch.Tensor:
    """A part with ``total`` pages. It grows in place if its reservation in ``memory`` is large enough. If
    not, its ``used`` pages are copied, and ``memory`` gets a new reservation where one is possible."""
    shape, size = (total, *part.shape[1:]), total * _page_bytes(part)
    if name in memory and size <= memory[name].size:
        return memory[name].tensor(shape, part.dtype)
    if (reserved := reserve(size, part.device)) is not None:
        memory[name] = reserved
    else:
        memory.pop(name, None)
    grown = part.new_zeros(shape) if reserved is None else reserved.tensor(shape, part.dtype)
    grown[:used] = part
    return grown


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``start, stop`` of every run of consecutive numbers in ``pages``, which are sorted."""
    for _, run in itertools.groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        neighbors = [page for _, page in run]
        yield neighbors[0], neighbors[-1] + 1


def _page_bytes(part: torch.Tensor) -> int:
    return math.prod(part.shape[1:]) * part.element_size()


def _grown(total: int, needed: int) -> int:
    """The new size of a block of ``total`` pages that must hold ``needed``: with spare pages, so that not
    every step moves it."""
    return max(needed, total + total // 8)


def most_pages(used: int) -> int:
    """The largest size, free pages included, of a block of which at most ``used`` pages were in use."""
    return _grown(used - 1, used) if used else 0


def slots_of(pages: Sequence[int], start: int, count: int) -> list[int]:
    """The slots ``start … start + count - 1`` of a head whose pages are these."""
    return [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, start + count)]


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
        size: the number of bytes.

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
