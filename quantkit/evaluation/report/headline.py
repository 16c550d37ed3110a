"""What a comparison comes to: the variant to take, and a sentence a variant about its cost and gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.effect import WORDS, Effect, differs, effect_of_row
from quantkit.evaluation.keys import PER_ITEM, PER_RUN
from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.metrics import KL, TOP1
from quantkit.evaluation.report.base import head, megabytes, number, shown
from quantkit.evaluation.result import EvalResult, ModelResult, short_names
from quantkit.support.units import times_smaller

SPEED = "decode_tok_s"
LIMIT = 4
"""More variants than this are too many to read: then only the best stand in the headline."""
SMALLER = 1.05
"""Times smaller that a variant must be for that to be a gain."""
_NEAR = 1.1
"""Variants up to this factor above the smallest count as equally small."""
_FILE_APART = 1.15
"""Factor between a file's ratio and that of memory from which on both are said."""
_NAME = 64


@dataclass(frozen=True)
class Recommendation:
    """The variant that a careful reader would take.

    Attributes:
        index: the number of its row; 0, the reference, if none is worth its cost.
        title: the advice in a few words: ``Take int8``.
        facts: the gains and costs, each a value and its name: ``("1.65 times", "smaller")``.
        sentence: all of this as text.
        cost: a sentence about its cost; ``""`` if nothing is taken.
        effect: how much it costs.
    """

    index: int
    title: str
    facts: tuple[tuple[str, str], ...]
    sentence: str
    effect: Effect
    cost: str = ""


def headline(result: EvalResult) -> list[str]:
    """The recommendation, then a sentence for each other variant. Of more than :data:`LIMIT` variants, only
    the smallest, the fastest and the closest have one."""
    if not result.rows:
        return []
    first, *others = result.rows
    names = _names(result)
    if not others:
        return [f"{names[0]}: {_alone(result)}."]
    advice = recommended(result)
    shown_rows = others if len(others) <= LIMIT else _best(others)
    sentences = [f"{name}: {_against(row, first, result)}." for name, row in zip(names[1:], others)
                 if any(row is other for other in shown_rows)
                 and not (advice and row is result.rows[advice.index])]
    return ([advice.sentence] if advice else []) + sentences


def recommended(result: EvalResult) -> Recommendation | None:
    """The variant to take: of those that are smaller or faster than the reference beyond the noise, those
    with the least cost in words; of these the smallest, and of equally small ones the fastest and then the
    closest.

    Returns:
        ``None``: there is nothing to choose from, or no quality was measured.
    """
    if len(result.rows) < 2:
        return None
    first, names = result.rows[0], _names(result)
    effects = {index: effect for index, row in enumerate(result.rows)
               if index and (effect := effect_of_row(row)) is not None}
    if not effects:
        return None
    gaining = [index for index in effects if _gains(result.rows[index], first)]
    if not gaining:
        sentence = f"Keep {names[0]}: no variant is smaller or faster beyond the noise."
        return Recommendation(0, f"Keep {names[0]}", (), sentence, WORDS[0])
    least = min(WORDS.index(effects[index]) for index in gaining)
    index = _choice(result.rows, [index for index in gaining if WORDS.index(effects[index]) == least])
    row, effect = result.rows[index], effects[index]
    facts = _facts(row, first)
    cost = f"what it costs is {effect}{_kl(row, ' (', ')')}"
    gains = ", ".join(map(_said, facts))
    if effect == "broken":
        sentence = (f"Keep {names[0]}: every variant that gains something answers differently; the closest "
                    f"is {names[index]}{_kl(row, ' (', ')')}.")
        return Recommendation(0, f"Keep {names[0]}", (), sentence, effect)
    title = f"Take {names[index]}" + " if a visible cost is fine" * (effect == "visible")
    return Recommendation(index, title, facts, f"{title}: {gains}; {cost}.", effect,
                          f"{cost[0].upper()}{cost[1:]}.")


def size_facts(row: ModelResult, first: ModelResult) -> list[tuple[str, str]]:
    """How much smaller a variant is than the reference: its file, and its weights in memory where these are
    another matter, as with a GGUF file that is dequantized when it is loaded."""
    file = _ratio(first.file_bytes, row.file_bytes)
    memory = _ratio(first.weight_bytes, row.weight_bytes)
    if file is None:
        return [] if memory is None else [_times(memory, " in memory")]
    if memory is None or abs(math.log(file / memory)) < math.log(_FILE_APART):
        return [_times(file)]
    return [_times(memory, " in memory"), _times(file, " as a file")]


def _times(ratio: float, where: str = "") -> tuple[str, str]:
    text = times_smaller(ratio * 1e6, 1e6)
    value, _, direction = text.rpartition(" ")
    return (value, direction + where) if value.endswith("times") else (text, where.strip())


