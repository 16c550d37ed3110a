"""The results of a comparison: one row per model, and the protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantkit.evaluation.gates.result import GateResult
from quantkit.evaluation.keys import EXACT, MEASURED
from quantkit.evaluation.metric_table import MetricInfo, builtin_infos, task_info
from quantkit.evaluation.metrics import Interval, finite
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.roofline.result import Roofline
from quantkit.evaluation.speed.results import SpeedSweep
from quantkit.support.errors import UsageError
from quantkit.support.frozen import Frozen
from quantkit.support.html import html_table, paragraphs

Verdict = Literal["better", "worse", "indistinguishable", "undecided"]


class PairedDifference(Frozen):
    """A variant's metric less the reference's, over the same items.

    Attributes:
        metric: key of the metric, such as ``kl_mean`` or ``arc_easy/acc``.
        text: the name of its text; ``""``: all texts, or a task.
        difference: mean over items. Of ``perplexity`` it is that of the negative log-likelihood, in nats:
            exp of it is the ratio of perplexities.
        low, high: its 95% interval.
        p: the paired test's p, two-sided; for a distance from the reference one-sided, against ``epsilon``.
            ``None`` where there is none.
        test: the name of the test: ``McNemar, exact``, ``sign flips over windows``.
        items: the number of pairs.
        epsilon: the difference that counts as none.
        verdict: ``indistinguishable``: the 90% interval lies within ±epsilon (two one-sided tests at 5%);
            ``better`` and ``worse``: the 95% interval excludes 0, that of a distance everything up to
            epsilon; else ``undecided``.
    """

    metric: str
    text: str = ""
    difference: float
    low: float
    high: float
    p: float | None = None
    test: str = ""
    items: int = 0
    epsilon: float | None = None
    verdict: Verdict = "undecided"


class TokenDiff(Frozen):
    """A text, token by token, as two variants see it.

    Attributes:
        text: the name of the text.
        reference, candidate: names of the variants.
        tokens: the tokens as texts, in their order; the first is predicted too.
        kl: nats between what the two predict, for each token.
        loss: nats that the candidate's negative log-likelihood is above the reference's.
        expected: the tokens that the two find likeliest where they disagree, as texts; ``None`` where they
            agree.
    """

    text: str
    reference: str
    candidate: str
    tokens: tuple[str, ...]
    kl: tuple[float, ...]
    loss: tuple[float, ...]
    expected: tuple[tuple[str, str] | None, ...]


VERSION = 1
"""Of the file ``results.json``: what an older quantkit can't read has a higher one."""
PLOTTED = ("kl_mean", "decode_tok_s")
"""What the plot shows unless told otherwise."""


