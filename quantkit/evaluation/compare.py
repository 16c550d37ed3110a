"""Compares two finished results, variant by variant, where their protocols allow it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from quantkit.evaluation.keys import PER_RUN
from quantkit.evaluation.metric_table import task_info
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.paired import DISTANCES, differences, ratio
from quantkit.evaluation.paired_statistics import unpaired
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.result import (
    EvalResult,
    ModelResult,
    PairedDifference,
    Verdict,
    printable,
    short_names,
)
from quantkit.support.errors import UsageError
from quantkit.support.html import html_table, paragraphs

_MACHINE = ("cpu", "gpu", "threads", "prefill", "decode", "batch")
"""Of a protocol: what decides speed."""
_VERSIONS = ("quantkit", "torch")


@dataclasses.dataclass(frozen=True)
class MetricChange:
    """One metric of one variant in two results.

    Attributes:
        metric: its key; ``file_bytes`` and ``peak_bytes`` too.
        text: the text that was scored; ``""``: all together, or none.
        before, after: its values in the first and the second result.
        change: after less before; of perplexity, where windows are paired, the difference of the negative
            log-likelihoods in nats; of speeds and bytes the ratio.
        low, high: the change's 95% interval, of speeds the range; ``None``: it has none.
        p, test, epsilon, verdict: of the paired comparison, as of a
            :class:`~quantkit.evaluation.result.PairedDifference`; ``None`` and ``""`` where nothing is
            paired: then the interval is that of two unrelated values, and too wide.
    """

    metric: str
    text: str
    before: float
    after: float
    change: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    test: str = ""
    epsilon: float | None = None
    verdict: Verdict | None = None


@dataclasses.dataclass(frozen=True)
class VariantChange:
    """A variant that both results have.

    Attributes:
        name: its name in reports.
        kv: its KV setting.
        same_checkpoint: whether both are of one manifest; ``None``: one of them has none.
        changes: the changes of all metrics that both have.
    """

    name: str
    kv: str | None
    same_checkpoint: bool | None
    changes: tuple[MetricChange, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Two results side by side.

    Attributes:
        fingerprint: the fingerprint that both have.
        variants: the variants that both have, in the second's order.
        only_before, only_after: names of those that one has.
        notes: sentences about what isn't compared, and why; and about versions that differ.
    """

    fingerprint: str
    variants: tuple[VariantChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<quantkit.Comparison: {', '.join(variant.name for variant in self.variants)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: a row a metric of each variant."""
        rows = [(variant.name, f"{change.text}: {change.metric}" if change.text else change.metric,
                 *(f"{value:.4g}" for value in (change.before, change.after, change.change)),
                 "" if change.low is None else f"{change.low:.2g} to {change.high:.2g}",
                 change.verdict or "") for variant in self.variants for change in variant.changes]
        heads = ("variant", "metric", "before", "after", "change", "95%", "")
        return html_table("After less before", heads, rows) + paragraphs(self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a number that isn't finite is ``None``."""
        data: dict[str, Any] = _finite(dataclasses.asdict(self))
        return data


def compare_results(before: EvalResult, after: EvalResult) -> Comparison:
    """Match the variants of two results and compare what both measured.

    Quality is compared if the fingerprints are equal, and speed if machine and speed test are.

    Raises:
        UsageError: the fingerprints differ (the field is named), the references do, or no variant is in both.
    """
    _check_comparable(before.protocol, after.protocol)
    notes = [f"{name} {getattr(before.protocol, name)} → {getattr(after.protocol, name)}"
             for name in _VERSIONS if getattr(before.protocol, name) != getattr(after.protocol, name)]
    fields = [name for name in _MACHINE if getattr(before.protocol, name) != getattr(after.protocol, name)]
    speeds = bool(before.protocol.repeats and after.protocol.repeats)
    if speeds and fields:
        notes.append("speed is not compared: " + "; ".join(
            f"{name} {getattr(before.protocol, name)} → {getattr(after.protocol, name)}" for name in fields))
    first = _by_name(before)
    second = _by_name(after)
    _check_one_reference(first, second)
    common = [key for key in second if key in first]
    if not common:
        raise UsageError("the two results have no variant in common",
                         why=f"{', '.join(first) or 'none'}; {', '.join(second) or 'none'}"[:300],
                         next="compare results of the same recipes and KV settings")
    variants = tuple(_variant(name, first[name], second[name], after, speeds and not fields)
                     for name in common)
    for name in common:
        notes += _unlike_items(name, first[name], second[name])
    return Comparison(after.protocol.fingerprint, variants, tuple(n for n in first if n not in second),
                      tuple(n for n in second if n not in first), tuple(map(printable, notes)))


def _check_comparable(before: Protocol, after: Protocol) -> None:
    if before.fingerprint == after.fingerprint:
        return
    first, second = before.quality, after.quality
    fields = [name for name in first | second if first.get(name) != second.get(name) and name != "stride"]
    shown = {name: (_short(first.get(name)), _short(second.get(name))) for name in fields}
    if "text_sha256" in shown:
        shown.pop("tokens_sha256", None)  # which follows from it
        shown["text"] = (f"{_short(before.text)} (sha256 {_short(before.text_sha256[:12])})",
                         f"{_short(after.text)} (sha256 {_short(after.text_sha256[:12])})")
        del shown["text_sha256"]
    raise UsageError(
        f"the results can't be compared: their protocols differ in {', '.join(shown) or 'an unknown field'}",
        why="\n".join(f"{name}: {a} and {b}" for name, (a, b) in shown.items()) or None,
        next="run quantkit eval with the same settings for both")


def _check_one_reference(first: dict[str, ModelResult], second: dict[str, ModelResult]) -> None:
    """KL, flips and top-1 are of the reference: to another one they are other numbers."""
    ours, theirs = next(iter(first.items()), None), next(iter(second.items()), None)
    if ours and theirs and (ours[0], ours[1].method) != (theirs[0], theirs[1].method):
        raise UsageError("the results can't be compared: their references differ", next=(
            "run quantkit eval with the same first model, and first KV setting, for both"),
            why=printable(f"reference: {ours[0]} ({ours[1].method}) and {theirs[0]} ({theirs[1].method})"))


def _by_name(result: EvalResult) -> dict[str, ModelResult]:
    return dict(zip(short_names(result.rows), result.rows))


def _variant(name: str, before: ModelResult, after: ModelResult, result: EvalResult,
             speeds: bool) -> VariantChange:
    pairs = {(pair.metric, pair.text): pair for pair in differences(
        before, after, result.metrics, floors=result.floors)}
    changes = []
    for key in ("file_bytes", *(("peak_bytes",) if speeds else ())):
        old, new = getattr(before, key), getattr(after, key)
        if old and new:
            changes.append(MetricChange(key, "", float(old), float(new), new / old))
    for key, value in after.metrics.items():
        if key in before.metrics:
            info = result.metrics.get(key) or task_info(key)
            if info.per != PER_RUN:
                changes.append(_change(key, "", before.metrics[key], value, pairs.get((key, ""))))
            elif speeds:
                change = ratio(before.metrics[key], value)
                changes.append(MetricChange(key, "", before.metrics[key].value, value.value, change.value,
                                            change.low, change.high))
    for text, metrics in after.texts.items():
        for key, value in metrics.items():
            if len(after.texts) > 1 and (stored := before.texts.get(text, {}).get(key)):
                changes.append(_change(key, text, stored, value, pairs.get((key, text))))
    same = (None if before.manifest_sha256 is None or after.manifest_sha256 is None
            else before.manifest_sha256 == after.manifest_sha256)
    # what the reference's distance from itself is in both results tells nothing
    shown = (change for change in changes
             if not change.before == change.after == DISTANCES.get(change.metric, math.nan))
    return VariantChange(name, after.kv, same, tuple(shown))


def _change(key: str, text: str, before: Interval, after: Interval,
            pair: PairedDifference | None) -> MetricChange:
    if pair is not None:
        return MetricChange(key, text, before.value, after.value, pair.difference, pair.low, pair.high,
                            pair.p, pair.test, pair.epsilon, pair.verdict)
    change = unpaired(before, after)
    return MetricChange(key, text, before.value, after.value, change.value, change.low, change.high)


def _unlike_items(name: str, before: ModelResult, after: ModelResult) -> list[str]:
    return [f"{name}: {key[:80]} has {len(before.items[key])} and {len(items)} items, so it isn't paired"
            for key, items in after.items.items() if key in before.items
            and len(before.items[key]) != len(items)]


def _short(value: object) -> str:
    text = "none" if value is None else printable(str(value))
    return text if len(text) <= 40 else text[:12] + "…"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not abs(data) < float("inf") else data
