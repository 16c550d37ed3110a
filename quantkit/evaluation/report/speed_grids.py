"""Tables of speed and memory: decoding by batch and context, prefill, gaps, bytes, the roofline."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.evaluation.report.base import TextGrid, megabytes, number, pair
from quantkit.evaluation.result import EvalResult, ModelResult, short_names
from quantkit.evaluation.roofline.result import OperatorSpeed, Roofline
from quantkit.evaluation.speed.results import DecodeSpeed, SpeedSweep, Spread


def sweeps(result: EvalResult) -> Iterator[tuple[str, SpeedSweep]]:
    """The variants whose speed was measured, by name."""
    for name, row in zip(short_names(result.rows), result.rows):
        if row.speed is not None:
            yield name, row.speed


def decode_grids(result: EvalResult) -> list[TextGrid]:
    """Tokens a second by batch at the shortest context, and by context for one sequence."""
    cells = [cell for _, sweep in sweeps(result) for cell in sweep.decode]
    contexts, batches = sorted({cell.context for cell in cells}), sorted({cell.batch for cell in cells})
    if not cells:
        return []
    grids = []
    if len(batches) > 1 or len(contexts) == 1:
        grids.append(_decode(result, f"Decode by batch, {contexts[0]:,} tokens of context, "
                                     "tok/s of all together",
                             [(batch, contexts[0]) for batch in batches],
                             [f"batch {batch}" for batch in batches]))
    if len(contexts) > 1:
        grids.append(_decode(result, f"Decode by context, batch {batches[0]}, tok/s",
                             [(batches[0], context) for context in contexts],
                             [f"{context:,}" for context in contexts]))
    return grids


def _decode(result: EvalResult, title: str, places: list[tuple[int, int]], heads: list[str]) -> TextGrid:
    rows, reasons = [], dict.fromkeys("")
    for name, sweep in sweeps(result):
        cells = {(cell.batch, cell.context): cell for cell in sweep.decode}
        rows.append((name, *(_speed(cells.get(place)) for place in places)))
        reasons |= dict.fromkeys(f"Not measured: {cell.left_out}" for place, cell in cells.items()
                                 if cell.left_out and place in places)
    return TextGrid(title, ("variant", *heads), tuple(rows), tuple(reasons))


def _speed(cell: DecodeSpeed | None) -> str:
    if cell is None or cell.tok_s is None:
        return "–"
    share = f"{number(100 * cell.of_read, 2)}% of read" if cell.of_read is not None else ""
    return pair(number(cell.tok_s.median), share)


def prefill_grids(result: EvalResult) -> list[TextGrid]:
    """Prompt tokens a second, and seconds to the first token, by prompt."""
    grids = []
    prompts = sorted({cell.tokens for _, sweep in sweeps(result) for cell in sweep.prefill})
    for title, part in (("Prefill by prompt, tok/s", 0), ("Time to first token, seconds", 1)):
        rows = []
        for name, sweep in sweeps(result):
            cells = {cell.tokens: (cell.tok_s, cell.first_token_s)[part] for cell in sweep.prefill}
            rows.append((name, *(spread_text(cells.get(tokens)) for tokens in prompts)))
        if any(set(row[1:]) - {"–"} for row in rows):
            grids.append(TextGrid(title, ("variant", *(f"{tokens:,}" for tokens in prompts)), tuple(rows)))
    return grids


def gaps(result: EvalResult) -> TextGrid | None:
    """Milliseconds between two tokens of an answer, and seconds to open the model."""
    keys = list(dict.fromkeys(key for _, sweep in sweeps(result) for key in sweep.gap_ms))
    rows = tuple((name, *(number(sweep.gap_ms.get(key)) for key in keys), number(sweep.load_s))
                 for name, sweep in sweeps(result))
    heads = ("variant", *(f"gap {key}\nms" for key in keys), "load\ns")
    grid = TextGrid("Gaps between tokens" if keys else "Time to load", heads, rows).filled
    return grid if len(grid.heads) > 1 else None


def memory(result: EvalResult) -> TextGrid | None:
    """Bytes of weights, workspace and cache."""
    used = [(name, sweep.memory) for name, sweep in sweeps(result) if sweep.memory is not None]
    if not used:
        return None
    contexts = sorted({tokens for _, use in used for tokens, _ in use.kv_by_context})
    rows = tuple((name, megabytes(use.weights), megabytes(use.workspace), megabytes(use.steady),
                  megabytes(use.peak), *(megabytes(dict(use.kv_by_context).get(tokens))
                                         for tokens in contexts))
                 for name, use in used)
    return TextGrid("Memory", ("variant", "weights", "workspace", "steady", "peak",
                               *(f"KV {tokens:,}" for tokens in contexts)), rows,
                    ("Steady and peak are resident sets of the whole process, the interpreter and torch "
                     "included. KV is the cache of one sequence at that context.",)).filled


def kernel_counts(row: ModelResult, phase: str) -> str:
    """How many Linears each kernel runs in a phase."""
    return ", ".join(f"{name} × {count}" for name, count in row.kernels.get(phase, {}).items()) or "–"


def roofline_grid(roofline: Roofline) -> TextGrid:
    """A row an operator and number of rows."""
    ceilings = roofline.ceilings
    rows = tuple((operator_name(operator), number(operator.intensity, 3),
                  f"{number(operator.operations / operator.seconds.median / 1e9)}"
                  if operator.seconds.median > 0 else "–",
                  pair(seconds(operator.seconds.median), f"predicted {seconds(operator.predicted_s)}"),
                  reached(operator), _bound(operator)) for operator in roofline.operators)
    limits = ", ".join(f"{number(value / 1e12)} T operations/s in {name}"
                       for name, value in ceilings.operations_s.items())
    return TextGrid(f"Roofline of {roofline.label}",
                    ("operator", "operations\na byte", "G operations\na second", "time",
                     "of the\nroof", "bound by"),
                    rows, (f"Measured in the same run: {number(ceilings.read_bytes_s / 1e9)} GB/s read"
                           + f", {limits}" * bool(limits),))


def operator_name(operator: OperatorSpeed) -> str:
    """``down, 8 rows``; attention has its context."""
    context = f", {operator.context:,} tokens" if operator.context else ""
    return f"{operator.operator}, {operator.rows} {'row' if operator.rows == 1 else 'rows'}{context}"


def _bound(operator: OperatorSpeed) -> str:
    return pair(operator.bound, "" if operator.bound_from is None else
                f"compute from {operator.bound_from} rows")


def reached(operator: OperatorSpeed) -> str:
    """Predicted over measured time, as a share."""
    if operator.seconds.median <= 0:
        return "–"
    return f"{number(100 * operator.predicted_s / operator.seconds.median, 2)}%"


def seconds(value: float) -> str:
    """``1.20 ms``, ``34.0 µs``."""
    if not value > 0:
        return number(value)
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * size:
            return f"{number(value / size)} {unit}"
    return f"{number(value / 1e-6)} µs"


def spread_text(value: Spread | None) -> str:
    """A median, and below it the range."""
    if value is None:
        return "–"
    return pair(number(value.median), f"{number(value.low)}–{number(value.high)}")
