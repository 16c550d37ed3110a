"""Tables of quality: all variants, each text, tasks, and what differences mean."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.evaluation.effect import effect_of, effect_of_row
from quantkit.evaluation.keys import EXACT, PER_ITEM, TAILS
from quantkit.evaluation.metric_table import MetricInfo, builtin_infos
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval
from quantkit.evaluation.report.base import (
    TextGrid,
    head,
    kilobytes,
    megabytes,
    number,
    pair,
    shown,
    tasks_of,
    text_name,
)
from quantkit.evaluation.report.frontier import dominated_rows
from quantkit.evaluation.result import EvalResult, ModelResult, PairedDifference, short_names

_LEADING_KEYS = ("decode_tok_s", TOP1.name, KL.name)
_VARIANT_KEYS = (PERPLEXITY.name, "prefill_tok_s", *TAILS, "word_perplexity")
_TEXT_KEYS = (KL.name, "kl_p99", "flips", PERPLEXITY.name)


def info_of(result: EvalResult, key: str) -> MetricInfo:
    return result.metrics.get(key) or builtin_infos().get(key) or result.measured.get(key) or MetricInfo(key)


def variants(result: EvalResult) -> TextGrid:
    """A row a variant: first size, speed, the likeliest token, KL and what it means; then all else."""
    others = [key for key, info in result.measured.items()
              if key not in (*_LEADING_KEYS, *_VARIANT_KEYS) and info.per != PER_ITEM and info.in_tables]
    keys = [key for key in (*_VARIANT_KEYS, *others) if any(key in row.metrics for row in result.rows)]
    heads = ("variant", "size", "decode\ntok/s", "same token", "KL\nnats", "cost",
             *(_head(info_of(result, key)) for key in keys), "bits\na weight", "KV\na token", "KV cache",
             "peak\nmemory", "run by")
    rows = tuple((pair(name, row.method), _size(row),
                  *(pair(*shown(row.metrics.get(key), info_of(result, key))) for key in _LEADING_KEYS),
                  (effect_of_row(row) or "–") if index else "reference",
                  *(pair(*shown(row.metrics.get(key), info_of(result, key))) for key in keys),
                  number(row.bits_per_weight), kilobytes(row.kv_bytes_per_token), megabytes(row.kv_bytes),
                  megabytes(row.peak_bytes), row.tool or "–")
                 for index, (name, row) in enumerate(zip(short_names(result.rows), result.rows)))
    return TextGrid("All variants", heads, rows, (), dominated_rows(result)).filled


def _size(row: ModelResult) -> str:
    """The file's bytes, and below them those of the weights in memory if they are clearly another number."""
    if not row.file_bytes:
        return "–"
    apart = row.weight_bytes is not None and not 0.87 < row.weight_bytes / row.file_bytes < 1.15
    return pair(megabytes(row.file_bytes), f"{megabytes(row.weight_bytes)} in memory" if apart else "")


def tails(result: EvalResult) -> TextGrid | None:
    keys = [key for key in TAILS if any(key in row.metrics for row in result.rows)]
    if not keys:
        return None
    rows = tuple((name, *(shown(row.metrics.get(key), info_of(result, key))[0] for key in keys))
                 for name, row in zip(short_names(result.rows), result.rows))
    return TextGrid("KL by token", ("variant", *(_head(info_of(result, key)) for key in keys)), rows,
                    ("99% of the tokens have a KL of at most the third number. A token flips if another one "
                     "is the likeliest.",) if "kl_p99" in keys else ())


def texts(result: EvalResult) -> list[TextGrid]:
    """For each metric a table with a row a variant and a column a text."""
    names = list(dict.fromkeys(text for row in result.rows for text in row.texts))
    grids = []
    for key in _TEXT_KEYS:
        if not any(key in metrics for row in result.rows for metrics in row.texts.values()):
            continue
        info = info_of(result, key)
        rows = tuple((name, *(pair(*shown(row.texts.get(text, {}).get(key), info)) for text in names))
                     for name, row in zip(short_names(result.rows), result.rows))
        grids.append(TextGrid(", ".join(filter(None, head(info))), ("variant", *map(text_name, names)), rows,
                              (), dominated_rows(result)))
    return grids


def by_text(result: EvalResult) -> TextGrid | None:
    """One row a text: its KL with each variant but the reference, in a column a variant."""
    grids = texts(result)
    if not grids:
        return None
    table = grids[0]
    rows = tuple((text, *(row[column + 1] for row in table.rows[1:] or table.rows))
                 for column, text in enumerate(table.heads[1:]))
    return TextGrid(table.title, ("text", *(row[0] for row in table.rows[1:] or table.rows)), rows)


