"""The JSON object: strict, with the keys that scripts rely on."""

import json
import math

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.json import render

KEYS = ("model", "method", "bits_per_weight", "file_bytes", "peak_bytes", "perplexity", "kl_mean", "top1",
        "prefill_tok_s", "decode_tok_s")


def test_keys_and_values(make_result):
    found = json.loads(render(make_result(exact=[Interval(0.0011, 0.001, 0.0012)])))
    assert set(found) == {"results", "protocol", "noise_floor_kl", "metrics", "question", "command", "suite",
                          "floors", "roofline", "sensitivity", "diff", "other_diffs", "version",
                          "plotted", "gate"}
    described = found["metrics"]
    assert list(described)[:3] == ["kl_mean", "top1", "decode_tok_s"]
    assert all(set(row["intervals"]) <= set(described) for row in found["results"])
    assert described["top1"] == {"title": "top-1", "unit": "%", "direction": "higher", "per": "token",
                                 "distribution": "quantkit"}
    for row in found["results"]:
        assert tuple(row)[:len(KEYS)] == KEYS
        assert row["intervals"]["kl_mean"][0] <= row["kl_mean"] <= row["intervals"]["kl_mean"][1]
    assert found["protocol"]["fingerprint"] and found["protocol"]["window"] == 512
    assert found["noise_floor_kl"] == {"value": 0.0011, "interval": [0.001, 0.0012]}


def test_what_was_not_measured_or_is_not_finite_is_null(make_result, make_row):
    row = make_row("ruined", prefill=None)
    row.metrics["perplexity"] = Interval(math.inf, 1e300, math.inf)
    found, = json.loads(render(make_result([row])))["results"]
    assert found["perplexity"] is None and found["intervals"]["perplexity"] == [1e300, None]
    assert found["prefill_tok_s"] is None and found["decode_tok_s"] is None