@dataclass
class ModelResult:
    """One model's results.

    Attributes:
        model: its name as the user gave it.
        method: ``bf16``, ``gptq int4 g64 sym``, …
        bits_per_weight: stored bits of all Linears over their parameters; ``None``: a tool that doesn't tell.
        file_bytes: the bytes of all weights on disk; ``None``: there is no file, or a tool that doesn't tell.
        weight_bytes: the bytes of all weights in memory when it runs; ``None``: not known.
        peak_bytes: largest resident set of the speed test's process.
        load_s: seconds that it took to open the model there.
        metrics: by key, with intervals.
        kernels: phase → kernel → how many Linears it runs.
        manifest_sha256: the hash of a checkpoint's manifest.
        answer: a generated text, for those who want to see one.
        kv: the KV setting it ran with; ``None``: no cache was involved in its quality.
        kv_bytes_per_token: codes and scales of one token, all layers and heads.
        kv_bytes: allocated for the KV cache at the end of a window.
        recipe: the recipe that made it; ``None``: it was there.
        tool: other than quantkit that ran it, with its version: ``llama.cpp b9821``.
        texts: name of a text → metrics on it alone; ``metrics`` are over all texts together.
        window_means: name of a text → key → the metric's mean over each window, for paired tests.
        items: ``task/metric`` → the value of each item, for paired tests.
        differences: its differences from the reference, tested in pairs.
        speed: by batch and context; ``None`` if that wasn't measured.
        measured: a kind of measurement (``quality``, ``tasks``, ``speed``) → its time, as ISO 8601.
    """

    model: str
    method: str
    bits_per_weight: float | None
    file_bytes: int | None
    peak_bytes: int | None = None
    load_s: float | None = None
    metrics: dict[str, Interval] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    manifest_sha256: str | None = None
    answer: str | None = None
    kv: str | None = None
    kv_bytes_per_token: int | None = None
    kv_bytes: int | None = None
    recipe: str | None = None
    tool: str | None = None
    texts: dict[str, dict[str, Interval]] = field(default_factory=dict)
    window_means: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    items: dict[str, list[float]] = field(default_factory=dict)
    differences: list[PairedDifference] = field(default_factory=list)
    speed: SpeedSweep | None = None
    measured: dict[str, str] = field(default_factory=dict)
    weight_bytes: int | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of weights and KV cache in memory; where a tool doesn't say, its file's for the weights."""
        weights = self.weight_bytes or self.file_bytes
        return None if weights is None else weights + (self.kv_bytes or 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every metric as a number, and ``intervals`` beside them. A number that is not
        finite (a model so broken that its perplexity overflows) is ``None``: JSON has no other."""
        data: dict[str, Any] = {"model": self.model, "method": self.method,
                                "bits_per_weight": self.bits_per_weight, "file_bytes": self.file_bytes,
                                "peak_bytes": self.peak_bytes, **dict.fromkeys(MEASURED)}
        data |= {name: finite(value.value) for name, value in self.metrics.items()}
        data["intervals"] = {name: [finite(value.low), finite(value.high)]
                             for name, value in self.metrics.items()}
        return data | {"kv": self.kv, "kv_bytes_per_token": self.kv_bytes_per_token,
                       "kv_bytes": self.kv_bytes, "load_s": self.load_s, "kernels": self.kernels,
                       "manifest_sha256": self.manifest_sha256, "answer": self.answer,
                       "recipe": self.recipe, "tool": self.tool, "weight_bytes": self.weight_bytes,
                       "texts": {name: {key: _ends(value) for key, value in metrics.items()}
                                 for name, metrics in self.texts.items()},
                       "window_means": {text: {key: [finite(value) for value in values]
                                               for key, values in means.items()}
                                        for text, means in self.window_means.items()},
                       "items": {key: [finite(value) for value in values]
                                 for key, values in self.items.items()},
                       "differences": [difference.model_dump(mode="json") for difference in self.differences],
                       "speed": self.speed and self.speed.model_dump(mode="json"), "measured": self.measured}


