"""The registered metrics that can be used, and what reports are told about each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.evaluation.keys import EXACT, PER_ITEM, PER_RUN, TAILS, WORD_PERPLEXITY, reason_against_key
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval, Metric
from quantkit.evaluation.tasks.score import PROPORTIONS
from quantkit.plugins.manager import BUILTIN, registry
from quantkit.plugins.registry import described
from quantkit.support.errors import QuantkitError

TITLE_LIMIT = 24


@dataclass(frozen=True)
class MetricInfo:
    """What reports know about a key of results.

    Attributes:
        title: head of its column.
        unit: ``"%"``: values are shares, and shown times 100.
        direction: whether ``lower`` or ``higher`` values are better; ``""``: neither.
        per: ``token``, ``window``, ``run``, ``timed run`` or ``item``.
        owner: the distribution that registered it.
        in_tables: whether it has a column in tables; the others are in a place of their own.
    """

    title: str
    unit: str = ""
    direction: str = ""
    per: str = "token"
    owner: str = BUILTIN
    in_tables: bool = True

    def to_dict(self) -> dict[str, str]:
        """Plain data."""
        return {"title": self.title, "unit": self.unit, "direction": self.direction, "per": self.per,
                "distribution": self.owner}


@dataclass(frozen=True)
class RegisteredMetric:
    """A metric and the distribution that it is of."""

    metric: Metric
    owner: str

    @property
    def builtin(self) -> bool:
        """Whether it is one of quantkit's, which are trusted."""
        return self.owner == BUILTIN

    def info(self) -> MetricInfo:
        """What reports are told."""
        metric = self.metric
        return MetricInfo(metric.title or metric.name, metric.unit, metric.direction, metric.per, self.owner)


def left_out(kind: str, name: str, owner: str, problem: Exception | str) -> None:
    """Warn that something of a plugin costs itself."""
    warnings.warn(f"{kind} {name!r} of {owner} was left out: {reason_of(problem)}", stacklevel=3)


def reason_of(problem: Exception | str) -> str:
    """A cause in one line."""
    if isinstance(problem, QuantkitError):
        text = f"{problem.what}: {problem.why}" if problem.why else problem.what
    elif isinstance(problem, Exception):
        text = described(problem).removeprefix("ValueError: ")  # which our own checks raise, with a sentence
    else:
        text = problem
    return " ".join(text.split())[:300]


def registered_metrics() -> list[RegisteredMetric]:
    """All metrics that can be measured: quantkit's first, then plugins' in the order of registration.

    A plugin's metric with a wrong declaration or a key that is taken is left out, with one warning.
    """
    registered = registry("metrics")
    everything = [(name, metric, registered.entry(name).owner) for name, metric in registered.usable()]
    table = [RegisteredMetric(metric, owner) for _, metric, owner in everything if owner == BUILTIN]
    taken: dict[str, str] = {}
    for name, metric, owner in everything:
        if owner == BUILTIN:
            continue
        problem = reason_against_metric(metric)
        if problem is None and metric.name in taken:
            problem = f"its key {metric.name!r} is that of a metric of {taken[metric.name]}"
        if problem is not None:
            left_out("metric", name, owner, problem)
            continue
        taken[metric.name] = owner
        table.append(RegisteredMetric(metric, owner))
    return table


def summarized(metrics: Mapping[str, RegisteredMetric], means: Mapping[str, Any]) -> dict[str, Interval]:
    """Values with intervals from the means of windows, by key. A plugin's metric whose values make no sense
    is left out, with one warning.

    Raises:
        ValueError: a built-in's values make no sense.
    """
    values = {}
    for name, windows in means.items():
        try:
            values[name] = metrics[name].metric.summarize(windows)
        except Exception as error:
            if metrics[name].builtin:
                raise
            left_out("metric", name, metrics[name].owner, error)
    return values


def reason_against_metric(metric: Metric) -> str | None:
    """What is wrong with a plugin's declaration of a metric, without calling it; ``None``: nothing."""
    fields = vars(metric)
    if (problem := reason_against_key(fields["name"])) is not None:
        return problem
    for name in ("score", "of_mean"):
        if not callable(fields[name]):
            return f"its {name} is a {type(fields[name]).__name__}, which can't be called"
    for name, allowed in (("per", ("token", "window", "run")), ("direction", ("lower", "higher", ""))):
        if fields[name] not in allowed:
            return f"its {name} is {fields[name]!r:.40}; it must be one of {', '.join(map(repr, allowed))}"
    for name in ("title", "unit"):
        text = fields[name]
        if not isinstance(text, str) or len(text) > TITLE_LIMIT or not text.isprintable():
            return (f"its {name} is {text!r:.60}; it must be a text of at most {TITLE_LIMIT} printable "
                    "characters")
    return None


def builtin_infos() -> dict[str, MetricInfo]:
    """What quantkit itself measures, in the order in which reports show it."""
    quality = {metric.name: RegisteredMetric(metric, BUILTIN).info() for metric in (KL, TOP1, PERPLEXITY)}
    decode = MetricInfo("decode", "tok/s", "higher", PER_RUN)
    return {KL.name: quality[KL.name], TOP1.name: quality[TOP1.name], "decode_tok_s": decode,
            PERPLEXITY.name: quality[PERPLEXITY.name],
            "prefill_tok_s": MetricInfo("prefill", "tok/s", "higher", PER_RUN),
            WORD_PERPLEXITY: MetricInfo("perplexity a word", "", "lower", in_tables=False),
            EXACT: MetricInfo("KL from float32", "nats", "lower", in_tables=False),
            **{key: MetricInfo(title, unit, "lower", in_tables=False) for key, title, unit in zip(
                TAILS, ("KL median", "KL 99%", "KL 99.9%", "flips"), ("nats", "nats", "nats", "%"))}}


def task_info(key: str) -> MetricInfo:
    """Of a task's score: ``arc_easy/acc``. Shares are better when higher, perplexities when lower."""
    share = key.rpartition("/")[2].partition(",")[0] in PROPORTIONS
    return MetricInfo(key.replace("/", " · "), "%" if share else "", "higher" if share else "lower", PER_ITEM)
