from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.support import strict_json
from quantkit.support.errors import CheckpointError, SourceError
from quantkit.support.strict_json import parse_object, read_object

LARGEST = 10**strict_json.MAX_DIGITS - 1
numbers = st.integers(-LARGEST, LARGEST) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(st.none() | st.booleans() | numbers | st.text(),
                      lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_json_says_is_what_comes_back(data):
    assert parse_object(json.dumps(data).encode(), "x") == data


@pytest.mark.parametrize("raw,what", [
    (b'{"a": 1, "a": 2}', "'a' twice"), (b'{"b": {"c": 1, "d": 2, "c": 1}}', "'c' twice"),
    (b'{"a": 1, "\\u0061": 2}', "'a' twice"), (b"[1]", "list"), (b"3", "int"), (b"", "not JSON"),
    (b'{"a": NaN}', "not JSON"), (b'{"a": -Infinity}', "not JSON"), (b"{'a': 1}", "not JSON"),
    (b'{"a": 1}x', "not JSON"), (b'\xff{"a": 1}', "not JSON"), (b'{"a": ' + b"[" * 100_000, "not JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"), (b'{"_name_or_path": "\\ud800"}', "not JSON"),
    (b'{"\\uDfFf": 1}', "not JSON"),
])
def test_refused(raw, what):
    with pytest.raises(SourceError, match=what) as caught:
        parse_object(raw, "the file")
    assert "the file" in caught.value.what and len(str(caught.value)) < 500


def test_infinities_of_a_config_are_spelled_as_transformers_does():
    config = b'{"time_step_limit": [0.0, Infinity], "floor": -Infinity}'
    assert parse_object(config, "x", infinities=True) == {
        "time_step_limit": [0.0, {"__float__": "Infinity"}], "floor": {"__float__": "-Infinity"}}
    with pytest.raises(SourceError, match="not JSON"):
        parse_object(b'{"a": NaN}', "x", infinities=True)


def test_a_bomb_of_values_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_NODES", 1000)
    monkeypatch.setattr(strict_json.json, "loads", lambda *a, **k: pytest.fail("it was parsed"))
    with pytest.raises(SourceError, match="too many values"):
        parse_object(b'{"a": [' + b"{}," * 1000 + b"{}]}", "x")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": 1}')
    assert read_object(tmp_path / "a.json", 8) == {"a": 1}
    with pytest.raises(SourceError, match="larger than 7"):
        read_object(tmp_path / "a.json", 7)
    with pytest.raises(SourceError, match="can't be read"):
        read_object(tmp_path / "b.json", 8)
    with pytest.raises(SourceError, match="can't be read"):
        read_object(tmp_path, 8)


@pytest.mark.parametrize("raw,why", [
    (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper"), (b'{"a": 1e999}', "not finite"),
    (b'{"a": -1e400}', "not finite"), (b'{"a": -1' + b"0" * 39 + b"}", "more than 39 digits"),
    (b'{"a": "\\ud800"}', "surrogate"), (b'{"\\uDFFF": 1}', "surrogate"),
])
def test_what_python_reads_and_later_fails(raw, why):
    json.loads(raw)
    with pytest.raises(SourceError, match=why):
        parse_object(raw, "the file")


def test_whole_pairs_of_surrogates_are_text():
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', "x") == {"a": "\U0001f600"}


def test_the_error_is_the_callers():
    with pytest.raises(CheckpointError) as caught:
        parse_object(b"[", "the file", error=CheckpointError, next="do this")
    assert caught.value.next == "do this"
