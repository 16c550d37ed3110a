"""Which replica gets a request: the one that has read its beginning, unless that one has too much to do."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

MAX_BLOCKS = 2**16
"""Blocks whose replicas are known; about 15 MB."""
MIN_SHARE = 0.1
"""Of a prompt that a replica must have read for that to decide."""


class PrefixBalancer:
    """Knows what each replica has read and how many requests it is answering. Any thread may use it.

    Every request goes through one balancer, so that its counts are exact.

    Args:
        slack: requests that a replica may have more than the least busy one and still get another, because
            it has read the beginning.
        capacity: blocks whose replicas are known; those that weren't asked for the longest time are forgotten
            first.
    """

    def __init__(self, slack: int, capacity: int = MAX_BLOCKS) -> None:
        self._slack, self._capacity = slack, capacity
        self._readers: OrderedDict[int, set[str]] = OrderedDict()
        self._reserved: dict[str, str] = {}
        self._active: Counter[str] = Counter()
        self._chosen: dict[str, int] = {}
        self._choices = 0
        self._lock = threading.Lock()

    def choose(self, request: str, blocks: Sequence[int], replicas: Collection[str]) -> str:
        """The replica for a request, which counts as busy with it until :meth:`ended`.

        Args:
            request: its id. It may be chosen for again, as one that couldn't be sent.
            blocks: names of the prompt's blocks, from its beginning on.
            replicas: that run; at least one.
        """
        with self._lock:
            self._release(request)
            replica = self._reader(blocks, replicas) or self._least_busy(replicas)
            self._choices += 1
            self._chosen[replica] = self._choices
            self._note(blocks, replica)
            self._reserve(request, replica)
            return replica

    def sent(self, request: str, replica: str) -> None:
        """A request has arrived at a replica, perhaps not at the one that was chosen."""
        with self._lock:
            if request in self._reserved:  # otherwise it is over already
                self._release(request)
                self._reserve(request, replica)

    def ended(self, request: str) -> None:
        """A request is over, or wasn't sent."""
        with self._lock:
            self._release(request)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        with self._lock:
            for request in [request for request, replica in self._reserved.items()
                            if replica not in replicas]:
                self._release(request)
            for replica in self._chosen.keys() - set(replicas):
                del self._chosen[replica]
            for block in list(self._readers):
                self._readers[block].intersection_update(replicas)
                if not self._readers[block]:
                    del self._readers[block]

    def _reserve(self, request: str, replica: str) -> None:
        self._reserved[request] = replica
        self._active[replica] += 1

    def _release(self, request: str) -> None:
        replica = self._reserved.pop(request, None)
        if replica is not None:
            self._active[replica] -= 1
            if not self._active[replica]:
                del self._active[replica]

    def _reader(self, blocks: Sequence[int], replicas: Collection[str]) -> str | None:
        """The replica that has read most of the prompt and isn't too busy."""
        readers, length = set(replicas), 0
        for block in blocks:
            further = readers & self._readers.get(block, set())
            if not further:
                break
            readers, length = further, length + 1
        if not length or length < MIN_SHARE * len(blocks):
            return None
        replica = self._least_busy(readers)
        least = min(self._active[other] for other in replicas)
        return replica if self._active[replica] <= least + self._slack else None

    def _least_busy(self, replicas: Collection[str]) -> str:
        """Of equally busy ones that whose last turn is longest ago."""
        return min(replicas, key=lambda replica: (self._active[replica], self._chosen.get(replica, 0)))

    def _note(self, blocks: Sequence[int], replica: str) -> None:
        for block in reversed(blocks):  # the end of a text is forgotten before its beginning
            self._readers.setdefault(block, set()).add(replica)
            self._readers.move_to_end(block)
        while len(self._readers) > self._capacity:
            self._readers.popitem(last=False)
