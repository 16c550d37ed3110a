"""The CSV file: read again, it says what the result says."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from quantkit.evaluation.metrics import Interval
from quantkit.testing import sample_results, tiny_model
from quantkit_csv.reporter import FIELDS, render

RESULTS = sample_results()


def reread(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


@pytest.mark.parametrize("name", RESULTS)
def test_every_value_comes_back(name: str) -> None:
    result = RESULTS[name]
    text = render(result)
    rows = reread(text)
    assert len(rows) == len(result.rows)
    for row, model in zip(rows, result.rows):
        assert list(row)[:len(FIELDS)] == list(FIELDS) and None not in row
        assert row["model"] in (model.model, f"'{model.model}") and row["kv"] == (model.kv or "")
        assert row["file_bytes"] == ("" if model.file_bytes is None else str(model.file_bytes))
        for key in result.measured:
            ends = [row[key], row[f"{key}_low"], row[f"{key}_high"]]
            value = model.metrics.get(key)
            assert ends == ["", "", ""] if value is None else (
                ends == [str(value.value), str(value.low), str(value.high)])


def test_it_is_rfc_4180() -> None:
    text = render(RESULTS["odd names"])
    assert text.endswith("\r\n") and text.split("\r\n")[0].startswith("model,method,kv,")
    widths = {len(row) for row in csv.reader(io.StringIO(text, newline=""), strict=True)}
    assert len(widths) == 1


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "-2", "@SUM(A1)", "  =1", "\t=1"])
def test_a_name_is_no_formula(name: str) -> None:
    result = sample_results()["ordinary"]
    result.rows[0].model = result.rows[0].method = name
    row = reread(render(result))[0]
    assert row["model"] == row["method"] == f"'{name}"


def test_a_negative_number_stays_a_number() -> None:
    result = sample_results()["ordinary"]
    result.rows[0].metrics["kl_mean"] = Interval(-0.5, -1.0, math.inf)
    row = reread(render(result))[0]
    assert (row["kl_mean"], row["kl_mean_low"], row["kl_mean_high"]) == ("-0.5", "-1.0", "inf")


@pytest.mark.slow
def test_eval_writes_and_prints_it(command: Callable[..., CompletedProcess[bytes]], tmp_path: Path) -> None:
    """As a user has it: found by its entry point, beside the other files, and on stdout by its name."""
    model, out = tiny_model(tmp_path / "tiny"), tmp_path / "out"
    common = ["eval", model, "--window", 32, "--windows", 3, "-q", "--no-speed"]
    command(*common, "--out", out)
    printed = command(*common, "--report", "csv").stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "frontier.png", "frontier.svg", "junit.xml", "model-card.md", "report.html", "report.md",
        "results.csv", "results.json"]
    assert (out / "results.csv").read_bytes() == printed
    assert reread(printed.decode())[0]["model"] == str(model)