def differences(result: EvalResult, tasks: bool = True) -> TextGrid | None:
    """A row a variant, a column a metric: what the paired test against the reference allows to say. With
    ``tasks`` also those of tasks."""
    columns = dict.fromkeys((test.metric, test.text) for row in result.rows for test in row.differences
                            if tasks or test.metric not in tasks_of(result))
    if not columns:
        return None
    columns = dict.fromkeys(sorted(columns, key=lambda column: bool(column[1])))  # all texts together first
    heads: dict[tuple[str, str], str] = {}
    for row in result.rows:
        for test in row.differences:
            heads[test.metric, test.text] = pair(metric_name(result, test),
                                                 f"{test.items} pairs" if test.items else "")
    rows = []
    for name, row in zip(short_names(result.rows), result.rows):
        tests = {(test.metric, test.text): test for test in row.differences}
        if tests:
            rows.append((name, *(_tested(result, tests.get(column)) for column in columns)))
    kinds: dict[str, list[str]] = {}
    for row in result.rows:
        for test in row.differences:
            named = kinds.setdefault(test.test, [])
            if test.test and (name := info_of(result, test.metric).title) not in named:
                named.append(name)
    notes = tuple(f"p of {', '.join(names)}: {test}" for test, names in kinds.items() if names)
    return TextGrid("Against the reference, in pairs", ("variant", *(heads[column] for column in columns)),
                    tuple(rows), notes)


def _tested(result: EvalResult, test: PairedDifference | None) -> str:
    if test is None:
        return "–"
    word, _, within = verdict(result, test).partition(" within ")
    lines = [f"within ±{within}"] if within else []
    lines += [change(result, test), *([f"p {number(test.p, 2)}"] if test.p is not None else [])]
    return pair(word, "\n".join(lines))


def metric_name(result: EvalResult, test: PairedDifference) -> str:
    """The metric's title, and the text that it is of."""
    title = info_of(result, test.metric).title
    return f"{title} on {text_name(test.text)}" if test.text else title


def worse(test: PairedDifference) -> str | None:
    """How much worse, in a word, if the test says worse and the metric has words: beyond doubt isn't much."""
    return effect_of(test.metric, test.low, test.high) if test.verdict == "worse" else None


def verdict(result: EvalResult, test: PairedDifference) -> str:
    """What may be said: ``small``, ``worse``, ``indistinguishable within 2%``."""
    if test.verdict != "indistinguishable":
        return worse(test) or test.verdict
    info = info_of(result, test.metric)
    if test.epsilon is None:
        return "indistinguishable"
    factor, unit = (100, "points") if info.unit == "%" else (1, info.unit)
    return f"indistinguishable within {number(factor * test.epsilon, 2)} {unit}".rstrip()


def change(result: EvalResult, test: PairedDifference) -> str:
    """The difference and its 95% interval: ``-1.2 (-2.0 to -0.4)``; shares in points."""
    factor = 100 if info_of(result, test.metric).unit == "%" else 1
    value, low, high = (signed(factor * part) for part in (test.difference, test.low, test.high))
    return f"{value} ({low} to {high})"


def signed(value: float) -> str:
    """A difference: ``+0.25``, ``-1.3``."""
    text = number(value)
    return text if text.startswith("-") or text in ("0", "–") else f"+{text}"


def tasks(result: EvalResult) -> TextGrid | None:
    """A row a variant, a column a task; below a score what the paired test says, else its interval."""
    columns = tasks_of(result)
    if not columns:
        return None
    rows = tuple((name, *(_score(result, row, key, info) for key, info in columns.items()))
                 for name, row in zip(short_names(result.rows), result.rows))
    paired = any(test.metric in columns for row in result.rows for test in row.differences)
    heads = ("variant", *(info.title.replace(" · ", "\n", 1) for info in columns.values()))
    return TextGrid("Tasks", heads, rows, (
        "Below a score are the difference to the reference over the same items, its 95% interval and the "
        "verdict.",) if paired else ())


def _score(result: EvalResult, row: ModelResult, key: str, info: MetricInfo) -> str:
    value, span = shown(row.metrics.get(key), info)
    test = next((test for test in row.differences if test.metric == key), None)
    if test is None:
        return pair(value, span)
    return pair(value, f"{change(result, test)}, {test.verdict}")


@dataclass(frozen=True)
class ExactRow:
    """A variant's KL from the reference in float32 arithmetic, and how far that is above the noise floor;
    ``None``: it is the reference, whose own KL is the noise floor."""

    name: str
    kl: Interval
    above: float | None


def exact_rows(result: EvalResult) -> list[ExactRow]:
    """All variants that were compared with float32 arithmetic; none without a noise floor."""
    floor = result.noise_floor
    return [] if floor is None else [
        ExactRow(name, row.metrics[EXACT], row.metrics[EXACT].value - floor.value if index else None)
        for index, (name, row) in enumerate(zip(short_names(result.rows), result.rows))
        if EXACT in row.metrics]


def floors(result: EvalResult) -> list[str]:
    """A sentence with the noise floor of each metric; none if none was measured."""
    parts = [f"{info_of(result, key).title} {shown(value, info_of(result, key))[0]} "
             f"{head(info_of(result, key))[1]}".rstrip() for key, value in result.floors.items()]
    return [f"Noise floors, which the reference's own arithmetic makes: {', '.join(parts)}"] if parts else []


def _head(info: MetricInfo) -> str:
    return pair(*head(info))
