"""What :mod:`quality` found, for people: the weights alone, by llama.cpp's protocol, and on every text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HEAD = f"{'':13} {'':27} {'bits/w':>6} {'perplexity':>10} {'KL':>8} {'top-1':>6} {'CPU min':>7}"
Row = dict[str, Any]
Score = Callable[[Row], Row | None]


def tables(everything: Row) -> str:
    """All tables, and what failed."""
    texts: list[str] = everything["texts"]
    rows: list[Row] = [row | row.get("texts", {}).get(texts[0], {}) for row in everything["rows"]]
    lines = ["", f"The weights alone, float32 arithmetic, {everything['windows']} windows of "
                 f"{everything['window']} tokens; served: KL through our kernels.",
             "* calibrated; < nothing here with as few bits has a lower KL", "", f"{HEAD} {'served':>8}"]
    best = frontier(rows, _weights)
    for group in by_width(rows, _weights):
        lines.append("")
        for row in group:
            served = row["served"]["kl"] if "served" in row else None
            lines.append(f"{_line(row, row['weights'])} {_number(served):>8} {'<' * (row in best)}".rstrip())
    lines += ["", "llama.cpp's protocol, each through its own kernels: the second half of each window.", "",
              HEAD, ""]
    best = frontier(rows, _half)
    for row in sorted(filter(_half, rows), key=lambda row: -float(row["bits_per_weight"])):
        lines.append(f"{_line(row, _half(row) or {})} {'<' * (row in best)}".rstrip())
    lines += ["", "The same, KL on each text; what no kernel of ours serves by its weights alone.", "",
              f"{'':13} {'':27} {'bits/w':>6} " + " ".join(f"{Path(text).stem[-12:]:>12}" for text in texts),
              ""]
    for row in sorted(filter(_half, rows), key=lambda row: -float(row["bits_per_weight"])):
        scores = [_half(row["texts"].get(text, {})) for text in texts]
        lines.append(f"{_label(row, 27)} {row['bits_per_weight']:6.2f}"
                     + "".join(f" {_number(_half_kl(score)):>12}" for score in scores))
    failed = [f"{row['peer']} {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([*lines, *(["", "Could not be made:", *failed] if failed else [])])


def by_width(rows: Iterable[Row], score: Score) -> list[list[Row]]:
    """Rows that have such a score, widest first, the lowest KL first."""
    scored = [row for row in rows if score(row) is not None]
    widths = sorted({row["bits"] for row in scored}, reverse=True)
    return [sorted((row for row in scored if row["bits"] == width), key=lambda row: _kl(score(row)))
            for width in widths]


def frontier(rows: Iterable[Row], score: Score) -> list[Row]:
    """Those that no other with as few bits a weight or fewer beats in KL."""
    lines, least = [], float("inf")
    scored = [row for row in rows if score(row) is not None]
    for row in sorted(scored, key=lambda row: (row["bits_per_weight"], _kl(score(row)))):
        if _kl(score(row)) < least:
            lines, least = [*lines, row], _kl(score(row))
    return lines


def _weights(row: Row) -> Row | None:
    return row.get("weights")


def _half(row: Row) -> Row | None:
    score = row.get("served", row.get("weights"))
    return None if score is None else score["half"]


def _half_kl(score: Row | None) -> float | None:
    return None if score is None else score["kl"]


def _kl(score: Row | None) -> float:
    return float("inf") if score is None or score["kl"] is None else float(score["kl"])


def _line(row: Row, score: Row) -> str:
    minutes = f"{row['cpu_s'] / 60:.1f}" if "cpu_s" in row else ""
    return (f"{_label(row, 27)} {row['bits_per_weight']:6.2f} {_number(score['perplexity'], 4):>10} "
            f"{_number(score['kl']):>8} {100 * score['top1']:5.1f}% {minutes:>7}")


def _label(row: Row, width: int) -> str:
    return f"{row['peer']:13} {row['name'] + ('*' if row['calibrated'] else ''):{width}}"


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.5f}" if 0 < abs(value) < 0.01 else f"{value:.{digits}g}"
