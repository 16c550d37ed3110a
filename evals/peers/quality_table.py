"""What :mod:`quality` measured, for people, in 80 columns: by calibration on all texts, the weights alone,
and by llama.cpp's protocol."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from quality_variants import CalibrationKind

WIDTH = 80
LABEL = 34
GROUPS = {
    CalibrationKind.NONE: "Data-free",
    CalibrationKind.DEFAULT: "Calibrated on what a tool takes if no text is named",
    CalibrationKind.NEAR: "Calibrated on {calibration}: {samples} x {window} tokens, the same for all",
    CalibrationKind.SELF: "Calibrated on what the model writes itself",
}
Row = dict[str, Any]
Score = Callable[[Row], Row | None]


def tables(report: Row) -> str:
    """All tables, and what failed."""
    texts: list[str] = report["texts"]
    rows: list[Row] = [row | row.get("texts", {}).get(texts[0], {}) for row in report["rows"]]
    lines = [*_by_calibration(rows, texts, report), *_alone(rows, texts[0], report)]
    if any(row["peer"] == "llama.cpp" for row in rows):
        lines += _llama(rows, texts)
    return "\n".join([*lines, *_failures(rows)])


def calibration_of(row: Row) -> CalibrationKind:
    """What a row is calibrated on; earlier reports only say whether it is."""
    if "calibration" in row:
        return CalibrationKind(row["calibration"])
    if not row["calibrated"]:
        return CalibrationKind.NONE
    endings = {"as typed": CalibrationKind.DEFAULT, "self": CalibrationKind.SELF}
    return next((kind for ending, kind in endings.items() if row["name"].endswith(ending)),
                CalibrationKind.NEAR)


def kl_on(row: Row, texts: Iterable[str]) -> list[float | None]:
    """On each text: of the kernels that serve a row, or of its weights where none of ours does."""
    scores = [row.get("texts", {}).get(text, {}) for text in texts]
    return [score.get("served", score.get("weights", {})).get("kl") for score in scores]


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


def _by_calibration(rows: list[Row], texts: list[str], report: Row) -> list[str]:
    """Mean and worst KL over all texts with bits and minutes, a part a kind of calibration."""
    names = [Path(text).stem[-8:] for text in texts]
    head = (f"{'':{LABEL}} {'bits/w':>6} {'mean KL':>8} {'worst':>8} {'on':8} {'CPU min':>7}")
    each = f"{'':{LABEL}}" + "".join(f" {name:>8}" for name in names)

    def mean(row: Row) -> Row | None:
        scores = kl_on(row, texts)
        complete = [score for score in scores if score is not None]
        return {"kl": fmean(complete)} if len(complete) == len(texts) else None

    lines = ["", *textwrap.wrap(
        f"KL on {len(texts)} text{'s' * (len(texts) > 1)}, {report['windows']} windows of "
        f"{report['window']} tokens of each; ours through the kernels that serve them, the others by the "
        "weights that their codes stand for. A < "
        "marks what nothing of its part with as few bits beats.", WIDTH)]
    for kind, title in GROUPS.items():
        members = [row for row in rows if row["bits"] < 16 and calibration_of(row) == kind]
        if not any(mean(row) for row in members):
            continue
        title = title.format(**report)
        best = frontier(members, mean)
        lines += ["", "", title, "", head]
        for group in by_width(members, mean):
            lines.append("")
            for row in group:
                worst, name = max(zip(kl_on(row, texts), names), key=lambda pair: pair[0] or 0)
                lines.append(f"{_label(row)} {row['bits_per_weight']:6.2f} {_number(_kl(mean(row))):>8} "
                             f"{_number(worst):>8} {name:8} {_minutes(row):>7} "
                             f"{'<' * (row in best)}".rstrip())
        lines += ["", each, ""]
        for row in (row for group in by_width(members, mean) for row in group):
            lines.append(_label(row) + "".join(f" {_number(score):>8}" for score in kl_on(row, texts)))
    return lines


def _alone(rows: list[Row], text: str, report: Row) -> list[str]:
    """The weights alone on the first text."""
    lines = ["", "", *textwrap.wrap(
        f"The weights alone on {text}, float32 arithmetic, {report['windows']} windows of "
        f"{report['window']} tokens; served: KL through our kernels. * calibrated.", WIDTH), "",
        f"{'':{LABEL}} {'bits/w':>6} {'perplexity':>10} {'KL':>8} {'top-1':>6} {'served':>8}"]
    best = frontier(rows, _weights)
    for group in by_width(rows, _weights):
        lines.append("")
        for row in group:
            served = row["served"]["kl"] if "served" in row else None
            lines.append(f"{_line(row, row['weights'])} {_number(served):>8} {'<' * (row in best)}".rstrip())
    return lines


def _llama(rows: list[Row], texts: list[str]) -> list[str]:
    """Both sides by llama.cpp's protocol: the second half of each window."""
    lines = ["", "",
             "llama.cpp's protocol, each by its own kernels: the second half of each window.", "",
             f"{'':{LABEL}} {'bits/w':>6} {'perplexity':>10} {'KL':>8} {'top-1':>6}", ""]
    best = frontier(rows, _half)
    halves = sorted(filter(_half, rows), key=lambda row: -float(row["bits_per_weight"]))
    for row in halves:
        lines.append(f"{_line(row, _half(row) or {})} {'<' * (row in best)}".rstrip())
    lines += ["", "The same, KL on each text; what no kernel of ours serves by its weights alone.", "",
              f"{'':{LABEL}}" + "".join(f" {Path(text).stem[-8:]:>8}" for text in texts), ""]
    for row in halves:
        scores = [_half(row["texts"].get(text, {})) for text in texts]
        lines.append(_label(row) + "".join(f" {_number(score['kl'] if score else None):>8}"
                                           for score in scores))
    return lines


def _failures(rows: list[Row]) -> list[str]:
    failed = [f"{row['peer']} {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    wrapped = [line for failure in failed
               for line in textwrap.wrap(failure, WIDTH, subsequent_indent="    ")]
    return ["", "", "Could not be made:", *wrapped] if failed else []


def _weights(row: Row) -> Row | None:
    return row.get("weights")


def _half(row: Row) -> Row | None:
    score = row.get("served", row.get("weights"))
    return None if score is None else score["half"]


def _kl(score: Row | None) -> float:
    return float("inf") if score is None or score["kl"] is None else float(score["kl"])


def _line(row: Row, score: Row) -> str:
    return (f"{_label(row)} {row['bits_per_weight']:6.2f} {_number(score['perplexity'], 4):>10} "
            f"{_number(score['kl']):>8} {100 * score['top1']:5.1f}%")


def _label(row: Row) -> str:
    star = "*" * (calibration_of(row) != CalibrationKind.NONE)
    label = f"{row['peer']} {row['name']}".strip() + star
    return f"{label:{LABEL}.{LABEL}}"


def _minutes(row: Row) -> str:
    return f"{row['cpu_s'] / 60:.1f}" if "cpu_s" in row else ""


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.5f}" if 0 < abs(value) < 0.01 else f"{value:.{digits}g}"
