"""Results that are written and read again, and files that are no results."""


import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.evaluation.gates.check import check_gate
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.result import EvalResult, PairedDifference, TokenDiff
from quantkit.evaluation.results_file import read_results, result_from_dict
from quantkit.evaluation.roofline.result import MachineCeilings, OperatorSpeed, Roofline
from quantkit.evaluation.speed.results import DecodeSpeed, MemoryUse, PrefillSpeed, SpeedSweep, Spread
from quantkit.support.errors import UsageError
from quantkit.testing.results import sample_results

KEPT = Path(__file__).resolve().parents[2] / "evals" / "results"


def full() -> EvalResult:
    """A result with every field."""
    result, spread = sample_results()["tasks"], Spread(median=2.0, low=1.0, high=3.0)
    row = result.rows[1]
    row.texts = {"prose": {"kl_mean": Interval(0.1, 0.05, 0.2)}}
    row.window_means = {"prose": {"kl_mean": [0.1, 0.2], "perplexity": [3.0, 4]}}
    row.items = {"arc_easy/acc": [1.0, 0.0]}
    row.recipe = "int8"
    row.tool = "llama.cpp b1"
    row.kv = "int8"
    row.differences = [PairedDifference(metric="kl_mean", difference=0.1, low=0.0, high=0.2, verdict="worse")]
    row.speed = SpeedSweep(decode=(DecodeSpeed(batch=1, context=8, tok_s=spread),), gap_ms={"p99": 3.0},
                           prefill=(PrefillSpeed(tokens=8, tok_s=spread),), load_s=1.0,
                           memory=MemoryUse(weights=5, kv_by_context=((8, 9),)),
                           kernels={"prefill": {"a": 1}})
    row.measured = {"quality": "2026-01-01T00:00:00"}
    result.suite, result.floors = "quick", {"kl_mean": Interval(0.001, 0.0005, 0.002)}
    result.roofline = [Roofline(model="m", label="l", operators=(OperatorSpeed(
        operator="down", arithmetic="int8", rows=1, bytes=8, operations=16, seconds=spread, predicted_s=1.0,
        bound="memory"),), ceilings=MachineCeilings(read_bytes_s=1.0, operations_s={"int8": 2.0}))]
    result.sensitivity, result.plotted = [("model.layers.0.mlp.up_proj", 0.1)], ("kl_mean",)
    result.diff = TokenDiff(text="t", reference="a", candidate="b", tokens=("x", "y"), kl=(0.1, 0.2),
                            loss=(0.0, -0.1), expected=(None, ("a", "b")))
    result.other_diffs = [result.diff.model_copy(update={"candidate": "c"})]
    result.protocol = dataclasses.replace(result.protocol, runs=(1, 3))
    row.weight_bytes = 7
    result.gate = check_gate(result, "kl<1,arc_easy>10%")
    return result


def as_json(result: EvalResult) -> dict:
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))


@pytest.mark.parametrize("file", [file for file in sorted(KEPT.glob("*.json"))
                                  if b'"version": 1,' in file.read_bytes()[:40]], ids=lambda file: file.stem)
def test_what_was_kept_is_still_read(file):
    result = read_results(file)
    assert len(result.rows) >= 2 and result.other_diffs == []


@pytest.mark.parametrize("name", [name for name in sample_results() if name != "infinite values"])
def test_what_is_written_is_read_again(name):
    result = sample_results()[name]
    assert result_from_dict(as_json(result)) == result


def test_every_field_comes_back(tmp_path):
    result = full()
    assert all(getattr(result, field.name) not in (None, [], {}) for field in dataclasses.fields(result)
               if field.name != "question"), "a field that is empty tests nothing"
    (tmp_path / "results.json").write_text(json.dumps(result.to_dict()))
    assert read_results(tmp_path) == read_results(tmp_path / "results.json") == result


def test_what_was_not_finite_is_infinite():
    result = sample_results()["infinite values"]
    outcome = result_from_dict(as_json(result))
    assert outcome.rows[1].metrics["perplexity"] == Interval(math.inf, 1e300, math.inf)
    assert outcome.to_dict() == result.to_dict()
    result.rows[0].window_means = {"t": {"kl_mean": [1.0, math.inf]}}
    assert result_from_dict(as_json(result)).rows[0].window_means == {"t": {"kl_mean": [1.0, math.inf]}}


