"""Results as plain data."""

import json
import math

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.result import EvalResult, ModelResult

PROTOCOL = Protocol(text="t.txt", text_sha256="a" * 64, tokens_sha256="b" * 64, window=8, windows=2, words=9,
                    dtype="bfloat16", prefill=0, decode=0, repeats=0, quantkit="0.1", torch="2.13", cpu="cpu",
                    cores=2, threads=2)
KEYS = ["model", "method", "bits_per_weight", "file_bytes", "peak_bytes", "perplexity", "kl_mean", "top1",
        "prefill_tok_s", "decode_tok_s"]


def test_a_row_begins_with_the_promised_keys_whatever_was_measured():
    empty = ModelResult("m", "bf16", 16.0, 100).to_dict()
    assert list(empty)[:10] == KEYS
    assert [key for key in KEYS if empty[key] is None] == KEYS[4:]
    full = ModelResult("m", "bf16", 16.0, 100, 5, metrics={"top1": Interval(0.9, 0.8, 0.95)}).to_dict()
    assert list(full)[:10] == KEYS
    assert full["top1"] == 0.9 and full["intervals"] == {"top1": [0.8, 0.95]} and full["peak_bytes"] == 5


def test_a_metric_of_a_plugin_has_its_key_too():
    row = ModelResult("m", "bf16", 16.0, 100, metrics={"flips": Interval(0.1, 0.1, 0.2)}).to_dict()
    assert row["flips"] == 0.1 and row["intervals"]["flips"] == [0.1, 0.2]


@pytest.mark.parametrize("ruined", [math.inf, math.nan])
def test_what_json_cannot_say_is_null(ruined):
    broken = Interval(ruined, 1.0, ruined)
    row = ModelResult("m", "bf16", 16.0, 100, metrics={"perplexity": broken, "kl_exact": broken})
    result = EvalResult(PROTOCOL, [row])
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert found["results"][0]["perplexity"] is None
    assert found["results"][0]["intervals"]["perplexity"] == [1.0, None]
    assert found["noise_floor_kl"] == {"value": None, "interval": [1.0, None]}


def test_without_a_noise_floor_there_is_none():
    assert EvalResult(PROTOCOL, []).to_dict()["noise_floor_kl"] is None
