"""Sentences that say what each variant costs and gains."""

import math

from quantkit.evaluate.metrics import Interval
from quantkit.report.headline import LIMIT, headline


def test_a_sentence_a_variant(make_result):
    assert headline(make_result()) == [
        "int8: 1.7 times smaller, 1.5 times as fast, KL 0.00400 (0.00372–0.00432).",
        "int4: 2.4 times smaller, 0.83 times as fast, KL 0.250 (0.233–0.270).",
        "nf4: 2.3 times smaller, 0.13 times as fast, KL 0.270 (0.251–0.292)."]


def test_without_speed_and_without_quality(make_result, make_row):
    rows = [make_row("base", mb=100, prefill=None), make_row("big", mb=150, prefill=None)]
    assert headline(make_result(rows)) == ["big: 1.5 times larger, KL 0.00400 (0.00372–0.00432)."]
    rows[1].metrics = {}
    assert headline(make_result(rows)) == ["big: 1.5 times larger."]
    rows[1].file_bytes = rows[0].file_bytes
    assert headline(make_result(rows)) == ["big: as large."]
    rows[1].file_bytes = None
    assert headline(make_result(rows)) == ["big: nothing to compare."]


def test_a_model_alone_and_none(make_result, make_row):
    assert headline(make_result([make_row("only", kl=0)])) == ["only: 163 MB, decode 45.0 tok/s."]
    assert headline(make_result([])) == []


def test_kv_settings_say_what_the_cache_takes(make_result, make_row):
    rows = [make_row("base", kl=0), make_row("base")]
    for row, kv, size in zip(rows, ("none", "int4"), (23_040_000, 6_400_000)):
        row.kv, row.kv_bytes = kv, size  # allocated, whatever a token's codes take
    assert headline(make_result(rows)) == [
        "base kv int4: KV cache 3.6 times smaller, 1.0 times as fast, KL 0.00400 (0.00372–0.00432)."]


def test_of_many_variants_only_the_best_are_said(make_result, make_row):
    rows = [make_row("base", mb=500, kl=0)]
    rows += [make_row(f"v{i}", mb=100 + i, kl=0.5 - 0.01 * i, decode=20 + (i == 7)) for i in range(12)]
    assert len(rows) > LIMIT
    assert [text.split(":")[0] for text in headline(make_result(rows))] == ["v0", "v7", "v11"]


def test_what_is_not_finite_is_said_too(make_result, make_row):
    ruined = make_row("ruined")
    ruined.metrics["kl_mean"] = Interval(math.inf, 1.0, math.inf)
    assert headline(make_result([make_row("base"), ruined]))[0].endswith("KL ∞ (1.000–∞).")