CHANGES = [
    (("version",), 2, "version"), (("version",), True, "version"), (("version",), None, "version"),
    (("results",), {}, "results"), (("results", 1), "x", "results[1]"), (("extra",), 1, "extra"),
    (("floors", "\x1b[2J"), 1, "floors"),
    (("results", 1, "extra"), 1, "extra"), (("results", 1, "file_bytes"), "1", "file_bytes"),
    (("results", 1, "file_bytes"), 1.5, "file_bytes"), (("results", 1, "model"), 7, "model"),
    (("results", 1, "kl_mean"), "1", "kl_mean"), (("results", 1, "kl_mean"), True, "kl_mean"),
    (("results", 1, "intervals", "kl_mean"), [1], "kl_mean"),
    (("results", 1, "intervals"), None, "intervals"),
    (("results", 1, "intervals", "file_bytes"), [1, 2], "file_bytes"),
    (("results", 1, "intervals", "nothing"), [1, 2], "nothing"),
    (("results", 1, "window_means"), [], "window_means"),
    (("results", 1, "window_means", "prose", "kl_mean"), 1, "kl_mean"),
    (("results", 1, "items", "arc_easy/acc"), ["1"], "arc_easy/acc"),
    (("results", 1, "differences", 0, "verdict"), "perfect", "verdict"),
    (("results", 1, "speed", "decode", 0, "batch"), "1", "batch"),
    (("results", 1, "texts", "prose"), 3, "prose"),
    (("protocol",), None, "protocol"), (("protocol", "window"), "512", "window"),
    (("protocol", "window"), 513, "doesn't follow"), (("protocol", "fingerprint"), "0" * 12, "fingerprint"),
    (("protocol", "extra"), 1, "extra"), (("metrics", "kl_mean", "direction"), "up", "direction"),
    (("metrics", "kl_mean"), [], "kl_mean"),
    (("metrics", "kl_mean", "distribution"), "other", "one of quantkit's"),
    (("floors", "kl_mean"), 0.1, "kl_mean"), (("gate", "checks", 0, "verdict"), "yes", "verdict"),
    (("diff", "kl"), ["a"], "kl"), (("roofline",), {}, "roofline"),
    (("sensitivity",), [["a"]], "sensitivity")]


@pytest.mark.parametrize(("place", "value", "named"), CHANGES)
def test_what_is_off_is_named(place, value, named):
    data = as_json(full())
    part = data
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    with pytest.raises(UsageError) as caught:
        result_from_dict(data)
    assert named in f"{caught.value.what} {caught.value.why}" and len(caught.value.why) <= 300
    assert caught.value.why.isprintable()


@pytest.mark.parametrize("content", [
    b"", b"[]", b"{", b'{"version": 1}', b'{"a": 1, "a": 2}', b'{"version": NaN}', b"\xff\xfe", b"[" * 5000,
    b'{"version": 1, "protocol": {}, "results": []}'])
def test_files_that_are_no_results(tmp_path, content):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(UsageError):
        read_results(tmp_path)


def test_a_file_that_is_not_there_and_one_that_is_too_large(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="is no file"):
        read_results(tmp_path / "none")
    with pytest.raises(UsageError, match="is no file"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(full().to_dict()))
    monkeypatch.setattr("quantkit.evaluation.results_file.MAX_BYTES", 100)
    with pytest.raises(UsageError, match="larger than 100 bytes"):
        read_results(tmp_path)


PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=5), inner, max_size=3), max_leaves=6)
FULL = as_json(full())


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_change_is_a_result_or_a_usage_error(data):
    changed = copy.deepcopy(FULL)
    part, depth = changed, data.draw(st.integers(1, 5))
    for step in range(depth):
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if step == depth - 1 or not isinstance(part[key], dict | list):
            part[key] = data.draw(TREES)
            break
        part = part[key]
    try:
        assert isinstance(result_from_dict(changed), EvalResult)
    except UsageError as error:
        assert error.what and error.next
