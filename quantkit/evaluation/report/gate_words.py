"""What a check of a gate came to, in words and numbers."""

from __future__ import annotations

from quantkit.evaluation.gate_result import GateCheck
from quantkit.evaluation.report.base import number
from quantkit.support.units import human_bytes


def explained(check: GateCheck, strict: bool = False) -> str:
    """One sentence or two: what the value is, by how much it misses, and how sure that is."""
    name, _, _ = check.condition.rpartition(":")[2].partition(check.relation)
    words = [f"{check.variant}: {name.strip()} is {amount(check.value, check)}"]
    if check.missed_by == 0:
        words.append(f", which equals the limit; {check.relation} excludes it")
    elif check.missed_by is not None:
        words.append(f", which misses {check.relation} {amount(check.limit, check)} by "
                     f"{_gap(check.missed_by, check)}")
    elif not check.passed and check.value is not None:
        words.append(f", which meets {check.relation} {amount(check.limit, check)}")
    if check.verdict == "uncertain":
        words.append(f". The limit lies within the interval {interval(check)}, so this is uncertain")
        if check.passed:
            words.append("; it counts as met by its estimate")
        elif check.missed_by is None and strict:
            words.append("; a strict gate demands the whole interval")
    elif check.low is not None or check.high is not None:
        words.append(f". The whole interval {interval(check)} is on that side")
    words.append(".")
    if check.p is not None:
        words.append(f" Against the reference: {check.test}, {check.items} pairs, p = {number(check.p, 2)}.")
    return "".join(words)


def interval(check: GateCheck) -> str:
    """``0.00372 to 0.00432``, in the check's unit; ``–`` if it has none."""
    if check.low is None and check.high is None:
        return "–"
    return f"{amount(check.low, check, unit=False)} to {amount(check.high, check, unit=False)}"


def amount(value: float | None, check: GateCheck, *, unit: bool = True, sign: bool = True) -> str:
    """A value of a check, with its unit; ``∞`` for what isn't finite. ``sign``: ``+`` before a rise."""
    if value is None:
        return "∞"
    if check.unit == "bytes":
        return human_bytes(value)
    plus = "+" if sign and check.relative and check.unit != "x" and value > 0 else ""
    text = plus + number(value)
    if not unit or not check.unit:
        return text
    return text + (check.unit if check.unit in ("%", "x") else f" {check.unit}")


def _gap(value: float, check: GateCheck) -> str:
    """A distance between two values of a check: that of two percentages is in points."""
    return f"{number(value)} pp" if check.unit == "%" else amount(value, check, sign=False)
