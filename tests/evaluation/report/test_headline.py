"""The variant that is recommended, and the sentences about what each variant costs and gains."""

import math

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.headline import LIMIT, headline, recommended


def test_the_safe_variant_is_named_first_and_the_others_follow(make_result):
    assert headline(make_result()) == [
        "Take int8: 1.65 times smaller, 1.50 times as fast, 97.5% same tokens; what it costs is negligible "
        "(KL 0.00400, 0.00372–0.00432).",
        "int4: 2.4 times smaller, 0.833 times as fast, 78.0% same tokens, cost visible "
        "(KL 0.250, 0.233–0.270).",
        "nf4: 2.3 times smaller, 0.133 times as fast, 77.0% same tokens, cost visible "
        "(KL 0.270, 0.251–0.292)."]
    advice = recommended(make_result())
    assert advice.index == 1 and advice.title == "Take int8" and advice.effect == "negligible"
    assert advice.facts[0] == ("1.65 times", "smaller")


def kv_rows(make_row):
    """int8 weights with a plain and a compressed cache; the ranges of the two speeds overlap."""
    rows = [make_row("base", mb=269, kl=0, top1=1, decode=30), make_row("int8", mb=163, decode=34),
            make_row("int8", mb=163, kl=0.0045, decode=36)]
    for row, kv, size in zip(rows, ("none", "none", "int8"), (23, 23, 12)):
        row.kv, row.kv_bytes = kv, size * 10**6
    for row in rows:
        speed = row.metrics["decode_tok_s"].value
        row.metrics["decode_tok_s"] = Interval(speed, speed - 1.5, speed + 1.5)
    return rows


def test_among_equals_the_plain_cache_is_taken(make_result, make_row):
    assert recommended(make_result(kv_rows(make_row))).title == "Take int8 kv none"


def test_no_gain_within_the_noise(make_result, make_row):
    rows = [make_row("base", mb=100, kl=0, top1=1, decode=30), make_row("same", mb=100, decode=31)]
    assert headline(make_result(rows))[0] == "Keep base: no variant is smaller or faster beyond the noise."
    rows[1].file_bytes //= 2
    sentence = headline(make_result(rows))[0]
    assert sentence.startswith("Take same: 2.0 times smaller, as fast within the noise, ")
    speed = rows[1].metrics["decode_tok_s"]
    rows[1].metrics["decode_tok_s"] = Interval(60, 60, 60)  # one run: nothing is known about its noise
    assert "fast" not in headline(make_result(rows))[0] and speed.value == 31


def test_a_visible_cost_is_a_condition_and_a_broken_model_is_not_recommended(make_result, make_row):
    rows = [make_row("base", mb=269, kl=0, top1=1), make_row("int4", mb=112, kl=0.25, top1=0.78)]
    assert recommended(make_result(rows)).title == "Take int4 if a visible cost is fine"
    rows[1] = make_row("int2", mb=80, kl=2.0, top1=0.4)
    advice = recommended(make_result(rows))
    assert (advice.title, advice.index, advice.effect) == ("Keep base", 0, "broken")


def test_a_quantized_source_file_is_smaller_than_what_is_made_of_it(make_result, make_row):
    rows = [make_row("base.gguf", "Q4_1 as bf16", mb=98, kl=0, top1=1), make_row("int8", mb=163)]
    rows[0].weight_bytes, rows[1].weight_bytes = 269_000_000, 163_000_000
    sentence = headline(make_result(rows))[0]
    assert sentence.startswith("Take int8: 1.65 times smaller in memory, 1.66 times larger as a file, ")


def test_without_speed_and_without_quality(make_result, make_row):
    rows = [make_row("base", mb=100, prefill=None), make_row("big", mb=150, prefill=None)]
    assert headline(make_result(rows))[1].startswith("big: 1.50 times larger, 97.5% same tokens")
    rows[1].metrics = {}
    assert headline(make_result(rows)) == ["big: 1.50 times larger."]
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
        "Take base kv int4: 3.6 times smaller KV cache, as fast within the noise, 97.5% same tokens; what it "
        "costs is negligible (KL 0.00400, 0.00372–0.00432)."]


def test_of_many_variants_only_the_best_are_said(make_result, make_row):
    rows = [make_row("base", mb=500, kl=0)]
    rows += [make_row(f"v{i}", mb=100 + i, kl=0.4 - 0.01 * i, decode=20 + (i == 7)) for i in range(12)]
    assert len(rows) > LIMIT
    said = [text.split(":")[0] for text in headline(make_result(rows))]
    assert said[0].startswith("Take v") and set(said[1:]) <= {"v0", "v7", "v11"}



def test_what_is_not_finite_is_said_too(make_result, make_row):
    ruined = make_row("ruined")
    ruined.metrics["kl_mean"] = Interval(math.inf, 1.0, math.inf)
    sentences = headline(make_result([make_row("base"), ruined]))
    assert sentences[-1].endswith("cost broken (KL ∞, 1.000–∞).")
