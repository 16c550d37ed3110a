"""Gates on results that no model had to run for."""


import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.cli.eval import gate_text
from quantkit.evaluation.gates.check import check_gate, check_planned
from quantkit.evaluation.gates.syntax import parse_gate
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.paired import differences
from quantkit.evaluation.result import EvalResult, ModelResult
from quantkit.support.errors import UsageError
from quantkit.testing.results import sample_results

KL = {"int8": (0.004, 0.003, 0.005), "int4": (0.25, 0.23, 0.27)}


@pytest.fixture
def result() -> EvalResult:
    """Three rows, two texts, a task of 200 items of which int4 loses eight."""
    random = np.random.default_rng(0)
    result = sample_results()["ordinary"]
    right = [1.0] * 120 + [0.0] * 80
    nll = {"prose": random.normal(3.4, 0.3, 20), "code": random.normal(1.2, 0.2, 20)}
    for index, row in enumerate(result.rows):
        row.window_means = {text: {"perplexity": list(values + 0.004 * index + random.normal(0, 0.002, 20)),
                                   "kl_mean": list(np.abs(random.normal(0.02 * index, 0.001, 20)))}
                            for text, values in nll.items()}
        row.items = {"arc_easy/acc": right if index < 2 else [0.0] * 8 + right[8:]}
        share = sum(row.items["arc_easy/acc"]) / 200
        row.metrics |= {"arc_easy/acc": Interval(share, share - 0.07, share + 0.07),
                        "arc_easy/acc_norm": Interval(0.5, 0.43, 0.57)}
        row.texts = {"prose": {"kl_mean": Interval(0.001 * index, 0.0005 * index, 0.002 * index)},
                     "code": {"kl_mean": Interval(0.02 * index, 0.018 * index, 0.022 * index)}}
        if index:
            row.metrics["kl_mean"] = Interval(*KL[("int8", "int4")[index - 1]])
    return result


def single(result, gate, **options):
    return check_gate(result, gate, **options).checks[0]


def test_every_condition_on_every_candidate(result):
    gate = check_gate(result, "kl<0.01,decode>1.2x")
    assert [(c.variant, c.metric, c.verdict, c.passed) for c in gate.checks] == [
        ("int8", "kl_mean", "pass", True), ("int4", "kl_mean", "fail", False),
        ("int8", "decode_tok_s", "pass", True), ("int4", "decode_tok_s", "pass", True)]
    assert not gate.passed and [check.variant for check in gate.failed] == ["int4"]
    failed = gate.failed[0]
    assert failed.missed_by == pytest.approx(0.24) and (failed.low, failed.high) == (0.23, 0.27)
    assert failed.p < 0.01 and "sign flips" in failed.test and failed.items == 40
    assert check_gate(result, "int8:kl<0.01").passed


@pytest.mark.parametrize(("limit", "verdict", "passed", "strict"), [
    (0.006, "pass", True, True), (0.0045, "uncertain", True, False), (0.0035, "uncertain", False, False),
    (0.002, "fail", False, False)])
def test_a_limit_within_the_interval_is_uncertain(result, limit, verdict, passed, strict):
    check = single(result, f"int8:kl<{limit}")
    assert (check.verdict, check.passed) == (verdict, passed)
    assert single(result, f"int8:kl<{limit}", strict=True).passed is strict
    assert (check.missed_by is None) is passed


def test_a_task_is_compared_item_by_item(result):
    check = single(result, "int4:arc_easy>-1%")
    assert check.value == pytest.approx(-4) and check.unit == "pp" and check.relative
    assert check.test == "McNemar, exact" and check.p == pytest.approx(2 / 2**8) and check.items == 200
    assert (check.verdict, check.missed_by) == ("fail", pytest.approx(3)), "the interval excludes -1"
    result.rows[0].items = {}
    unpaired = single(result, "int4:arc_easy>-1%")
    assert unpaired.value == pytest.approx(-4) and unpaired.p is None and unpaired.verdict == "uncertain"
    assert unpaired.high - unpaired.low > 2 * (check.high - check.low), "without pairs little is known"
    assert single(result, "int4:arc_easy>50%").value == pytest.approx(56)
    assert single(result, "int4:arc_easy/acc_norm>49%").metric == "arc_easy/acc_norm"


