"""Reads a gate as it is typed: ``kl<0.01,flips<2%,int4:arc_easy>-1%,decode>1.2x``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from quantkit.support.errors import UsageError
from quantkit.support.units import bytes_of

Relation = Literal["<", "<=", ">", ">="]
METRICS = {"kl": "kl_mean", "kl_median": "kl_median", "kl_p99": "kl_p99", "kl_p999": "kl_p999",
           "flips": "flips", "top1": "top1", "perplexity": "perplexity", "prefill": "prefill_tok_s",
           "decode": "decode_tok_s", "file": "file_bytes", "size": "file_bytes", "peak": "peak_bytes"}
"""Names in a gate → keys of results, which may be written too."""
BYTES = ("file_bytes", "peak_bytes")
SPEEDS = ("prefill_tok_s", "decode_tok_s")
_SHARES = ("flips", "top1")
EXAMPLE = '--gate "kl<0.01,flips<2%,arc_easy>-1%,decode>1.2x"'
_CONDITION = re.compile(r"(?:(?P<scope>[^<>]+):)?(?P<name>[A-Za-z][\w./,-]*)(?:@(?P<text>[^<>@]+))?"
                        r"\s*(?P<relation><=|>=|<|>)\s*(?P<value>\S+)", re.ASCII)
_NUMBER = re.compile(r"(?P<sign>[+-]?)(?P<digits>\d{1,12}(?:\.\d{1,12})?(?:e-?\d{1,2})?)(?P<unit>%|x|)",
                     re.ASCII)


@dataclass(frozen=True)
class GateCondition:
    """A condition.

    Attributes:
        text: the text of the condition.
        name: the metric's name, as it was written.
        key: the metric's key in results; a task without a metric has its name alone.
        relation: the relation that a value must have to the limit.
        limit: the bound: shares and percentages as numbers of percent, sizes in bytes.
        unit: ``%``, ``x``, ``bytes`` or ``""``.
        relative: whether the limit is of the change from the reference: it has a sign, or ``x``.
        scope: name of the variant that it is for; ``None``: all.
        on: name of the text that it is of; ``None``: all together.
    """

    text: str
    name: str
    key: str
    relation: Relation
    limit: float
    unit: str = ""
    relative: bool = False
    scope: str | None = None
    on: str | None = None


def parse_gate(gate: str) -> tuple[GateCondition, ...]:
    """The conditions of a gate.

    ``[VARIANT:]METRIC[@TEXT]RELATION LIMIT``, separated by commas. A limit with a sign (``-1%``, ``+1%``) or
    with ``x`` is of the change from the reference.

    Raises:
        UsageError: it is empty or misspelled, or a limit doesn't fit its metric.
    """
    parts = [part.strip() for part in _split(gate)]
    if not gate.strip() or not all(parts):
        raise UsageError("the gate has an empty condition" if gate.strip() else "the gate is empty",
                         next=EXAMPLE)
    conditions = tuple(_condition(part) for part in parts)
    for index, condition in enumerate(conditions):
        if condition in conditions[:index]:
            raise UsageError(f"the gate has {condition.text!r} twice", next="leave one of them out")
    return conditions


def _split(gate: str) -> list[str]:
    """At commas outside of parentheses, which KV settings have; and not at that of a task's filter, which no
    relation stands before."""
    parts, depth = [""], 0
    for char in gate:
        depth += (char == "(") - (char == ")")
        if char == "," and depth <= 0 and not _filter(parts[-1]):
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _filter(part: str) -> bool:
    return "/" in part and not set("<>") & set(part)


def _condition(text: str) -> GateCondition:
    if (match := _CONDITION.fullmatch(text)) is None:
        raise UsageError(f"{text[:80]!r} is no condition of a gate",
                         why="a condition is METRIC<LIMIT or METRIC>LIMIT, with VARIANT: before it and @TEXT "
                             "behind the metric where it is not for all", next=EXAMPLE)
    name = match["name"]
    relation = cast(Relation, match["relation"])
    value = match["value"]
    key = METRICS.get(name, name)
    limit = _limit(text, name, key, value)
    if match["text"] and (key in (*BYTES, *SPEEDS) or "/" in key):
        raise UsageError(f"{text[:80]!r}: {name} is not of a text", next=f"write {name} without @")
    check_sense(text, relation, _direction(key))
    scope = match["scope"]
    return GateCondition(text, name, key, relation, limit.value, limit.unit, limit.relative,
                         scope and scope.strip(),
                         match["text"] and match["text"].strip())


class _Limit(NamedTuple):
    """A limit's number, its unit, and whether it is of the change from the reference."""

    value: float
    unit: str
    relative: bool


def _limit(text: str, name: str, key: str, value: str) -> _Limit:
    """Raises UsageError: the metric has no such limit."""

    def wrong(why: str, example: str) -> UsageError:
        return UsageError(f"{text[:80]!r}: {value[:40]!r} is no limit for {name}", why=why,
                          next=f"for example {name}{example}")

    if key in BYTES and (size := bytes_of(value)):
        return _Limit(float(size), "bytes", False)
    if (match := _NUMBER.fullmatch(value)) is None:
        raise wrong("it is no number with %, x or a unit of bytes" if key in BYTES else
                    "it is no number, with % or x where the metric takes that",
                    "<0.5x" if key in BYTES else "<0.02")
    sign = match["sign"]
    unit = match["unit"]
    limit = float(match["sign"] + match["digits"])
    if not math.isfinite(limit):
        raise wrong("it is too large", "<1")
    if key in BYTES:
        if unit != "x" or sign:
            raise wrong("a size is compared with bytes (100MB), or with the reference's (0.5x)", "<0.5x")
    elif key in SPEEDS:
        if unit == "%" or sign:
            raise wrong("a speed is compared with tokens a second (20), or with the reference's (1.2x)",
                        ">1.2x")
    elif unit == "x":
        raise wrong("only sizes and speeds are compared as a multiple of the reference's", "<0.02")
    elif key == "perplexity":
        if (unit == "%") != bool(sign):
            raise wrong("a perplexity is compared with a number (30), or with the reference's by a sign and "
                        "% (+1%)", "<+1%")
    elif key.startswith("kl_"):
        if unit or sign:
            raise wrong("KL is in nats, and is of the reference already", "<0.01")
    elif key in _SHARES and not unit:
        if limit > 1:
            raise wrong("a share is a percentage or a number up to 1", f"<{match['digits']}%")
        limit, unit = 100 * limit, "%"
    if key in _SHARES and sign:
        raise wrong("it is of the reference already", "<2%" if key == "flips" else ">98%")
    return _Limit(limit, unit, unit == "x" or bool(sign))


def check_sense(text: str, relation: str, direction: str) -> None:
    """A gate that a ruined model passes guards nothing.

    Args:
        text: the condition, as it was written.
        relation: the relation of its value to its limit.
        direction: the better values of the metric: ``lower``, ``higher``, or ``""``: neither.

    Raises:
        UsageError: it demands a bad value.
    """
    wanted = {"lower": "<", "higher": ">"}.get(direction, relation[0])
    if relation[0] != wanted:
        raise UsageError(f"{text[:80]!r} demands a bad value",
                         why=f"the metric is better when it is {direction}",
                         next=f'--gate "{text.replace(relation[0], wanted)[:80]}"')


def _direction(key: str) -> str:
    """Of the metrics that a gate knows before anything is measured."""
    if key in (*BYTES, "perplexity", "flips") or key.startswith("kl_"):
        return "lower"
    return "higher" if key in (*SPEEDS, "top1") else ""
