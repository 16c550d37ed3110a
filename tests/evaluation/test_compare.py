"""Two results side by side."""

import dataclasses
import json
import math

import numpy as np
import pytest

from quantkit.evaluation.compare import compare_results
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.result import EvalResult
from quantkit.support.errors import UsageError
from quantkit.testing.results import sample_results


def measured(factor: float = 1.0, lost: int = 0) -> EvalResult:
    """The ordinary result, with windows and items; KL times ``factor``, ``lost`` answers fewer."""
    random, result = np.random.default_rng(0), sample_results()["ordinary"]
    for index, row in enumerate(result.rows):
        kl = np.abs(random.normal(0.1 * index, 0.02 * index, 30)) * factor
        row.metrics["kl_mean"] = Interval(kl.mean(), kl.mean() * 0.9, kl.mean() * 1.1)
        row.window_means = {"prose": {"kl_mean": list(kl)}}
        row.items = {"arc_easy/acc": [0.0] * (lost * (index > 0)) + [1.0] * (100 - lost * (index > 0))}
        share = float(np.mean(row.items["arc_easy/acc"]))
        row.metrics["arc_easy/acc"] = Interval(share, share - 0.05, share)
        row.manifest_sha256 = None if index == 0 else str(index) * 64
    return result


def changes(comparison, name):
    (variant,) = (variant for variant in comparison.variants if variant.name == name)
    return {change.metric: change for change in variant.changes}


def test_pairs_are_compared_window_by_window_and_item_by_item():
    table = changes(compare_results(measured(), measured(0.8, lost=9)), "int4")
    kl, task = table["kl_mean"], table["arc_easy/acc"]
    assert kl.verdict == "better" and kl.p < 0.001 and kl.low < kl.change < kl.high < 0
    assert kl.change == pytest.approx(kl.after - kl.before)
    assert task.verdict == "worse" and task.test == "McNemar, exact" and task.change == pytest.approx(-0.09)
    assert table["perplexity"].verdict is None, "its windows aren't there"
    assert table["decode_tok_s"].change == 1 and table["file_bytes"].change == 1


def test_the_same_result_twice():
    comparison = compare_results(measured(), measured())
    assert [variant.name for variant in comparison.variants] == ["smollm2", "int8", "int4"]
    assert [variant.same_checkpoint for variant in comparison.variants] == [None, True, True]
    assert not comparison.notes and not comparison.only_before
    assert "kl_mean" not in changes(comparison, "smollm2"), "the reference's distance from itself"
    assert changes(comparison, "int8")["kl_mean"].verdict == "indistinguishable"
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert data["fingerprint"] == comparison.fingerprint


@pytest.mark.parametrize(("field", "value", "shown"), [
    ("window", 256, "window: 512 and 256"), ("dtype", "float32", "dtype: bfloat16 and float32"),
    ("prompt", 128, "prompt: none and 128"), ("windows", 4, "windows: 8 and 4"),
    ("text_sha256", "ef" * 32, "(sha256 abababababab) and pydoc-topics-3.11 (sha256 efefefefefef)"),
    ("tokens_sha256", "ef" * 32, "tokens_sha256: cdcdcdcdcdcd… and efefefefefef…")])
def test_unlike_protocols_are_refused_with_the_field(field, value, shown):
    other = measured()
    other.protocol = dataclasses.replace(other.protocol, **{field: value})
    with pytest.raises(UsageError, match=f"protocols differ in {field[:4]}") as caught:
        compare_results(measured(), other)
    assert shown in caught.value.why and len(caught.value.why.splitlines()) == 1


def test_another_machine_has_another_speed_and_the_same_quality():
    other = measured()
    other.protocol = dataclasses.replace(other.protocol, cpu="Other", threads=8, quantkit="9.9")
    comparison = compare_results(measured(), other)
    table = changes(comparison, "int8")
    assert "kl_mean" in table and "file_bytes" in table
    assert not {"decode_tok_s", "prefill_tok_s", "peak_bytes"} & table.keys()
    version, speed = comparison.notes
    assert version == "quantkit 0.1.0 → 9.9"
    assert speed.startswith("speed is not compared: cpu Some(R)") and "threads 2 → 8" in speed


