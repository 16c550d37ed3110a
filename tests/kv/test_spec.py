"""The short way to write a KV setting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quantkit.kv.spec import MAX_LENGTH, KVSpec, parse_kv
from quantkit.support.errors import UsageError


@pytest.mark.parametrize(("text", "policy", "options", "codec", "canonical"), [
    ("none", "all", {}, "none", "none"),
    (" none ", "all", {}, "none", "none"),
    ("all", "all", {}, "none", "none"),
    ("int8", "all", {}, "int8", "int8"),
    ("all+int8", "all", {}, "int8", "int8"),
    ("int4+all", "all", {}, "int4", "int4"),
    ("window(512)", "window", {"budget": 512}, "none", "window(512)"),
    ("window(1024,sinks=4)+int8", "window", {"budget": 1024, "sinks": 4}, "int8",
     "window(1024, sinks=4)+int8"),
    ("int8 + window( 1024 , sinks = 4 )", "window", {"budget": 1024, "sinks": 4}, "int8",
     "window(1024, sinks=4)+int8"),
    ("window(sinks=4, budget=9)", "window", {"budget": 9, "sinks": 4}, "none", "window(9, sinks=4)"),
    ("snapkv(0.5)", "snapkv", {"budget": 0.5}, "none", "snapkv(0.5)"),
    ("snapkv(1e-3, window=8, kernel=3)", "snapkv", {"budget": 1e-3, "window": 8, "kernel": 3}, "none",
     "snapkv(0.001, kernel=3, window=8)"),
    ("window()", "window", {}, "none", "window"),
    ("rotation(3.5)", "all", {}, "rotation(3.5)", "rotation(3.5)"),
    ("snapkv(9) + int4( recent = 0 ) / rotation(2,sinks=0)", "snapkv", {"budget": 9},
     "int4(recent=0)/rotation(2, sinks=0)", "snapkv(9)+int4(recent=0)/rotation(2, sinks=0)"),
    ("window(a, b=true, c=false, d=x)", "window", {"budget": "a", "b": True, "c": False, "d": "x"}, "none",
     "window(a, b=true, c=false, d=x)"),
])
def test_what_is_read_and_how_it_is_written(text, policy, options, codec, canonical):
    spec = parse_kv(text)
    assert (spec.policy, spec.options) == (policy, options)
    assert str(spec.model_copy(update={"policy": "all", "options": {}})) == codec
    assert {name: type(value) for name, value in spec.options.items()} == {
        name: type(value) for name, value in options.items()}
    assert str(spec) == canonical and parse_kv(canonical) == spec and str(parse_kv(canonical)) == canonical


@pytest.mark.parametrize(("text", "said"), [
    ("", "can't be read"), ("  ", "can't be read"), ("+", "can't be read"), ("int8+", "can't be read"),
    ("window(5", "can't be read"), ("window 5", "can't be read"), ("window(5))", "can't be read"),
    ("window((5))", "can't be read"), ("window(5)int8", "can't be read"), ("window(5+4", "can't be read"),
    ("window(sinks=4, 5)", "first argument"), ("window(5, 4)", "first argument"),
    ("window(5, budget=4)", "twice"), ("window(a=1, a=2)", "twice"), ("window(=4)", "empty"),
    ("window(sinks=)", "empty"), ("window(5,)", "first argument"), ("window(,)", "empty"),
    ("int8+int4", "both a codec"), ("int8/int4/int8", "a slash"), ("window(5)/int8", "a slash"),
    ("int8/", "can't be read"), ("/int8", "can't be read"), ("int8/int9", "'int8'"),
    ("none+int8", "both a codec"), ("window(5)+snapkv(0.5)", "both a policy"), ("int9", "int8"),
    ("windw(5)", "'window'"), ("../x", "can't be read"), ("x" * (MAX_LENGTH + 1), "256")])
def test_what_cannot_be_read(text, said):
    with pytest.raises(UsageError) as caught:
        parse_kv(text)
    assert said in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.text("windowsnapkvtoint48ne+(),=. 0123456789-", max_size=40)))
def test_anything_is_a_setting_that_reads_back_or_an_error(text):
    try:
        spec = parse_kv(text)
    except UsageError:
        return
    again = parse_kv(str(spec))
    assert str(again) == str(spec)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["all", "window", "snapkv"]), st.sampled_from(["none", "int8", "bf16"]),
       st.dictionaries(st.sampled_from(["budget", "sinks", "window", "zeta"]),
                       st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False),
                                 st.booleans(), st.sampled_from(["x", "long-word"]))), st.randoms())
def test_written_and_read_again_in_any_order(policy, codec, options, random):
    spec = KVSpec(policy=policy, codec=codec, options=options)
    shuffled = list(options.items())
    random.shuffle(shuffled)
    assert str(KVSpec(policy=policy, codec=codec, options=dict(shuffled))) == str(spec)
    if len(str(spec)) <= MAX_LENGTH:
        again = parse_kv(str(spec))
        assert again == spec
        assert {k: type(v) for k, v in again.options.items()} == {k: type(v) for k, v in options.items()}


def test_strict_and_frozen():
    for wrong in ({"policy": 3}, {"codec": None}, {"options": {"a": [1]}}, {"extra": 1}):
        with pytest.raises(ValidationError):
            KVSpec.model_validate(wrong)
    with pytest.raises(ValidationError):
        KVSpec().policy = "window"
