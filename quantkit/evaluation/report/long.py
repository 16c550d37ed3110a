"""Reports on a comparison of long contexts: a table of at most 80 columns, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from quantkit.evaluation.long.positions import PositionBucket
from quantkit.evaluation.long.result import LongResult, RecordedAnswer
from quantkit.evaluation.report.base import TextGrid, kilobytes, megabytes, number, spread
from quantkit.evaluation.report.folder import write_file
from quantkit.evaluation.report.markdown_tables import plain
from quantkit.evaluation.report.markdown_tables import table as markdown_table
from quantkit.evaluation.report.terminal import WIDTH, cut, fold, grid_lines, title_line


def table(result: LongResult) -> str:
    """The report as a table for the terminal."""
    out = [cut(f"{result.model} · {result.method}: KV settings at length", WIDTH), ""]
    for grid in grids(result):
        out += [title_line(grid.title), *grid_lines(grid)]
    for line in result.protocol.lines():
        out += fold(line)
    return "\n".join(out) + "\n"


def markdown(result: LongResult) -> str:
    out = [f"# {plain(result.model)} ({plain(result.method)}): KV settings at length", ""]
    for grid in grids(result):
        names, *columns = ([plain(head), *map(_marked, cells)]
                           for head, *cells in zip(grid.heads, *grid.rows))
        out += [f"## {plain(grid.title)}", "", *markdown_table(
            names[0], names[1:], [(head, cells) for head, *cells in columns])]
        out += [*(f"{plain(note)}." for note in grid.notes), ""]
    return "\n".join([*out, "## Protocol", "", *(f"- {plain(line)}" for line in result.protocol.lines()), ""])


def _marked(cell: str) -> str:
    """Escaped; the spaces before a row's name that belongs to the row above would be dropped."""
    return ("&nbsp;&nbsp;" if cell.startswith("  ") else "") + plain(cell)


def as_json(result: LongResult) -> str:
    """One object: ``protocol``, ``settings``, ``full_cache_solves``, ``against_full_cache``, ``replies``,
    ``positions``, ``generated``."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


FILES: Mapping[str, Callable[[LongResult], str]] = {"report.md": markdown, "results.json": as_json}


def write(result: LongResult, folder: Path) -> list[Path]:
    """Write ``report.md`` and ``results.json``; each replaces an older one whole.

    Raises:
        QuantkitError: the folder can't be written.
    """
    return [write_file(folder, name, render(result).encode()) for name, render in FILES.items()]


def grids(result: LongResult) -> Iterator[TextGrid]:
    """All results as grids, the full cache's own answers first."""
    if result.tasks:
        yield _solved(result)
    yield _memory(result)
    for task in result.tasks:
        yield _task(result, task)
        yield _against(result, task)
    if result.buckets:
        yield _buckets("by position: tokens before the query", _by_kv(result.buckets),
                       ("perplexity; KL and top-1 against the full cache (intervals: in the JSON)",))
    if result.drifts:
        yield _buckets("generated: tokens since the prompt's end",
                       [(drift.kv, drift.buckets) for drift in result.drifts],
                       ("the full cache writes greedily, every setting is fed the same text token by token",))
        yield _first(result)


def _solved(result: LongResult) -> TextGrid:
    rows = []
    for task in result.tasks:
        replies = result.of(result.variants[0], task)
        rows.append((task, *(_score([reply for reply in replies if reply.length == length])
                             for length in result.protocol.lengths)))
    heads = ("task", *map(str, result.protocol.lengths))
    return TextGrid("what the full cache answers", heads, tuple(rows),
                    ("right answers of all questions; where the full cache fails, settings can't be judged",))


def _memory(result: LongResult) -> TextGrid:
    lengths = [length for length in result.protocol.lengths if length in result.variants[0].bytes]
    speeds = {drift.kv: number(drift.decode_tok_s) for drift in result.drifts}
    columns = [("setting", [variant.label for variant in result.variants]),
               ("KV/token", [kilobytes(variant.bytes_per_token) for variant in result.variants])]
    columns += [(f"KV {length}", [megabytes(variant.bytes.get(length)) for variant in result.variants])
                for length in lengths]
    read = any(variant.text_bytes is not None for variant in result.variants)
    if read:
        columns.append(("KV text", [megabytes(variant.text_bytes) for variant in result.variants]))
    if speeds:
        columns.append(("decode tok/s", [speeds.get(variant.kv, "–") for variant in result.variants]))
    notes = []
    if lengths:
        notes.append(f"KV {lengths[-1]}: bytes of the pages that a prompt of that length holds at its end")
    if read:
        notes.append(f"KV text: allocated at the end of {max(result.protocol.lengths)} tokens by position")
    if any(variant.when for variant in result.variants):
        notes.append("known: the prompt contains the question, and the policy runs at its end; later: the "
                     "question follows after the policy has run (query-agnostic)")
    return TextGrid("the KV cache", tuple(head for head, _ in columns),
                    tuple(zip(*(cells for _, cells in columns))), tuple(notes))


