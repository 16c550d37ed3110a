"""Prints what a gate came to, in at most a terminal's width."""

from __future__ import annotations

from quantkit.cli.present import table, width, wrapped
from quantkit.evaluation.gates.result import GateCheck, GateResult
from quantkit.evaluation.report.gates import amount, explained, interval

_MARKS = {True: "ok", False: "FAIL"}


def gate_text(gate: GateResult) -> str:
    """A table of all checks, and a sentence for each that failed or is uncertain."""
    rows = [[_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""), check.variant,
             _condition(check), amount(check.value, check), interval(check)] for check in gate.checks]
    lines = [table(["", "variant", "condition", "value", "95%"], rows, right=(3,), shrink=1)]
    told = [check for check in gate.checks if not check.passed or check.verdict == "uncertain"]
    if told:
        lines += ["", *(wrapped(_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""),
                                explained(check, gate.strict), 7) for check in told)]
    failed, total = len(gate.failed), len(gate.checks)
    outcome = f"failed: {failed} of {total} checks" if failed else f"passed: {total} " + (
        "check" if total == 1 else "checks")
    return "\n".join([*lines, "", wrapped("gate", outcome + (", strict" if gate.strict else ""), 7)])


def _condition(check: GateCheck) -> str:
    """The condition without the variant that stands beside it, at most a third of the line."""
    text = check.condition.rpartition(":")[2]
    room = width() // 3
    return text if len(text) <= room else text[:room - 1] + "…"
