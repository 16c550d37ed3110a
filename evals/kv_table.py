"""Codec × policy × length in one table, from reports of this package: ``python evals/kv_table.py FILE…``.

FILE is what ``quantkit eval --kv … --noise-floor``, ``quantkit eval-long`` and ``quantkit bench decode``
write as JSON, in any order; all of one model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.kv.codecs.kivi import GROUP
from quantkit.kv.spec import KVSpec, parse_kv

HALF = 16
PAGE = 64
POSITION = 32
"""Bits of a number of the full cache, tokens of a page, bits of a slot's position where a policy drops."""
DIM = 64
"""Of SmolLM2's heads."""
Row = dict[Any, Any]


def bits(codec: str, options: Mapping[str, Any]) -> tuple[float, float]:
    """Of a number of keys and of values, by the codec's description: codes, scales, and what is shared."""
    if codec in ("int8", "fp8"):
        return 8 + 16 / DIM, 8 + 16 / DIM
    if codec == "rotation":
        width = options.get("bits", 4)
        return int(width + 0.5) + 16 / DIM + 16 / PAGE, int(width) + 16 / DIM
    if codec.startswith("int"):
        width = int(codec.removeprefix("int"))
        return width + 32 / GROUP, width + 32 / GROUP
    return HALF, HALF


def claimed(spec: KVSpec, tokens: int) -> float:
    """Bytes over those of a full cache of so many tokens, from documented numbers alone.

    Raises:
        ValueError: a budget in bytes, or pages that stay plain other than by default.
    """
    if {"residual_length", "sinks"} & {*spec.codec_options, *spec.value_options}:
        raise ValueError(f"{spec}: only the default pages that stay plain are counted")
    budget = spec.options.get("budget")
    kept = float(tokens)
    more = 0.0
    if isinstance(budget, str):
        raise ValueError(f"{spec}: what a budget in bytes claims is that many bytes")
    if budget is not None:
        sinks = int(spec.options.get("sinks", 4)) if spec.policy == "window" else 0
        kept = min(kept, budget * tokens if budget < 1 else budget + sinks)
        more = POSITION / (2 * DIM)
    keys, _ = bits(spec.codec, spec.codec_options)
    _, values = bits(spec.values or spec.codec, spec.value_options if spec.values else spec.codec_options)
    width, plain = (keys + values) / 2, 0.0
    if min(keys, values) < 8:  # the first page, and the newest tokens up to where a page begins
        plain = min(kept, PAGE + kept - max(0, kept - PAGE) // PAGE * PAGE)
    return (plain * HALF + (kept - plain) * width + kept * more) / (tokens * HALF)


def gather(reports: Iterable[Row]) -> dict[str, Row]:
    """Everything that is known of each setting.

    Raises:
        ValueError: two reports say different things of one cell.
    """
    rows: dict[str, Row] = {}

    def put(kv: str, key: object, value: object) -> None:
        row = rows.setdefault(str(parse_kv(kv)), {})
        if row.setdefault(key, value) != value:
            raise ValueError(f"{kv}: two values of {key}: {row[key]} and {value}")

    for report in reports:
        if "results" in report:
            for result in report["results"]:
                put(result["kv"], "kl", result["kl_exact"] - report["noise_floor_kl"]["value"])
        elif "cases" in report:
            _decode(report, put, rows)
        else:
            _long(report, put)
    return rows


def _decode(report: Row, put: Callable[[str, object, object], None], rows: Mapping[str, Row]) -> None:
    """Each beside the full cache of the same run; of full caches the first is shown."""
    full = {(case["context"], case["batch"]): case for case in report["cases"] if case["kv"] == "none"}
    for case in report["cases"]:
        beside, speed = full[case["context"], case["batch"]], case["tok_s"]["median"]
        if case["kv"] != "none" or "decode" not in rows.get("none", {}):
            put(case["kv"], "decode", (case["context"], case["kv_bytes"] / beside["kv_bytes"], speed,
                                       speed / beside["tok_s"]["median"]))


def _long(report: Row, put: Callable[[str, object, object], None]) -> None:
    scores: dict[tuple[str, tuple[str, int, str]], list[int]] = {}
    policies = {setting["kv"] for setting in report["settings"] if setting["when"]}
    for reply in report["replies"]:
        for when in [reply["when"]] if reply["kv"] in policies else ["known", "later"]:
            score = scores.setdefault((reply["kv"], (reply["task"], reply["length"], when)), [0, 0])
            score[0] += reply["right"]
            score[1] += 1
    for (kv, key), score in scores.items():
        put(kv, key, f"{score[0]}/{score[1]}")
    for bucket in report["positions"]:
        put(bucket["kv"], (bucket["low"], bucket["high"]), bucket["kl_mean"]["value"])


def table(rows: dict[str, Row]) -> str:
    """As Markdown; the full cache first. Of KL by position the farthest is shown; a task's lengths share a
    column."""
    keys: set[Any] = {key for row in rows.values() for key in row if isinstance(key, tuple)}
    spans = sorted(key for key in keys if len(key) == 2)[-1:]
    counts: dict[tuple[str, str], list[int]] = {}
    for task, length, when in sorted(key for key in keys if len(key) == 3):
        counts.setdefault((task, when), []).append(length)
    heads = ["KV", "KL, 1,024", *(f"KL, {low:,}–{high:,}" for low, high in spans),
             *(f"{task} {' / '.join(f'{length:,}' for length in lengths)}, {when}"
               for (task, when), lengths in counts.items()),
             "tokens", "claimed", "held", "held / claimed", "decode tok/s", "× full"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for kv in sorted(rows, key=lambda kv: (kv != "none", parse_kv(kv).policy != "all", kv)):
        row, last = rows[kv], ["–"] * 6
        if "decode" in row:
            context, cache_bytes, speed, ratio = row["decode"]
            claim = claimed(parse_kv(kv), context)
            last = [f"{context:,}", f"{claim:.1%}", f"{cache_bytes:.1%}", f"{cache_bytes / claim:.3f}",
                    f"{speed:.1f}", f"{ratio:.2f}"]
        lines.append("| " + " | ".join([kv, _small(row.get("kl")), *(_small(row.get(span)) for span in spans),
                                        *(_scores(row, key, lengths) for key, lengths in counts.items()),
                                        *last]) + " |")
    return "\n".join(lines)


def _scores(row: Row, key: tuple[str, str], lengths: Iterable[int]) -> str:
    task, when = key
    scores = [row.get((task, length, when), "–") for length in lengths]
    return "–" if {*scores} == {"–"} else ", ".join(map(str, scores))


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}" if value < 0.01 else f"{value:.3f}"


if __name__ == "__main__":
    print(table(gather(json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])))