def test_perplexity_against_a_number_and_against_the_reference(result):
    check = single(result, "int8:perplexity<+1%")
    assert check.passed and check.unit == "%" and check.value == pytest.approx(0.4, abs=0.15)
    assert check.low < 0.4 < check.high < 1 and check.p < 0.01
    assert single(result, "int8:perplexity<30").value == result.rows[1].metrics["perplexity"].value
    result.rows[1].window_means = {}
    unpaired = single(result, "int8:perplexity<+1%")
    reference, candidate = (row.metrics["perplexity"].value for row in result.rows[:2])
    assert unpaired.value == pytest.approx(100 * (candidate / reference - 1)) and unpaired.p is None


def test_texts(result):
    assert single(result, "int8:kl@code<0.019").verdict == "uncertain"
    check = single(result, "int8:kl@prose<0.01")
    assert check.text == "prose" and check.value == 0.001 and check.items == 20
    with pytest.raises(UsageError, match="was not evaluated") as caught:
        check_gate(result, "kl@cod<0.01")
    assert "did you mean 'code'" in caught.value.why


def test_sizes_and_speeds(result):
    checks = check_gate(result, "int8:size<0.7x,int8:file<160MB,int8:peak<1GB,int8:decode>20,"
                                "int8:prefill>1x").checks
    assert [check.passed for check in checks] == [True, False, True, True, True]
    assert checks[0].value == pytest.approx(163 / 269) and checks[1].missed_by == pytest.approx(3e6)
    assert checks[0].low is checks[0].high is None and checks[3].unit == "tok/s"
    reference, candidate = (row.metrics["prefill_tok_s"] for row in result.rows[:2])
    assert checks[4].low == candidate.low / reference.high


def test_flips_follow_from_top1(result):
    check = single(result, "int8:flips<10%")
    assert check.unit == "%"
    assert check.value == pytest.approx(100 * (1 - result.rows[1].metrics["top1"].value))
    result.rows[1].metrics["flips"] = Interval(0.5, 0.4, 0.6)
    assert single(result, "int8:flips<10%").value == 50


def test_differences_that_were_measured_are_used(result):
    row = result.rows[2]
    row.differences = [d.model_copy(update={"difference": -0.001, "low": -0.002, "high": 0.0})
                       for d in differences(result.rows[0], row) if d.metric == "arc_easy/acc"]
    assert single(result, "int4:arc_easy>-1%").value == pytest.approx(-0.1)


@pytest.mark.parametrize(("gate", "message", "help_"), [
    ("int44:kl<0.1", "no variant 'int44'", "did you mean 'int4'"),
    ("klm<0.1", "no metric", "did you mean 'kl'"),
    ("arc_challenge>-1%", "not measured", "--tasks arc_challenge"), ("arc_easy<60%", "bad value", "higher"),
    ("arc_easy>0.6", "is a percentage", "with %"), ("perplexity@prose<30", "not measured", "quality"),
    ("smollm2:perplexity<+1%", "compares the reference with itself", "another variant"),
    ("kl_p99<0.1", "not measured", "quality"), ("lambada_openai/perplexity<20", "not measured", "--tasks")])
def test_what_can_not_be_judged_says_what_to_add(result, gate, message, help_):
    with pytest.raises(UsageError, match=message) as caught:
        check_gate(result, gate)
    assert help_ in f"{caught.value.why} {caught.value.next}"


def test_speed_that_was_not_measured():
    with pytest.raises(UsageError, match="decode was not measured for int8") as caught:
        check_gate(sample_results()["without speed"], "decode>1.2x")
    assert "--no-speed" in caught.value.next


def test_a_task_with_several_scores_and_no_acc():
    result = sample_results()["tasks"]
    result.rows[1].metrics |= {"gsm8k/exact_match,flexible": Interval(0.1, 0, 0.2)}
    with pytest.raises(UsageError, match="several scores"):
        check_gate(result, "gsm8k>-1%")


