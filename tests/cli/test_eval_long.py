"""``quantkit eval-long``: table, JSON, report, and what it refuses."""

import pytest

from quantkit.testing import tiny_model

SMALL = ("--context", "300,500", "--depths", 2, "--samples", 1, "--prompt-tokens", 64, "--max-tokens", 12,
         "--filler")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("long") / "tiny", head_dim=32)


def test_table_and_report(cli, model, tmp_path):
    result = cli("eval-long", model, "--kv", "none,int8,snapkv(0.5)", "--tasks",
                 "passkey,positions,generated", *SMALL, "--fresh", "--out", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    for words in ("what the full cache answers", "snapkv(0.5), later", "by position",
                  "greedy generation differs"):
        assert words in result.stdout
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.md", "results.json"]
    assert "evaluating" in result.stderr and "report.md" in result.stderr


def test_json_and_the_model_s_own_setting(cli_json, model):
    found = cli_json("eval-long", model, "--tasks", "multikey", "--question", "later", "--seed", 3,
                     *SMALL, "-q")
    assert [one["kv"] for one in found["settings"]] == ["none"], "it has none of its own"
    assert found["protocol"]["questions"] == ["later"] and found["protocol"]["seed"] == 3
    assert len(found["replies"]) == 4 and found["positions"] == found["generated"] == []


@pytest.mark.parametrize(("arguments", "words"), [
    (("--tasks", "haystack"), "passkey"), (("--context", "1q"), "whole numbers"),
    (("--context", "9" * 5000), "whole numbers"),
    (("--context", "100000"), "context"), (("--kv", "int9"), "int8"),
    (("--text", "/nowhere/at/all.txt"), "read"),
    (("--question", "never"), "--question")])
def test_refusals(cli, model, arguments, words):
    result = cli("eval-long", model, *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
