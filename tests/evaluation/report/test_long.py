"""Reports on a comparison at length: narrow, escaped, complete."""

import itertools
import json
import re

import pytest

from quantkit.evaluation.long.generated import Drift
from quantkit.evaluation.long.positions import PositionBucket
from quantkit.evaluation.long.result import LongProtocol, LongResult, RecordedAnswer, SettingVariant
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.long import as_json, markdown, table

LENGTHS = tuple(1024 * 2 ** power for power in range(8))


def bucket(kv, low, high, perplexity=12.0):
    values = {"perplexity": perplexity, "kl_mean": 0.012, "top1": 0.9}
    return PositionBucket(kv, low, high, {name: Interval(value, value, value)
                                          for name, value in values.items()},
                          (0.012,))


@pytest.fixture
def result():
    protocol = LongProtocol("book|1.txt", "ab" * 32, False, ("needle", "variables", "positions", "generated"),
                            LENGTHS, 2, 1, 0, False, ("known", "later"), 512, 64, "bfloat16", "0.1", "2.0",
                            "CPU", 1, 1)
    policy = "snapkv(0.5, window=32, kernel=5)+int4(residual_length=128, sinks=64)"
    variants = [SettingVariant("none", None, 23040), SettingVariant("int8", None, 12000),
                SettingVariant(policy, "known", 8000), SettingVariant(policy, "later", 8000)]
    replies = []
    for variant in variants:
        variant.bytes = {length: length * variant.bytes_per_token for length in LENGTHS}
        for number, length in enumerate(LENGTHS):
            for question, depth in enumerate((0.0, 1.0)):
                # the full cache fails at the last length; the setting whose question comes later at depth 0
                right = length < LENGTHS[-1] and not (variant.when == "later" and depth == 0)
                logprob = -1.0 - 2 * (not right)
                replies.append(RecordedAnswer("needle", length, 0, depth, 0, number, question, variant.kv,
                                              variant.when or "known", right, logprob, "text", "word", 2))
            replies.append(RecordedAnswer("variables", length, 0, None, 1, 100 + number, 0, variant.kv,
                                          variant.when or "known", False, -4.0, "text", "word", 2))
    settings = ("none", "int8", policy)
    buckets = [bucket(kv, low, high) for kv in settings for low, high in itertools.pairwise(LENGTHS)]
    drifts = [Drift(kv, (bucket(kv, 0, 16), bucket(kv, 16, 64)), (None, 7), 31.4) for kv in settings]
    name = "models/some model with a very long name " * 3
    return LongResult(name, "bf16", protocol, variants, replies, buckets, drifts)


def test_the_table_fits_a_terminal_and_says_what_the_full_cache_can(result):
    text = table(result)
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("what the full cache answers") < text.index("── needle ")
    assert "(0/1)" in text and "variables" in text
    for length in LENGTHS:
        assert f" {length}" in text, "columns that don't fit beside the others stand below them"


def test_names_that_are_long_stay_whole(result):
    lines = table(result).split("── the KV cache")[1].split("\n──")[0].splitlines()
    for when in ("known", "later"):
        at = lines.index(f"snapkv(0.5, window=32, kernel=5)+int4(residual_length=128, sinks=64), {when}")
        assert re.match(r" +8\.00 kB  ", lines[at + 1])


def test_where_generation_differs_has_a_column_a_sample(result):
    drifts = [Drift(one.kv, one.buckets, (None, 7) * 10, 31.4) for one in result.drifts]
    text = table(LongResult(result.model, result.method, result.protocol, result.variants, drifts=drifts))
    parts = text.split("generated: equal tokens")[1]
    assert max(map(len, text.splitlines())) <= 80
    assert "sample 1 " in parts and "sample 20" in parts and parts.count("> 63") == 2 * 10


def test_the_comparison_is_over_all_questions(result):
    against = table(result).split("── needle: against the full cache")[1].split("\n──")[0]
    kept = [re.findall(r"\d+/\d+", line) for line in against.splitlines() if "/" in line]
    assert kept == [["14/14", "0/2"], ["14/14", "0/2"], ["7/14", "0/2"]], "int8, known, later"
    found = json.loads(as_json(result))
    by = {(one["task"], one["kv"][:4], one["question"]): one for one in found["against_full_cache"]}
    later = by["needle", "snap", "later"]
    assert (later["full"], later["own"], later["lost"], later["gained"]) == (14, 7, 7, 0)
    assert later["p"] == pytest.approx(2 / 2 ** 7) and later["change"]["value"] == pytest.approx(-14 / 16)
    assert "lost" not in by["variables", "int8", None], "the full cache solves none of it"
    assert len(found["full_cache_solves"]) == 14


def test_json_has_everything(result):
    found = json.loads(as_json(result))
    assert set(found) == {"model", "method", "protocol", "settings", "full_cache_solves",
                          "against_full_cache", "replies", "positions", "generated"}
    assert len(found["replies"]) == 4 * 8 * 3 and len(found["positions"]) == 3 * 7
    assert found["generated"][1]["differs"] == [None, 7] and found["protocol"]["fingerprint"]


def test_a_perplexity_without_bounds_is_null(result):
    result.buckets = [bucket("none", 0, 10, float("inf"))]
    assert json.loads(as_json(result))["positions"][0]["perplexity"]["value"] is None
    assert "∞" in table(result)


def test_markdown_is_escaped_and_indents(result):
    text = markdown(result)
    assert "book\\|1.txt" in text and "&nbsp;&nbsp;depth 0%" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("| ")]
    assert len(tables) > 6
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, lines
