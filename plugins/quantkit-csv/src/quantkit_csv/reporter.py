"""Results as CSV (RFC 4180): a row a variant, and for every metric its value and the ends of its interval."""

from __future__ import annotations

import csv
import io

from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.result import EvalResult

FIELDS = ("model", "method", "kv", "bits_per_weight", "file_bytes", "peak_bytes", "kv_bytes_per_token",
          "kv_bytes", "load_s", "manifest_sha256", "fingerprint")
"""Columns before those of the metrics."""


def render(result: EvalResult) -> str:
    """A head and a row a variant, ``\\r\\n`` behind each. What wasn't measured is empty; an infinite value is
    ``inf``. A text that a spreadsheet would take for a formula has an apostrophe before it."""
    file = io.StringIO(newline="")
    table = csv.writer(file)
    metrics = list(result.measured)
    table.writerow([*FIELDS, *(_text(f"{key}{end}") for key in metrics for end in ("", "_low", "_high"))])
    for row in result.rows:
        values: list[object] = [_text(row.model), _text(row.method), _text(row.kv), row.bits_per_weight,
                                row.file_bytes, row.peak_bytes, row.kv_bytes_per_token, row.kv_bytes,
                                row.load_s, row.manifest_sha256, result.protocol.fingerprint]
        for key in metrics:
            interval = row.metrics.get(key)
            values += ["", "", ""] if interval is None else [interval.value, interval.low, interval.high]
        table.writerow(values)
    return file.getvalue()


def _text(text: str | None) -> str:
    """A name, harmless in a spreadsheet: https://owasp.org/www-community/attacks/CSV_Injection."""
    if text is None:
        return ""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


REPORTER = Reporter("csv", "results.csv", render)