def test_another_reference_is_refused():
    other = measured()
    other.rows[0].model = "llama"
    with pytest.raises(UsageError, match="references differ") as caught:
        compare_results(measured(), other)
    assert "smollm2 (bf16) and llama (bf16)" in caught.value.why


def test_variants_that_only_one_has():
    before, after = measured(), measured()
    before.rows[1].model, after.rows[2].model = "out/nf4", "elsewhere/int4"
    comparison = compare_results(before, after)
    assert (comparison.only_before, comparison.only_after) == (("nf4",), ("int8",))
    assert [variant.name for variant in comparison.variants] == ["smollm2", "int4"]
    with pytest.raises(UsageError, match="no variant in common"):
        compare_results(sample_results()["no model"], measured())


def test_texts_and_other_numbers_of_items():
    before, after = measured(), measured()
    for result in (before, after):
        result.rows[2].texts = {text: {"kl_mean": Interval(0.1, 0.05, 0.2)} for text in ("prose", "code")}
    after.rows[2].items["arc_easy/acc"].append(1.0)
    comparison = compare_results(before, after)
    variant = comparison.variants[2]
    texts = [change.text for change in variant.changes if change.metric == "kl_mean"]
    assert texts == ["", "prose", "code"]
    assert comparison.notes == ("int4: arc_easy/acc has 100 and 101 items, so it isn't paired",)


def test_what_is_not_finite_is_null_in_json():
    result = sample_results()["infinite values"]
    data = compare_results(result, result).to_dict()
    (change,) = (change for change in data["variants"][1]["changes"] if change["metric"] == "perplexity")
    assert change["before"] is None and change["change"] is None
    json.dumps(data, allow_nan=False)


def test_the_command(cli_results, cli):
    done = cli("compare", *cli_results)
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    assert "int4, the same checkpoint" in done.stdout
    assert "better" in done.stdout and "unpaired" in done.stdout
    data = json.loads(cli("compare", *cli_results, "--json").stdout)
    assert [variant["name"] for variant in data["variants"]] == ["smollm2", "int8", "int4"]
    assert math.isfinite(data["variants"][1]["changes"][0]["change"])


@pytest.fixture
def cli_results(tmp_path):
    """A folder and a file."""
    for name, result in (("a", measured()), ("b", measured(0.8))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(result.to_dict()))
    return tmp_path / "a", tmp_path / "b" / "results.json"


@pytest.fixture
def cli():
    """``cli("compare", …)`` → exit_code, stdout, stderr."""
    from click.testing import CliRunner

    from quantkit.cli.main import main

    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_stranger_s_results_don_t_command_the_terminal(cli, tmp_path):
    hostile = measured()
    hostile.protocol = dataclasses.replace(hostile.protocol, cpu="\x1b[2Jcpu", quantkit="\x1b]0;x\x07")
    for row in hostile.rows:
        row.texts = {"\x1b[31mred": {"kl_mean": Interval(0.1, 0, 1)}, "b": {"kl_mean": Interval(0.1, 0, 1)}}
    hostile.rows[2].model = "\x1b[5mnew"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps(hostile.to_dict()))
    plain = measured()
    for row in plain.rows:
        row.texts = hostile.rows[0].texts
    fields = ({}, {"text": "\x1b[1mt", "text_sha256": "\x1b" * 64}, {"dtype": "\x1b[7m"})
    for number, change in enumerate(fields):
        other = dataclasses.replace(plain, protocol=dataclasses.replace(plain.protocol, **change))
        (tmp_path / "results.json").write_text(json.dumps(other.to_dict()))
        done = cli("compare", tmp_path, tmp_path / "a")
        assert done.exit_code == (2 if number else 0)
        assert not any(char in done.stdout + done.stderr for char in "\x1b\x07")
