"""Judges a result by a gate: which variants meet which conditions, and how surely."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.gates.result import GateCheck, GateResult, GateVerdict
from quantkit.evaluation.gates.syntax import (
    BYTES,
    METRICS,
    SPEEDS,
    GateCondition,
    check_sense,
    parse_gate,
)
from quantkit.evaluation.keys import PER_ITEM
from quantkit.evaluation.metric_table import MetricInfo, task_info
from quantkit.evaluation.metrics import Interval, finite
from quantkit.evaluation.paired import DISTANCES, differences, ratio
from quantkit.evaluation.paired_statistics import unpaired
from quantkit.evaluation.result import EvalResult, PairedDifference, names_of, short_names
from quantkit.evaluation.tasks.file import list_tasks
from quantkit.support.errors import UsageError, did_you_mean

_MEETS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class _Estimate:
    """A value to compare with a limit, in the condition's unit, and the paired test beside it."""

    value: float
    low: float | None
    high: float | None
    unit: str
    key: str
    paired: PairedDifference | None = None


def check_gate(result: EvalResult, gate: str | Sequence[GateCondition], *,
               strict: bool = False) -> GateResult:
    """Judge every candidate by every condition.

    A condition is met if the estimate meets it. Where the limit lies within the 95% interval the verdict is
    ``uncertain``, and the estimate decides all the same, unless the gate is strict. A value that isn't finite
    meets nothing.

    Args:
        result: rows with the reference first. A condition without a scope is for all others; for a single
            row, for that.
        gate: the text that was typed, or what :func:`~quantkit.evaluation.gates.syntax.parse_gate` made of
            it.
        strict: the whole interval must meet the limit.

    Raises:
        UsageError: the gate is misspelled, names a variant or a text that isn't there, or a metric that
            wasn't measured.
    """
    conditions = parse_gate(gate) if isinstance(gate, str) else tuple(gate)
    if not result.rows:
        raise UsageError("there is nothing to judge", why="the result has no rows")
    judge = _Judge(result, strict)
    checks = tuple(judge.check(condition, index) for condition in conditions
                   for index in judge.rows_of(condition))
    return GateResult(gate=gate if isinstance(gate, str) else ",".join(c.text for c in conditions),
                      strict=strict, checks=checks)


def check_planned(conditions: Sequence[GateCondition], *, candidates: int, speed: bool,
                  tasks: Sequence[str] = (), texts: Sequence[str] = (),
                  metrics: Sequence[str] = ()) -> None:
    """Find out before anything is measured whether a gate's metrics will be.

    Args:
        conditions: the conditions of the gate.
        candidates: variants beside the reference.
        speed: whether speed is measured.
        tasks: the names of tasks that are run.
        texts: the names of texts that are read.
        metrics: keys of further metrics, such as plugins'.

    Raises:
        UsageError: something won't be measured; it says what to add.
    """
    for condition in conditions:
        what, task = f"{condition.text[:80]!r}: ", condition.key.partition("/")[0]
        if condition.key in (*SPEEDS, "peak_bytes"):
            if not speed:
                raise UsageError(f"{what}speed isn't measured", next="leave out --no-speed")
        elif condition.key not in (*METRICS.values(), *metrics) and task not in tasks:
            if task in (known := [entry.name for entry in list_tasks()]):
                raise UsageError(f"{what}the task isn't run", next=f"add --tasks {task}")
            raise UsageError(f"{what}there is no metric {condition.name[:80]!r}",
                             why=did_you_mean(condition.name, {*METRICS, *metrics, *tasks, *known}))
        if condition.on is not None and texts and condition.on not in texts:
            raise UsageError(f"{what}the text {condition.on[:80]!r} isn't read",
                             why=did_you_mean(condition.on, texts), next="name one of these, or add it")
        if not candidates and (condition.relative or condition.key in DISTANCES):
            raise UsageError(f"{what}there is nothing to compare with the reference",
                             next="name another variant beside it")