@dataclass(repr=False)
class EvalResult:
    """A comparison. Printed, it is the table that ``quantkit eval`` prints.

    Attributes:
        protocol: how the numbers were made.
        rows: a row a model, the reference first.
        question: the question that the answers in ``rows`` answer.
        metrics: the description of each key of the rows' metrics, in the order in which reports show them;
            plugins' are added to quantkit's own.
        command: the command that gave this; ``None``: there was none.
        plotted: keys of the metrics that a plot shows.
        suite: the name of the suite; ``None``: none was named.
        floors: key of a metric → its noise floor: what arithmetic alone makes of it.
        roofline: the rooflines of models, each without KV settings.
        sensitivity: the nats that 4 bits cost in each Linear: ``("model.layers.0.mlp.up_proj", 0.0012)``.
        diff: tokens of a text with what the reference and another variant make of each.
        other_diffs: the same text with further variants.
        gate: the conditions that were demanded and their verdicts; ``None``: nothing was.
    """

    protocol: Protocol
    rows: list[ModelResult]
    question: str | None = None
    metrics: dict[str, MetricInfo] = field(default_factory=builtin_infos)
    command: str | None = None
    plotted: tuple[str, ...] = PLOTTED
    suite: str | None = None
    floors: dict[str, Interval] = field(default_factory=dict)
    roofline: list[Roofline] = field(default_factory=list)
    sensitivity: list[tuple[str, float]] = field(default_factory=list)
    diff: TokenDiff | None = None
    other_diffs: list[TokenDiff] = field(default_factory=list)
    gate: GateResult | None = None

    @property
    def noise_floor(self) -> Interval | None:
        """KL between float32 arithmetic and the reference's own: what a KL must exceed to mean anything."""
        return self.rows[0].metrics.get(EXACT) if self.rows else None

    @property
    def measured(self) -> dict[str, MetricInfo]:
        """The metrics that some row has a value of, in the order of ``metrics``; then those that it doesn't
        list: scores of tasks, ``task/metric``."""
        keys = dict.fromkeys(key for row in self.rows for key in row.metrics)
        known = {key: info for key, info in self.metrics.items() if key in keys}
        return known | {key: task_info(key) for key in keys if key not in known}

    def __repr__(self) -> str:
        return f"<quantkit.EvalResult: {', '.join(short_names(self.rows))}>"

    def __str__(self) -> str:
        from quantkit.evaluation.report.table import render

        return render(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline, and a row a variant."""
        from quantkit.evaluation.report.base import withheld
        from quantkit.evaluation.report.headline import headline
        from quantkit.evaluation.report.quality_grids import variants

        grid = variants(self)
        legend = ("The first row is the reference. Below a value stands its 95% interval over windows, "
                  "below a speed the range of its runs.")
        return (paragraphs(headline(self)) + html_table(grid.title, grid.heads, grid.rows)
                + paragraphs((*withheld(self), legend, *self.protocol.lines())))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``, a row a variant, with columns ``kl_mean``, ``kl_mean_low``,
        ``kl_mean_high`` and so on. Raises UsageError: pandas isn't installed."""
        try:
            import pandas
        except ImportError:
            raise UsageError("pandas is not installed", why="to_pandas() makes a frame of it",
                             next="pip install pandas") from None

        return pandas.DataFrame([
            {"variant": name, "method": row.method, "file_bytes": row.file_bytes,
             "bits_per_weight": row.bits_per_weight, "peak_bytes": row.peak_bytes}
            | {key + end: getattr(value, field) for key, value in row.metrics.items()
               for end, field in (("", "value"), ("_low", "low"), ("_high", "high"))}
            for name, row in zip(short_names(self.rows), self.rows)])

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        described = {key: info for key, info in self.metrics.items() if key in MEASURED} | self.measured
        floor = self.noise_floor
        return {"version": VERSION, "results": [row.to_dict() for row in self.rows],
                "protocol": self.protocol.to_dict(),
                "noise_floor_kl": floor and {"value": finite(floor.value),
                                             "interval": [finite(floor.low), finite(floor.high)]},
                "metrics": {key: info.to_dict() for key, info in described.items()},
                "question": self.question, "command": self.command, "suite": self.suite,
                "floors": {key: _ends(value) for key, value in self.floors.items()},
                "roofline": [roofline.model_dump(mode="json") for roofline in self.roofline],
                "sensitivity": self.sensitivity, "diff": self.diff and self.diff.model_dump(mode="json"),
                "other_diffs": [diff.model_dump(mode="json") for diff in self.other_diffs],
                "plotted": list(self.plotted), "gate": self.gate and self.gate.model_dump(mode="json")}


def _ends(value: Interval) -> list[float | None]:
    return [finite(value.value), finite(value.low), finite(value.high)]


def short_names(rows: Sequence[ModelResult]) -> list[str]:
    """A name for each row, on one line: its recipe, or the last part of its model's path or name. Models that
    share that get more of theirs. Another tool's name stands before, and its method follows where it runs one
    model in several ways. Where the KV cache was varied or compressed, its setting follows."""
    recipes: dict[str, set[str]] = {}
    for row in rows:
        if row.recipe:
            recipes.setdefault(row.recipe, set()).add(row.model)
    named = [row.recipe if row.recipe and len(recipes[row.recipe]) == 1 else None for row in rows]
    paths = {row.model: Path(row.model).parts or (row.model,) for row, name in zip(rows, named) if not name}
    short = {}
    for model, parts in paths.items():
        depth = 1
        while depth < len(parts) and sum(other[-depth:] == parts[-depth:] for other in paths.values()) > 1:
            depth += 1
        short[model] = str(Path(*parts[-depth:]))
    names = [(f"{row.tool.split()[0]} " if row.tool else "") + (name or short[row.model])
             for row, name in zip(rows, named)]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [printable(f"{name} {row.method}" if row.tool and name in repeated else name)
            + (f" kv {row.kv}" if row.kv is not None else "") for row, name in zip(rows, names)]


def names_of(row: ModelResult, short: str) -> frozenset[str]:
    """Everything that a person may call a row: the name that reports show, the same without its KV setting,
    its recipe, its model, and the last part of that. Another tool's row has the first alone: the model may be
    a row of quantkit's too."""
    if row.tool:
        return frozenset({short})
    base = short.removesuffix(f" kv {row.kv}")
    names = {base, row.model, Path(row.model).name, row.recipe or base}
    if row.kv is not None:
        names |= {f"{name} kv {row.kv}" for name in names}
    return frozenset(names | {short} - {""})


def printable(name: str) -> str:
    """A stranger's text on one line, without what XML can't hold and a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(name.split()))
