"""Prints what a gate came to, in at most a terminal's width."""

from __future__ import annotations

from quantkit.cli.present import table, width, wrapped
from quantkit.evaluate.gate_result import GateCheck, GateResult
from quantkit.report.base import number
from quantkit.units import human_bytes

_MARKS = {True: "ok", False: "FAIL"}


def gate_text(gate: GateResult) -> str:
    """A table of all checks, and a sentence for each that failed or is uncertain."""
    rows = [[_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""), check.variant,
             cut_condition(check), _amount(check.value, check), _interval(check)] for check in gate.checks]
    lines = [table(["", "variant", "condition", "value", "95%"], rows, right=(3,), shrink=1)]
    told = [check for check in gate.checks if not check.passed or check.verdict == "uncertain"]
    if told:
        lines += ["", *(wrapped(_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""),
                                explained(check, gate.strict), 7) for check in told)]
    failed, total = len(gate.failed), len(gate.checks)
    outcome = f"failed: {failed} of {total} checks" if failed else f"passed: {total} " + (
        "check" if total == 1 else "checks")
    return "\n".join([*lines, "", wrapped("gate", outcome + (", strict" if gate.strict else ""), 7)])


def cut_condition(check: GateCheck) -> str:
    """The condition without the variant that stands beside it, at most a third of the line."""
    text = check.condition.rpartition(":")[2]
    room = width() // 3
    return text if len(text) <= room else text[:room - 1] + "…"


def explained(check: GateCheck, strict: bool = False) -> str:
    """One sentence or two: what the value is, by how much it misses, and how sure that is."""
    name, _, _ = check.condition.rpartition(":")[2].partition(check.relation)
    words = [f"{check.variant}: {name.strip()} is {_amount(check.value, check)}"]
    if check.missed_by == 0:
        words.append(f", which equals the limit; {check.relation} excludes it")
    elif check.missed_by is not None:
        words.append(f", which misses {check.relation} {_amount(check.limit, check)} by "
                     f"{_amount(check.missed_by, check, sign=False)}")
    elif not check.passed and check.value is not None:
        words.append(f", which meets {check.relation} {_amount(check.limit, check)}")
    if check.verdict == "uncertain":
        words.append(f". The limit lies within the interval {_interval(check)}, so this is uncertain")
        if check.passed:
            words.append("; it counts as met by its estimate")
        elif check.missed_by is None and strict:
            words.append("; a strict gate demands the whole interval")
    elif check.low is not None or check.high is not None:
        words.append(f". The whole interval {_interval(check)} is on that side")
    words.append(".")
    if check.p is not None:
        words.append(f" Against the reference: {check.test}, {check.items} pairs, p = {number(check.p, 2)}.")
    return "".join(words)


def _interval(check: GateCheck) -> str:
    if check.low is None and check.high is None:
        return "–"
    return f"{_amount(check.low, check, unit=False)} to {_amount(check.high, check, unit=False)}"


def _amount(value: float | None, check: GateCheck, *, unit: bool = True, sign: bool = True) -> str:
    if value is None:
        return "∞"
    if check.unit == "bytes":
        return human_bytes(value)
    plus = "+" if sign and check.relative and check.unit != "x" and value > 0 else ""
    text = plus + number(value)
    if not unit or not check.unit:
        return text
    return text + (check.unit if check.unit in ("%", "x") else f" {check.unit}")