def test_what_is_not_finite_meets_nothing():
    result = sample_results()["infinite values"]
    gate = check_gate(result, "perplexity<1e9,kl<100")
    assert [(c.verdict, c.passed, c.value) for c in gate.checks] == [("fail", False, None)] * 2
    result.rows[1].metrics["top1"] = Interval(math.inf, math.inf, math.inf)
    assert not check_gate(result, "top1>1%").passed


def test_a_single_model_and_none():
    assert check_gate(sample_results()["one model"], "perplexity<1000").passed
    with pytest.raises(UsageError, match="nothing to judge"):
        check_gate(sample_results()["no model"], "kl<1")


def test_kv_settings_are_variants():
    result = sample_results()["KV settings"]
    assert {c.variant for c in check_gate(result, "kl<1").checks} == {
        "smollm2 kv int8", "smollm2 kv window(512, sinks=4)+int4", "int8 kv none", "int8 kv int8",
        "int8 kv window(512, sinks=4)+int4"}
    assert len(check_gate(result, "int8 kv window(512, sinks=4)+int4:kl<1").checks) == 1
    assert len(check_gate(result, "int8:kl<1").checks) == 3


def test_rows_have_the_names_of_their_recipes():
    rows = [ModelResult("smollm2", "bf16", 16.0, 100, metrics={"kl_mean": Interval(0, 0, 0)}),
            ModelResult("out/made/smollm2-by-a", "rtn", 8.0, 50, metrics={"kl_mean": Interval(1, 1, 1)},
                        recipe="a")]
    result = EvalResult(sample_results()["one model"].protocol, rows)
    for scope in ("a", "smollm2-by-a", "out/made/smollm2-by-a"):
        assert single(result, f"{scope}:kl<2").variant == "a"


def test_the_text_fits_a_terminal_and_says_what_failed(result):
    result.rows[1].model = "a/folder/with-a-name-that-is-much-longer-than-any-terminal-has-room-for-int8"
    gate = check_gate(result, "kl<0.01,flips<3%,arc_easy>-4%,perplexity<+1%,decode>1.2x,size<0.5x,peak<1GB")
    text = gate_text(gate)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "int4: kl is 0.250 nats, which misses < 0.0100 nats by 0.240 nats" in flat
    assert "equals the limit" in flat and "gate failed: 4 of 14 checks" in flat
    strict = " ".join(gate_text(check_gate(result, "int4:kl<0.26", strict=True)).split())
    assert "a strict gate demands the whole interval" in strict and "failed: 1 of 1 checks, strict" in strict
    assert "gate passed: 1 check" in " ".join(gate_text(check_gate(result, "int4:kl<0.3")).split())
    assert "∞" in gate_text(check_gate(sample_results()["infinite values"], "perplexity<9"))


def planned(gate, **plan):
    check_planned(parse_gate(gate), **{"candidates": 2, "speed": True, "tasks": ["arc_easy"],
                                         "texts": ["code"], "metrics": ["mine"], **plan})


def test_a_gate_whose_metrics_will_be_measured():
    planned("kl<1,kl_p99@code<1,decode>1.2x,arc_easy>-1%,arc_easy/acc_norm>50%,mine<3,peak<1GB,size<0.5x")
    planned("perplexity<30,size<1GB", candidates=0, speed=False)


@pytest.mark.parametrize(("gate", "plan", "message", "help_"), [
    ("decode>1x", {"speed": False}, "speed isn't measured", "--no-speed"),
    ("piqa>-1%", {}, "task isn't run", "--tasks piqa"),
    ("mime<3", {}, "no metric 'mime'", "did you mean 'mine'"),
    ("kl@prose<1", {}, "'prose' isn't read", "code"),
    ("kl<1", {"candidates": 0}, "nothing to compare", "variant"),
    ("size<0.5x", {"candidates": 0}, "nothing to compare", "variant")])
