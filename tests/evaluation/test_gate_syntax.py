"""Gates as they are typed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.evaluation.gates.syntax import parse_gate
from quantkit.support.errors import UsageError


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
