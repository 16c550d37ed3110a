"""Results as JSON: what ``quantkit eval --json`` prints."""

from __future__ import annotations

import json

from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.result import EvalResult


def render(result: EvalResult) -> str:
    """One object: ``results``, ``protocol``, ``noise_floor_kl``, ``metrics``, ``question``, ``command``."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


REPORTER = Reporter("json", "results.json", render)
