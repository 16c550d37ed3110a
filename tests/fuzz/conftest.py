"""Mutated files, given to the parsers that read them: each is read or refused with a three-part error.

A file ``test_*.py`` here is a family of parsers. It says how a valid input looks and how it is read; the
``fuzz`` fixture mutates the input and looks at what comes back. By default a few hundred cases are tried;
``QUANTKIT_FUZZ_SECONDS=600 pytest tests/fuzz`` (``make fuzz``) goes on for that long with each file, in equal
parts for its tests.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quantkit.support.errors import QuantkitError

CASES = 200
"""Cases of a test where no time is given."""
HANG_SECONDS = 120
"""A parser that takes longer than this for one case hangs: the traceback is printed and the run ends."""
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "0", "\ud800", "\x00", "../x", "/etc/passwd", "a" * 5000, "(a+)+$", [], [[]], [None], ["llama"], {},
    {"": None}, {"a": {}}, [0] * 1000)


def mutate_json(value: Any, chance: random.Random) -> Any:
    """``value`` with one to four of its parts replaced, removed, doubled, renamed or swapped."""
    holder = {"root": copy.deepcopy(value)}
    for _ in range(chance.randint(1, 4)):
        places = list(_places(holder))
        container, key = chance.choice(places)
        action = chance.randrange(5)
        if action == 0 and container is not holder:
            del container[key]
        elif action == 1 and isinstance(container, list):
            container.insert(chance.randint(0, len(container)), copy.deepcopy(container[key]))
        elif action == 2 and isinstance(container, dict) and container is not holder:
            container[chance.choice(["", "x", key + "_", key.upper(), "\ud800"])] = container.pop(key)
        elif action == 3:
            other, name = chance.choice(places)
            container[key] = copy.deepcopy(other[name])
        else:
            container[key] = copy.deepcopy(chance.choice(_ODD))
    return holder["root"]


def _places(value: Any) -> Any:
    waiting = [value]
    while waiting:
        container = waiting.pop()
        for key in container if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], dict | list) and container[key]:
                waiting.append(container[key])


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to eight runs of bytes flipped, cut, doubled, overwritten or inserted."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at, size = chance.randrange(len(changed) + 1), chance.choice([1, 1, 2, 4, 8, 64])
        action = chance.randrange(5)
        if action == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif action == 1:
            del changed[at:at + size]
        elif action == 2:
            changed[at:at] = changed[at:at + size]
        elif action == 3:
            changed[at:at + size] = chance.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
        else:
            changed[at:at] = chance.randbytes(size)
    return bytes(changed)


def encode_json(value: Any) -> bytes:
    """JSON as another writer might make it: lone surrogates, infinities and long numbers included."""
    return json.dumps(value, ensure_ascii=True).encode()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``fuzz(parse, seeds, mutate)``: whatever ``mutate(seed, chance)`` makes, ``parse`` takes or refuses."""
    def run(parse: Callable[[Any], object], seeds: Sequence[Any],
            mutate: Callable[[Any, random.Random], Any], cases: int = CASES) -> None:
        for seed in seeds:
            parse(seed)  # what is mutated is valid to begin with
        seconds = float(os.environ.get("QUANTKIT_FUZZ_SECONDS", 0))
        end = time.monotonic() + seconds / sum(one.path == request.path for one in request.session.items)
        first = int(os.environ.get("QUANTKIT_FUZZ_SEED", 0))
        case = refused = 0
        while case < cases or time.monotonic() < end:
            value = mutate(seeds[(first + case) % len(seeds)], random.Random(first + case))
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)  # no parser may hang
            try:
                parse(value)
            except QuantkitError as error:
                refused += 1
                assert error.what and error.next, f"case {first + case}: an error without what to do: {error}"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise AssertionError(f"case {first + case}: {type(error).__name__}: {error}; the input is "
                                     f"{str(value)[:2000]!r}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
            case += 1
        print(f"{case} cases, {refused} refused, {case - refused} read")
        assert refused, "no mutation was refused: the mutations don't reach what the parser checks"

    return run


@pytest.fixture
def mutations() -> dict[str, Callable[..., Any]]:
    """The mutators by name: ``json`` for values, ``bytes`` for files; ``encode`` writes a value as JSON."""
    return {"json": mutate_json, "bytes": mutate_bytes, "encode": encode_json}
