"""What a gate came to: each of its conditions on each variant."""

from __future__ import annotations

from typing import Literal

from quantkit.support.frozen import Frozen

GateVerdict = Literal["pass", "fail", "uncertain"]


class GateCheck(Frozen):
    """One condition on one variant. Numbers are in the condition's unit.

    Attributes:
        condition: the text of the condition.
        variant: name of the row, as reports show it.
        metric: key of the metric.
        text: the text that was scored; ``""``: all texts, or none.
        relative: whether the reference's value was taken off, or divided by for ``x``.
        relation: the relation that ``value`` must have to ``limit``.
        limit: the bound of the condition.
        unit: ``nats``, ``%``, ``pp`` (percentage points), ``x`` (times the reference), ``bytes``, ``tok/s``,
            or that of the metric.
        value: the estimate; ``None``: it isn't finite.
        low, high: its 95% interval, of speeds the range of the timed runs; ``None``: it has none, or an end
            isn't finite.
        p, test, items: of the metric's paired test against the reference, where there is one.
        verdict: ``pass`` and ``fail``: the whole interval is on that side of the limit, or there is none;
            ``uncertain``: the limit lies within it.
        passed: whether it counts as met: by the estimate, with a strict gate by the whole interval.
        missed_by: how far the estimate is on the wrong side of the limit; ``None`` if it isn't.
    """

    condition: str
    variant: str
    metric: str
    text: str = ""
    relative: bool = False
    relation: Literal["<", "<=", ">", ">="]
    limit: float
    unit: str = ""
    value: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    test: str = ""
    items: int = 0
    verdict: GateVerdict
    passed: bool
    missed_by: float | None = None


class GateResult(Frozen):
    """A gate and what it came to.

    Attributes:
        gate: the text of the gate.
        strict: whether the whole 95% interval must meet each limit.
        checks: conditions in their order, each on its variants in theirs.
    """

    gate: str
    strict: bool = False
    checks: tuple[GateCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every condition is met by every variant."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[GateCheck, ...]:
        """The checks that aren't."""
        return tuple(check for check in self.checks if not check.passed)
