"""Results as plain data."""


import json
import math
from dataclasses import replace

import pytest

from quantkit.evaluation.effect import NATS, SHARES, WORDS, differs, effect_of, effect_of_row
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


@pytest.mark.parametrize(("high", "word"), [
    (0.0, "negligible"), (0.0031, "negligible"), (0.01, "small"), (0.09, "small"), (0.25, "visible"),
    (0.5, "broken"), (math.inf, "broken")])
def test_a_word_by_the_worse_end_of_kl(high, word):
    assert effect_of("kl_mean", 0.0, high) == word


def test_shares_and_other_metrics():
    assert effect_of("flips", 0.0, 0.03) == effect_of("top1", -0.03, 0.0) == "negligible"
    assert effect_of("flips", 0.0, 0.45) == "broken" and effect_of("arc_easy/acc", -0.5, 0.0) is None
    assert effect_of("kl_mean", math.nan, math.nan) is None
    assert len(NATS) == len(SHARES) == len(WORDS) - 1


def test_of_a_row_by_kl_and_else_by_the_likeliest_token():
    row = ModelResult("m", "int8", 8.0, 1, metrics={"top1": Interval(0.97, 0.96, 0.98)})
    assert effect_of_row(row) == "negligible"
    row.metrics["kl_mean"] = Interval(0.2, 0.1, 0.3)
    assert effect_of_row(row) == "visible"
    assert effect_of_row(ModelResult("m", "int8", 8.0, 1)) is None


def test_speeds_differ_if_their_ranges_do_not_meet():
    assert differs(Interval(10, 9, 11), Interval(13, 12, 14))
    assert not differs(Interval(10, 9, 12), Interval(13, 11, 14))
    assert not differs(Interval(10, 10, 10), Interval(13, 12, 14)), "of one run nothing is known"
    assert not differs(None, Interval(13, 12, 14))


BASE = Protocol(text="t.txt", text_sha256="a" * 64, tokens_sha256="b" * 64, window=512, windows=40,
                words=9000, dtype="bfloat16", prefill=256, decode=32, repeats=3, quantkit="0.1", torch="2.13",
                cpu="cpu", cores=2, threads=2)


@pytest.mark.parametrize("change", [{"text_sha256": "c" * 64}, {"tokens_sha256": "c" * 64}, {"window": 256},
                                    {"windows": 39}, {"dtype": "float32"}, {"bos": "each"}])
def test_what_changes_quality_changes_the_fingerprint(change):
    assert replace(BASE, **change).fingerprint != BASE.fingerprint


@pytest.mark.parametrize("change", [{"text": "other.txt"}, {"threads": 8}, {"cpu": "faster"}, {"repeats": 5}])
def test_what_does_not_change_quality_does_not(change):
    assert replace(BASE, **change).fingerprint == BASE.fingerprint


def test_it_states_everything():
    data = BASE.to_dict()
    assert data["stride"] == 512 and data["scored"] == 40 * 511 and len(data["fingerprint"]) == 12
    text = " ".join(BASE.lines())
    for piece in ("t.txt", "40 windows of 512", "20440 predictions", "bfloat16", "256 tokens in", "32 out",
                  BASE.fingerprint):
        assert piece in text
    assert "speed was not measured" in " ".join(replace(BASE, repeats=0).lines())
