"""Which replica gets a request: the one that has read its beginning, unless that one has too much to do.

How a prompt begins is said by the names of its blocks of characters.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

MAX_BLOCKS = 2**16
"""Blocks whose replicas are known; about 15 MB."""
MIN_SHARE = 0.1
"""The part of a prompt that a replica must have read for that to decide."""
BLOCK = 64
"""Characters of a block. The prefix cache shares blocks of 64 tokens, and hardly a token is less than one."""
MAX_CHARACTERS = 2**18
"""Characters of a prompt that are looked at, from its beginning on."""
WRITING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths of requests that take up what the prefix cache has."""


class PrefixBalancer:
    """Knows what each replica has read and how many requests it is answering.

    Every request goes through one balancer, so that its counts are exact.

    Args:
        slack: requests that a replica may have more than the least busy one and still get another, because
            it has read the beginning.
        capacity: blocks whose replicas are known; those that weren't asked for the longest time are forgotten
            first.
    """

    def __init__(self, slack: int, capacity: int = MAX_BLOCKS) -> None:
        self._slack = slack
        self._capacity = capacity
        self._readers: OrderedDict[int, set[str]] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._chosen: dict[str, int] = {}
        self._choices = 0

    def choose(self, blocks: Sequence[int], replicas: Collection[str]) -> str:
        """The replica for a request, which counts as busy with it until :meth:`ended`.

        Args:
            blocks: The names of the prompt's blocks, from its beginning on.
            replicas: The replicas that run; there must be one at least.
        """
        replica = self._reader(blocks, replicas) or self._least_busy(replicas)
        self._choices += 1
        self._chosen[replica] = self._choices
        self._note(blocks, replica, replicas)
        self._active[replica] += 1
        return replica

    def ended(self, replica: str) -> None:
        """A request for which a replica was chosen is over."""
        self._active[replica] -= 1

    def _reader(self, blocks: Sequence[int], replicas: Collection[str]) -> str | None:
        """The replica that has read most of the prompt and isn't too busy."""
        readers = set(replicas)
        length = 0
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

    def _note(self, blocks: Sequence[int], replica: str, replicas: Collection[str]) -> None:
        for block in reversed(blocks):  # the end of a text is forgotten before its beginning
            readers = self._readers.get(block, set()).intersection(replicas)  # others are gone
            self._readers[block] = readers | {replica}
            self._readers.move_to_end(block)
        while len(self._readers) > self._capacity:
            self._readers.popitem(last=False)


def prefix_blocks(path: str, body: bytes, tenant: bytes = b"") -> tuple[int, ...]:
    """Names of a prompt's blocks. Two prompts have as many names in common as they have equal blocks at their
    beginning; models, KV settings, salts and tenants, whose caches are apart, have none in common.

    The names are of the text as the request has it: the tokens would be more exact, but only a replica has
    the tokenizer and the chat template.

    Args:
        path: The path of the request.
        body: The bytes of its body.
        tenant: The owner of the request, see :data:`~quantkit.serving.guard.TENANT`.

    Returns:
        One name for each complete block; none for what isn't a prompt.
    """
    if path not in WRITING:
        return ()
    try:
        values = json.loads(body)
        text = _beginning(values) if isinstance(values, dict) else ""
    except (ValueError, RecursionError):
        return ()  # a replica says what is wrong
    names, name = [], hash(tenant)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        name = hash((name, text[start:start + BLOCK]))
        names.append(name)
    return tuple(names)


def _beginning(values: dict[str, Any]) -> str:
    out, length = [], 0
    for part in _parts(values):
        out.append(part)
        length += len(part)
        if length >= MAX_CHARACTERS:
            break
    return "".join(out)[:MAX_CHARACTERS]


def _parts(values: dict[str, Any]) -> Iterator[str]:
    """The text in the order in which templates write it."""
    yield json.dumps([values.get(key) for key in ("model", "kv", "cache_salt")])
    for key in ("tools", "system", "instructions"):
        if values.get(key):
            yield json.dumps(values[key], sort_keys=True)
    for key in ("messages", "input", "prompt"):
        value = values.get(key)
        if isinstance(value, list):  # what comes next mustn't change what stands before it
            yield from (json.dumps(item, sort_keys=True) for item in value)
        elif isinstance(value, str):
            yield value