def test_a_gate_whose_metrics_will_not_be_measured(gate, plan, message, help_):
    with pytest.raises(UsageError, match=message) as caught:
        planned(gate, **plan)
    assert help_ in f"{caught.value.why} {caught.value.next}"


def parsed(text):
    (condition,) = parse_gate(text)
    return condition.key, condition.relation, condition.limit, condition.unit, condition.relative


@pytest.mark.parametrize(("text", "expected"), [
    ("kl<0.01", ("kl_mean", "<", 0.01, "", False)),
    ("kl_p99 <= 1e-2", ("kl_p99", "<=", 0.01, "", False)),
    ("flips<2%", ("flips", "<", 2, "%", False)), ("flips<0.02", ("flips", "<", 2, "%", False)),
    ("flips<=0", ("flips", "<=", 0, "%", False)), ("top1>98%", ("top1", ">", 98, "%", False)),
    ("perplexity<30", ("perplexity", "<", 30, "", False)),
    ("perplexity<+1%", ("perplexity", "<", 1, "%", True)),
    ("decode>1.2x", ("decode_tok_s", ">", 1.2, "x", True)),
    ("prefill>100", ("prefill_tok_s", ">", 100, "", False)),
    ("decode_tok_s>=20", ("decode_tok_s", ">=", 20, "", False)),
    ("size<0.5x", ("file_bytes", "<", 0.5, "x", True)),
    ("file<100MB", ("file_bytes", "<", 1e8, "bytes", False)),
    ("peak<1GiB", ("peak_bytes", "<", 2**30, "bytes", False)),
    ("arc_easy>-1%", ("arc_easy", ">", -1, "%", True)), ("arc_easy>=60%", ("arc_easy", ">=", 60, "%", False)),
    ("arc_easy/acc_norm>-1%", ("arc_easy/acc_norm", ">", -1, "%", True)),
    ("gsm8k/exact_match,strict-match>50%", ("gsm8k/exact_match,strict-match", ">", 50, "%", False)),
    ("mine<3", ("mine", "<", 3, "", False))])
def test_conditions(text, expected):
    assert parsed(text) == expected


def test_scope_and_text():
    first, second, third = parse_gate("int4:kl<0.1, kl@code<0.02 ,int4 kv window(512, sinks=4)+int8:flips<5%")
    assert (first.scope, first.on) == ("int4", None) and (second.scope, second.on) == (None, "code")
    assert third.scope == "int4 kv window(512, sinks=4)+int8" and third.key == "flips"
    (windows,) = parse_gate(r"C:\models\int4:kl<0.1")
    assert windows.scope == r"C:\models\int4"


@pytest.mark.parametrize(("text", "message"), [
    ("", "empty"), ("kl<0.01,", "empty condition"), ("kl", "no condition"), ("kl=0.01", "no condition"),
    ("kl<", "no condition"), ("<0.01", "no condition"), ("kl<<0.01", "no limit"), ("kl<0.01x", "no limit"),
    ("kl<1%", "no limit"), ("kl<+0.01", "no limit"), ("kl<nan", "no limit"), ("kl<1e99999", "no limit"),
    ("flips<2", "no limit"), ("flips<+2%", "no limit"), ("decode>5%", "no limit"), ("size<5%", "no limit"),
    ("size<100", "no limit"), ("perplexity<1%", "no limit"), ("perplexity<+1", "no limit"),
    ("arc_easy>1.2x", "no limit"), ("kl>0.01", "bad value"), ("decode<1x", "bad value"),
    ("top1<99%", "bad value"), ("size>1MB", "bad value"), ("decode@code>20", "not of a text"),
    ("kl<0.1,kl<0.1", "twice"), ("int4:<0.1", "no condition"), ("kl<0.1;flips<2%", "no limit")])
def test_what_is_no_gate_says_so(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_gate(text)
    assert caught.value.next and len(caught.value.what) < 200


@given(st.text(max_size=60))
def test_any_text_is_a_gate_or_a_usage_error(text):
    try:
        assert parse_gate(text)
    except UsageError as error:
        assert error.what