class _Judge:
    def __init__(self, result: EvalResult, strict: bool) -> None:
        self.result, self.strict = result, strict
        self.names = short_names(result.rows)
        self._differences: dict[int, list[PairedDifference]] = {}

    def rows_of(self, condition: GateCondition) -> list[int]:
        """Indices of the rows that a condition is for."""
        rows = self.result.rows
        if condition.scope is None:
            return list(range(1, len(rows))) or [0]
        chosen = [index for index, row in enumerate(rows)
                  if condition.scope in names_of(row, self.names[index])]
        if not chosen:
            raise UsageError(f"{condition.text[:80]!r}: there is no variant {condition.scope[:80]!r}",
                             why=did_you_mean(condition.scope, self.names))
        return chosen

    def check(self, condition: GateCondition, index: int) -> GateCheck:
        """One condition on one row."""
        estimate = self._estimate(condition, index)
        meets, value = _MEETS[condition.relation], estimate.value
        ends = [end for end in (estimate.low, estimate.high) if end is not None and not math.isnan(end)]
        met = math.isfinite(value) and meets(value, condition.limit)
        certain = not math.isfinite(value) or all(meets(end, condition.limit) == met for end in ends)
        verdict: GateVerdict = "uncertain" if not certain else "pass" if met else "fail"
        passed = met and (certain or not self.strict)
        missed = abs(value - condition.limit) if not met and math.isfinite(value) else None
        paired = estimate.paired
        return GateCheck(
            condition=condition.text, variant=self.names[index], metric=estimate.key, text=condition.on or "",
            relative=condition.relative, relation=condition.relation, limit=condition.limit,
            unit=estimate.unit, value=finite(value), low=finite(estimate.low), high=finite(estimate.high),
            p=paired.p if paired else None, test=paired.test if paired else "",
            items=paired.items if paired else 0,
            verdict=verdict, passed=passed, missed_by=missed)

    def _estimate(self, condition: GateCondition, index: int) -> _Estimate:
        row = self.result.rows[index]
        reference = self.result.rows[0]
        key = condition.key
        if condition.relative and row is reference:
            raise UsageError(f"{condition.text[:80]!r} compares the reference with itself",
                             next="evaluate another variant beside it")
        if key in BYTES:
            sizes = [getattr(side, key) for side in (row, reference)]
            if sizes[0] is None or (condition.relative and not sizes[1]):
                raise self._missing(condition, index)
            if condition.relative:
                return _Estimate(sizes[0] / sizes[1], None, None, "x", key)
            return _Estimate(sizes[0], None, None, "bytes", key)
        if key in SPEEDS:
            speed, base = row.metrics.get(key), reference.metrics.get(key)
            if speed is None or (condition.relative and base is None):
                raise self._missing(condition, index)
            if condition.relative and base is not None:
                speed = ratio(base, speed)
            return _Estimate(speed.value, speed.low, speed.high, "x" if condition.relative else "tok/s", key)
        return self._quality(condition, index)

    def _quality(self, condition: GateCondition, index: int) -> _Estimate:
        value, key = self._metric(condition, index)
        info = self.result.metrics.get(key) or task_info(key)
        if key == "flips":
            info = MetricInfo("flips", "%", "lower")
        check_sense(condition.text, condition.relation, info.direction)
        share = info.unit == "%"
        paired = self._paired(index, key, condition.on)
        if key == "perplexity" and condition.relative:
            return self._perplexity(condition, index, value, paired)
        if share != (condition.unit == "%") and key != "perplexity":
            raise UsageError(f"{condition.text[:80]!r}: {condition.name} is "
                             + ("a percentage" if share else "no percentage"),
                             next=f"write the limit with{'' if share else 'out'} %")
        factor, unit = (100, "%") if share else (1, info.unit)
        if not condition.relative:
            return _Estimate(factor * value.value, factor * value.low, factor * value.high, unit, key, paired)
        change = self._change(condition, index, value, paired)
        return _Estimate(factor * change.value, factor * change.low, factor * change.high,
                         "pp" if share else unit, key, paired)

    def _change(self, condition: GateCondition, index: int, value: Interval,
                paired: PairedDifference | None) -> Interval:
        if paired is not None:
            return Interval(paired.difference, paired.low, paired.high)
        return unpaired(self._metric(condition, 0)[0], value)

    def _perplexity(self, condition: GateCondition, index: int, value: Interval,
                    paired: PairedDifference | None) -> _Estimate:
        if paired is not None:
            change = Interval(paired.difference, paired.low, paired.high)
        else:
            base, _ = self._metric(condition, 0)
            change = unpaired(_logs(base), _logs(value))
        return _Estimate(_percent(change.value), _percent(change.low), _percent(change.high), "%",
                         "perplexity", paired)

    def _metric(self, condition: GateCondition, index: int) -> tuple[Interval, str]:
        """Its value in a row, and its key. Raises UsageError if it wasn't measured."""
        row = self.result.rows[index]
        metrics = row.metrics
        if condition.on is not None:
            texts = dict(row.texts) or {self.result.protocol.text: row.metrics}
            if condition.on not in texts:
                raise UsageError(f"{condition.text[:80]!r}: the text {condition.on[:80]!r} was not evaluated",
                                 why=did_you_mean(condition.on, texts), next="name one of these, or add it")
            metrics = texts[condition.on]
        key = condition.key
        if key not in metrics and "/" not in key:
            scores = [name for name in metrics if name.partition("/")[0] == key]
            plain = [name for name in scores if name.partition("/")[2] == "acc"]
            if len(scores) > 1 and not plain:
                raise UsageError(f"{condition.text[:80]!r}: {key} has several scores",
                                 next="name one: " + ", ".join(sorted(scores)))
            key = (plain or scores or [key])[0]
        if key == "flips" and key not in metrics and (top1 := metrics.get("top1")):
            return Interval(1 - top1.value, 1 - top1.high, 1 - top1.low), key
        if key not in metrics:
            raise self._missing(condition, index)
        return metrics[key], key

    def _paired(self, index: int, key: str, on: str | None) -> PairedDifference | None:
        if index == 0:
            return None
        row, reference = self.result.rows[index], self.result.rows[0]
        if index not in self._differences:
            self._differences[index] = row.differences or differences(
                reference, row, self.result.metrics, floors=self.result.floors)
        single = len(row.window_means) < 2
        return next((difference for difference in self._differences[index] if difference.metric == key
                     and (difference.text == (on or "") or (single and not difference.text))), None)

    def _missing(self, condition: GateCondition, index: int) -> UsageError:
        """Why there is no value, and what to add."""
        name = condition.name
        key = condition.key
        what = f"{condition.text[:80]!r}: "
        measured = self.result.measured
        tasks = [task.name for task in list_tasks()]
        task = key.partition("/")[0]
        if key in METRICS.values():
            remedy = ("measure speed: leave out --no-speed" if key in (*SPEEDS, "peak_bytes")
                      else "measure quality against a reference: name two variants at least")
            return UsageError(f"{what}{name} was not measured for {self.names[index]}", next=remedy)
        if task in tasks:
            return UsageError(f"{what}{name} was not measured for {self.names[index]}",
                              next=f"add --tasks {task}")
        known = {*METRICS, *measured, *(other.partition("/")[0] for other, info in measured.items()
                                        if info.per == PER_ITEM), *tasks}
        if name in measured:
            return UsageError(f"{what}{name} was not measured for {self.names[index]}",
                              next="limit the condition to a variant that has it: VARIANT:" + name)
        return UsageError(f"{what}there is no metric {name[:80]!r}", why=did_you_mean(name, known))


def _percent(difference: float) -> float:
    """Nats of log-likelihood → percent of perplexity."""
    return 100 * math.expm1(difference) if difference < 700 else math.inf


def _logs(interval: Interval) -> Interval:
    return Interval(*(math.log(end) if end > 0 else -math.inf
                      for end in (interval.value, interval.low, interval.high)))
