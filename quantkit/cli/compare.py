"""``quantkit compare A B``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.present import note, print_json, table, wrapped

if TYPE_CHECKING:
    from quantkit.evaluation.compare import Comparison, MetricChange
    from quantkit.evaluation.metric_table import MetricInfo


@click.command("compare")
@click.argument("before", type=click.Path(path_type=Path), metavar="BEFORE")
@click.argument("after", type=click.Path(path_type=Path), metavar="AFTER")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(before: Path, after: Path, as_json: bool) -> None:
    """Compare two results of `quantkit eval --out`, variant by variant.

    BEFORE and AFTER are results.json files, or the folders that hold them. Variants are matched by name and
    KV setting. Quality is compared only between equal protocols; if they differ, the field is named and the
    exit code is 2. Speed is compared only if the machine and its threads are the same too.
    """
    from quantkit.api.evaluate import compare
    from quantkit.evaluation.results_file import read_results

    second = read_results(after)
    comparison = compare(before, second)
    if as_json:
        print_json(comparison.to_dict())
        return
    click.echo(_text(comparison, second.metrics))
    for side, names in (("BEFORE", comparison.only_before), ("AFTER", comparison.only_after)):
        if names:
            note(wrapped(f"only in {side}", ", ".join(names), 16))
    for text in comparison.notes:
        note(wrapped("note", text))


def _text(comparison: Comparison, infos: dict[str, MetricInfo]) -> str:
    from quantkit.evaluation.report.table import cut

    blocks = []
    for variant in comparison.variants:
        same = {True: ", the same checkpoint", False: ", another checkpoint", None: ""}
        rows = [_row(change, infos) for change in variant.changes]
        blocks.append(cut(variant.name, 50, tail=True) + same[variant.same_checkpoint] + "\n"
                      + table(["  metric", "before", "after", "change", "95%", "p", ""], rows,
                              right=(1, 2, 3, 5), limit=80))
    blocks.append("\n".join([
        wrapped("change", "AFTER less BEFORE. Of perplexity with paired windows in percent; of speeds and "
                          "bytes AFTER over BEFORE, with the range of the timed runs."),
        wrapped("within ε", "The difference is smaller than what counts as none: by default 0.001 nats of "
                            "KL, 0.5% of perplexity, one percentage point of shares."),
        wrapped("unpaired", "Windows or items aren't in both results, so the interval is too wide.")]))
    return "\n\n".join(blocks)


def _row(change: MetricChange, infos: dict[str, MetricInfo]) -> list[str]:
    """The cells of a line."""
    from quantkit.evaluation.effect import effect_of
    from quantkit.evaluation.metric_table import task_info
    from quantkit.evaluation.paired import DISTANCES
    from quantkit.evaluation.report.base import megabytes, number
    from quantkit.evaluation.result import printable

    key = change.metric
    if key in ("file_bytes", "peak_bytes"):
        return ["  file" if key == "file_bytes" else "  peak memory", megabytes(int(change.before)),
                megabytes(int(change.after)), f"{number(change.change)}x", "", "", ""]
    info = infos.get(key) or task_info(key)
    name = info.title if key in infos else key
    title = "  " + printable(f"{change.text}: {name}" if change.text else name)
    if key.endswith("_tok_s"):
        return [title, number(change.before), number(change.after), f"{number(change.change)}x",
                _range(change.low, change.high), "", ""]
    share = info.unit == "%" or (key in DISTANCES and not key.startswith("kl_"))
    shown: Callable[[float], float] = _percent if key == "perplexity" and change.test else (
        lambda value: 100 * value if share else value)
    tail = "%" if shown is _percent else " pp" if share else ""
    value = shown(change.change)
    p = "" if change.p is None else number(change.p, 2)
    verdict = {"indistinguishable": "within ε", None: "unpaired"}.get(change.verdict, change.verdict or "")
    if change.verdict == "worse" and change.low is not None and change.high is not None:
        word = effect_of(key, change.low, change.high)
        verdict += f": {word}" if word else ""
    ends = [None if end is None else shown(end) for end in (change.low, change.high)]
    sides = [number(100 * side) + "%" if share else number(side) for side in (change.before, change.after)]
    return [title, *sides, ("+" if value > 0 else "") + number(value) + tail, _range(*ends), p, verdict]


def _percent(difference: float) -> float:
    """Nats of log-likelihood → percent of perplexity."""
    import math

    return 100 * math.expm1(difference) if difference < 700 else math.inf


def _range(low: float | None, high: float | None) -> str:
    from quantkit.evaluation.report.base import number

    return "" if low is None or high is None else f"{number(low, 2)} to {number(high, 2)}"
