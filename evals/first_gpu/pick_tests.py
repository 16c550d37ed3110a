"""One test a function out of many: ``pytest --collect-only -q … | python pick_tests.py TEXT…``.

Of each function's parameters those that contain the first of the texts are preferred, then the second, and
so on: all of them take most of an hour to compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence


def pick(collected: Iterable[str], preferred: Sequence[str]) -> list[str]:
    """Test ids → the ids of one a function, in order."""
    best: dict[str, tuple[int, str]] = {}
    for line in map(str.strip, collected):
        if "::" not in line:
            continue
        rank = next((at for at, text in enumerate(preferred) if text in line), len(preferred))
        name = line.partition("[")[0]
        if name not in best or rank < best[name][0]:
            best[name] = (rank, line)
    return [line for _, line in best.values()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("preferred", nargs="*")
    parser.add_argument("--most", type=int, help="tests")
    args = parser.parse_args()
    print("\n".join(pick(sys.stdin, args.preferred)[:args.most]))