def _facts(row: ModelResult, first: ModelResult) -> tuple[tuple[str, str], ...]:
    """Size, cache, speed and the likeliest token, each as a value and what it is."""
    facts = []
    cached = row.kv_bytes and first.kv_bytes and row.kv != first.kv
    if not cached or row.file_bytes != first.file_bytes:
        facts += size_facts(row, first)
    if row.kv_bytes and first.kv_bytes and row.kv != first.kv:
        value, what = _times(first.kv_bytes / row.kv_bytes)
        facts.append((value, f"{what} KV cache".strip()))
    facts += _speed(row, first)
    if (top1 := row.metrics.get(TOP1.name)) is not None:
        facts.append((f"{100 * top1.value:.1f}%", "same tokens"))
    return tuple(facts)


def _speed(row: ModelResult, first: ModelResult) -> list[tuple[str, str]]:
    ours, theirs = row.metrics.get(SPEED), first.metrics.get(SPEED)
    if ours is None or theirs is None or not theirs.value > 0:
        return []
    if differs(ours, theirs):
        return [(f"{number(ours.value / theirs.value)} times", "as fast")]
    if ours.low == ours.high or theirs.low == theirs.high:
        return []  # of one run nothing is known about the noise
    return [("as fast", "within the noise")]


def _kl(row: ModelResult, before: str = "", after: str = "") -> str:
    if (interval := row.metrics.get(KL.name)) is None:
        return ""
    value, span = shown(interval, MetricInfo(KL.title))
    return f"{before}KL {value}{f', {span}' if span else ''}{after}"


def _gains(row: ModelResult, first: ModelResult) -> bool:
    size = _ratio(first.memory_bytes, row.memory_bytes)
    ours, theirs = row.metrics.get(SPEED), first.metrics.get(SPEED)
    faster = ours is not None and theirs is not None and differs(ours, theirs) and ours.value > theirs.value
    return faster or (size is not None and size >= SMALLER)


def _choice(rows: Sequence[ModelResult], indices: Sequence[int]) -> int:
    sizes = {index: rows[index].memory_bytes or math.inf for index in indices}
    near = [index for index in indices if sizes[index] <= _NEAR * min(sizes.values())]
    speeds = {index: rows[index].metrics[SPEED] for index in near if SPEED in rows[index].metrics}
    if speeds:
        fastest = max(speeds.values(), key=lambda speed: speed.value)
        near = [index for index in near if index in speeds and not differs(speeds[index], fastest)]
    return min(near, key=lambda index: (rows[index].metrics[KL.name].value if KL.name in rows[index].metrics
                                        else math.inf, index))


def _names(result: EvalResult) -> list[str]:
    return [name if len(name) <= _NAME else f"…{name[-_NAME + 1:]}" for name in short_names(result.rows)]


def _ratio(before: int | None, after: int | None) -> float | None:
    return before / after if before and after else None


def _alone(result: EvalResult) -> str:
    row, parts = result.rows[0], [megabytes(result.rows[0].file_bytes)]
    for timed in (False, True):
        metric = next(((key, info) for key, info in result.measured.items()
                      if info.per != PER_ITEM and (info.per == PER_RUN) == timed), None)
        if metric and (interval := row.metrics.get(metric[0])) is not None and interval.value != 0:
            title, unit = head(metric[1])
            parts.append(f"{title} {shown(interval, metric[1])[0]} {unit}".rstrip())
    return ", ".join(parts)


def _against(row: ModelResult, first: ModelResult, result: EvalResult) -> str:
    parts = [_said(fact) for fact in _facts(row, first)]
    effect, kl = effect_of_row(row), _kl(row)
    if not kl:  # a plugin's or another metric stands for quality then
        for key, info in result.measured.items():
            if info.per not in (PER_ITEM, PER_RUN) and key in row.metrics and key != TOP1.name:
                value, span = shown(row.metrics[key], info)
                kl = f"{info.title} {value}" + (f" ({span})" if span else "")
                break
    if effect is not None:
        parts.append(f"cost {effect}" + (f" ({kl})" if kl else ""))
    elif kl:
        parts.append(kl)
    return ", ".join(parts) or "nothing to compare"


def _said(fact: tuple[str, str]) -> str:
    return " ".join(filter(None, fact))


def _best(rows: Sequence[ModelResult]) -> list[ModelResult]:
    """The smallest, the fastest and the closest to the reference, in the order of the rows."""
    best = []
    for value in (lambda row: row.memory_bytes,
                  lambda row: -row.metrics[SPEED].value if SPEED in row.metrics else None,
                  lambda row: row.metrics[KL.name].value if KL.name in row.metrics else None):
        known = [(amount, index) for index, row in enumerate(rows) if (amount := value(row)) is not None]
        best += [rows[min(known)[1]]] if known else []
    return [row for row in rows if any(row is other for other in best)]
