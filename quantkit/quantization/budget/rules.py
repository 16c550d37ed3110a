"""Writes a choice for every layer as a recipe's rules: few, readable, and exact."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from quantkit.models.architecture import EXPERT
from quantkit.quantization.recipe import Candidate, Rule

LONGEST = 400
"""Characters of a pattern, about; a rule takes 512."""
_LAYER = re.compile(r"(.*?\.)(\d+)\.(.+)")


def part_of(name: str) -> str:
    """What a layer is called without its number: ``self_attn.q_proj``; of all experts,
    ``mlp.experts.*.up_proj``."""
    match = _LAYER.fullmatch(name)
    return re.sub(re.escape(EXPERT) + r"\d+\.", f"{EXPERT}*.", match[3] if match else name)


def rules_of(chosen: Mapping[str, int], candidates: Sequence[Candidate]) -> tuple[Rule, ...]:
    """Rules that give each layer its candidate and match no others: exceptions first, then what most
    layers of each part get.

    Args:
        chosen: full name → number of its candidate; experts of one layer have the same.
        candidates: the candidates by number.
    """
    last: list[tuple[int, str]] = []
    layers: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for name, index in chosen.items():
        if (match := _LAYER.fullmatch(name)) is None:
            last.append((index, name))
        else:
            layers[match[1], part_of(name)][int(match[2])] = index
    # parts that have the same candidate in the same layers share a pattern
    parts: dict[tuple[int, str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (prefix, part), choices in layers.items():
        commonest = Counter(choices.values()).most_common(1)[0][0]
        last.append((commonest, f"{prefix}*.{part}"))
        for index in sorted(set(choices.values()) - {commonest}):
            numbers = sorted(number for number, choice in choices.items() if choice == index)
            parts[index, prefix, tuple(numbers)].append(part)
    first = [(index, pattern) for (index, prefix, numbers), tails in parts.items()
             for pattern in _patterns(prefix, numbers, tails)]
    return tuple(Rule(match=match, **dict(candidates[index])) for index, match in (*first, *last))


def _patterns(prefix: str, numbers: Iterable[int], parts: Iterable[str]) -> list[str]:
    r"""``re:model\.layers\.(0|3)\.(self_attn\.q_proj|…)``, in pieces if it is too long."""
    tails = [re.escape(part).replace(r"\.\*\.", r"\.\d+\.") for part in parts]
    tail = tails[0] if len(tails) == 1 else f"({'|'.join(tails)})"
    start, pieces = f"re:{re.escape(prefix)}", [""]
    for number in map(str, numbers):
        longer = f"{pieces[-1]}|{number}" if pieces[-1] else number
        if len(start) + len(tail) + len(longer) + 4 > LONGEST and pieces[-1]:
            pieces.append(number)
        else:
            pieces[-1] = longer
    return [f"{start}({piece})\\.{tail}" if "|" in piece else f"{start}{piece}\\.{tail}" for piece in pieces]
