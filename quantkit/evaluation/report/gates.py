"""Results as JUnit XML, which CI systems show: a test case for each condition of the gate on each variant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from quantkit.evaluation.gates.result import GateCheck, GateResult
from quantkit.evaluation.report.base import Reporter, number
from quantkit.evaluation.result import EvalResult, ModelResult, short_names
from quantkit.support.units import human_bytes

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 can't hold, not even escaped: https://www.w3.org/TR/xml/#charsets"""


def render(result: EvalResult) -> str:
    """``testsuites``: a suite for each variant with its numbers as properties, and in it a case for each
    condition of the gate; without a gate, or where none is for the variant, a case that it was evaluated."""
    gate = result.gate
    suites = ElementTree.Element("testsuites", name="quantkit eval")
    totals = [0, 0]
    for name, row in zip(short_names(result.rows), result.rows):
        checks = [check for check in gate.checks if check.variant == name] if gate else []
        failures = sum(not check.passed for check in checks)
        count = max(1, len(checks))
        totals = [totals[0] + count, totals[1] + failures]
        suite = ElementTree.SubElement(suites, "testsuite", name=_legal(name), tests=str(count),
                                       failures=str(failures), errors="0", skipped="0")
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in _properties(row, result, gate):
            ElementTree.SubElement(properties, "property", name=_legal(key), value=_legal(value))
        for check in checks:
            _case(suite, check, gate is not None and gate.strict)
        if not checks:
            ElementTree.SubElement(suite, "testcase", name="evaluated", classname=_legal(f"quantkit.{name}"))
    suites.attrib |= {"tests": str(totals[0]), "failures": str(totals[1]), "errors": "0"}
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(suite: ElementTree.Element, check: GateCheck, strict: bool) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=_legal(check.condition),
                                  classname=_legal(f"quantkit.{check.variant}"))
    words = _legal(explained(check, strict))
    if not check.passed:
        failure = ElementTree.SubElement(case, "failure", type=check.verdict, message=words)
        failure.text = words
    left_out = {"condition", "variant", "passed"} | ({"items"} if check.p is None else set())
    numbers = check.model_dump(exclude=left_out, exclude_none=True)
    output = ElementTree.SubElement(case, "system-out")
    output.text = _legal("\n".join([words, *(f"{key}: {value}" for key, value in numbers.items()
                                             if value != "")]))


def _properties(row: ModelResult, result: EvalResult, gate: GateResult | None) -> Iterator[tuple[str, str]]:
    yield "model", row.model
    yield "method", row.method
    if gate is not None:
        yield "gate", gate.gate
    yield "fingerprint", result.protocol.fingerprint
    if row.tool is not None:
        yield "tool", row.tool
    if row.bits_per_weight is not None:
        yield "bits_per_weight", f"{row.bits_per_weight:.6g}"
    for key, count in (("file_bytes", row.file_bytes), ("peak_bytes", row.peak_bytes)):
        if count is not None:
            yield key, str(count)
    for key, value in row.metrics.items():
        yield key, f"{value.value:.6g}"
        if math.isfinite(value.low) and math.isfinite(value.high):
            yield f"{key}.95", f"{value.low:.6g} to {value.high:.6g}"


def _legal(text: str) -> str:
    """Without the characters that XML can't hold: each becomes U+FFFD."""
    return _ILLEGAL.sub("\ufffd", text)


REPORTER = Reporter("junit", "junit.xml", render)


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