def _task(result: LongResult, task: str) -> TextGrid:
    """Right answers by depth or hops, a column a length."""
    solved, lengths = result.solved(), result.protocol.lengths
    rows: list[tuple[str, ...]] = []
    for variant in result.variants:
        replies = result.of(variant, task)
        rows.append((variant.label, *(_score([reply for reply in replies if reply.length == at])
                                      for at in lengths)))
        kinds = sorted({(reply.depth, reply.hops) for reply in replies},
                       key=lambda kind: (kind[0] or 0.0, kind[1]))
        for depth, hops in kinds if len(kinds) > 1 else ():
            passed = f"{hops} hop" if hops == 1 else f"{hops} hops"
            name = passed if depth is None else f"depth {100 * depth:.0f}%"
            cells = []
            for length in lengths:
                cell = _score([reply for reply in replies if reply.cell == (task, length, depth, hops)])
                cells.append(cell if (task, length, depth, hops) in solved else f"({cell})")
            rows.append((f"  {name}", *cells))
    return TextGrid(task, ("setting", *map(str, lengths)), tuple(rows),
                    ("right answers of all questions; in parentheses: cells of which the full cache answers "
                     "less than 3 of 4",))


def _score(replies: Sequence[RecordedAnswer]) -> str:
    return f"{sum(reply.right for reply in replies)}/{len(replies)}" if replies else "–"


def _against(result: LongResult, task: str) -> TextGrid:
    """Every variant against the full cache, over all questions."""
    rows: list[tuple[str, ...]] = []
    for variant in result.variants[1:]:
        test = result.paired(variant, task)
        if test is None:
            rows.append((variant.label, *"–––––"))
            continue
        value, span = spread(test.change)
        rows.append((variant.label, f"{test.full - test.lost}/{test.full}",
                     f"{test.gained}/{test.asked - test.full}", number(test.p, 2), value,
                     span.replace("–", " to ")))
    return TextGrid(f"{task}: against the full cache", ("setting", "kept", "gained", "p", "Δ logprob", "95%"),
                    tuple(rows),
                    ("kept: of the questions that the full cache answers right; gained: of the others; "
                     "p: McNemar's exact test, which treats questions about one context as independent; "
                     "Δ logprob: mean change of the right answer's log-probability (nats an answer, "
                     "bootstrap over contexts)",)
                    if rows else ())


def _by_kv(buckets: Sequence[PositionBucket]) -> list[tuple[str, Sequence[PositionBucket]]]:
    names = dict.fromkeys(bucket.kv for bucket in buckets)
    return [(kv, [bucket for bucket in buckets if bucket.kv == kv]) for kv in names]


def _buckets(title: str, settings: Sequence[tuple[str, Sequence[PositionBucket]]],
             notes: tuple[str, ...]) -> TextGrid:
    """Three rows a setting, a column a bucket."""
    rows: list[tuple[str, ...]] = []
    for index, (name, buckets) in enumerate(settings):
        rows.append((name, *(number(bucket.values["perplexity"].value, 4) for bucket in buckets)))
        if index:
            rows.append(("  KL", *(number(bucket.values["kl_mean"].value) for bucket in buckets)))
            rows.append(("  top-1", *(f"{number(100 * bucket.values['top1'].value)}%" for bucket in buckets)))
    heads = (f"{bucket.low}–{bucket.high - 1}" for bucket in settings[0][1])
    return TextGrid(title, ("setting", *heads), tuple(rows), notes)


def _first(result: LongResult) -> TextGrid:
    """A row a setting, a column a sample."""
    beyond = f"> {result.protocol.new_tokens - 1}"
    rows = tuple((drift.kv, *(beyond if first is None else str(first) for first in drift.differs))
                 for drift in result.drifts[1:])
    heads = ("setting", *(f"sample {index + 1}" for index in range(len(result.drifts[0].differs))))
    return TextGrid("generated: equal tokens before greedy generation differs", heads, rows)
