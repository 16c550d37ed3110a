"""``quantkit eval``: table or one JSON object, suites, and what it refuses."""

import json
import shlex

import pytest

from quantkit.evaluation.report.base import Reporter
from quantkit.testing.contract import registered

KEYS = {"model", "method", "bits_per_weight", "file_bytes", "peak_bytes", "perplexity", "kl_mean", "top1",
        "prefill_tok_s", "decode_tok_s"}
SMALL = ("--window", 32, "--windows", 3, "--no-speed")


def test_json_is_one_object_and_nothing_else(cli, tiny, checkpoint):
    result = cli("eval", tiny, checkpoint, "--window", 32, "--windows", 3, "--prefill", 16, "--max-tokens", 2,
                 "--repeats", 1, "--json")
    assert result.exit_code == 0, result.stderr
    report_json = json.loads(result.stdout)
    assert result.stdout.count("\n{") == 0 and result.stdout.startswith("{")
    assert [row["model"] for row in report_json["results"]] == [str(tiny), str(checkpoint)]
    assert all(set(row) >= KEYS and None not in [row[key] for key in KEYS] for row in report_json["results"])
    assert report_json["protocol"]["prefill"] == 16 and report_json["protocol"]["repeats"] == 1
    assert "evaluating" in result.stderr


def test_table(cli, tiny, checkpoint):
    result = cli("eval", tiny, checkpoint, *SMALL, "--quiet")
    assert result.exit_code == 0 and result.stderr == ""
    assert "tiny-int8 · cost negligible, rtn int8" in result.stdout
    assert "3 windows of 32 tokens" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_suite_and_options_that_go_before_it(cli_json, tiny):
    report_json = cli_json("eval", tiny, "--suite", "quick", "--windows", 2, "--no-speed")
    assert (report_json["protocol"]["window"], report_json["protocol"]["windows"]) == (256, 2)


def test_text_and_noise_floor(cli_json, tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("some words of my own, " * 300)
    report_json = cli_json("eval", tiny, "--text", tmp_path / "mine.txt", "--noise-floor", *SMALL)
    assert report_json["protocol"]["text"] == "mine.txt" and report_json["noise_floor_kl"]["value"] > 0


def test_out_holds_the_report(cli, tiny, tmp_path):
    result = cli("eval", tiny, *SMALL, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["frontier.png", "frontier.svg", "junit.xml", "model-card.md", "report.html", "report.md",
                     "results.json"]
    assert str(tmp_path / "report" / "report.md") in result.stderr


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("--suite", "quikc"), 2, "quick"),
    (("--text", "/nowhere/at/all.txt"), 2, "can't be read"),
    (("--window", "4096"), 2, "context"),
    (("--window", "512", "--windows", "100000"), 2, "tokens"),
    (("--window", "1"), 2, "--window"),
    (("--dtype", "int8"), 2, "--dtype"),
])
def test_eval_arguments_that_are_refused(cli, tiny, arguments, code, words):
    result = cli("eval", tiny, "--no-speed", *arguments)
    assert result.exit_code == code and words in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_no_such_model(cli, tiny, tmp_path):
    result = cli("eval", tiny, tmp_path / "nowhere", *SMALL)
    assert result.exit_code != 0 and "nowhere" in result.stderr and "next:" in result.stderr
    assert cli("eval").exit_code == 2


def test_models_times_kv_settings(cli_json, tiny, checkpoint):
    report_json = cli_json("eval", tiny, checkpoint, "--kv", "none,int8,window(16, sinks=2)",
                     "--window", 64, "--windows", 2, "--no-speed")
    rows = report_json["results"]
    assert [(row["model"], row["kv"]) for row in rows] == [
        (str(model), kv) for model in (tiny, checkpoint) for kv in ("none", "int8", "window(16, sinks=2)")]
    assert rows[0]["kl_mean"] == 0 and all(row["kl_mean"] > 0 for row in rows[1:])
    heads, dim, layers = 2, 16, 2
    assert rows[0]["kv_bytes_per_token"] == layers * heads * 2 * dim * 2
    assert rows[1]["kv_bytes_per_token"] == layers * heads * 2 * (dim + 2)
    assert all(row["kv_bytes"] > 0 for row in rows)
    assert report_json["protocol"]["prompt"] == 32 and report_json["protocol"]["scored"] == 2 * 31


def test_the_prefill_of_the_speed_test_fills_the_window(cli_json, tiny):
    report_json = cli_json("eval", tiny, "--kv", "int8", "--window", 64, "--windows", 1, "--max-tokens", 4,
                     "--repeats", 1)
    assert report_json["protocol"]["prefill"] == 64 - 4 - 1
    assert report_json["results"][0]["kv_bytes"] > 0 and report_json["results"][0]["decode_tok_s"] > 0


def test_a_kv_table_fits_a_terminal(cli, tiny, checkpoint):
    result = cli("eval", tiny, checkpoint, "--kv", "none,int8", "--window", 64, "--windows", 2, "--no-speed",
                 "-q")
    assert result.exit_code == 0, result.stderr
    assert "tiny-int8 kv int8 · cost negligible, rtn int8" in result.stdout and "KV/token" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("arguments", "words"), [
    (("--kv", "int9"), "int8"),
    (("--kv", "int8,int8"), "twice"),
    (("--kv", "window(0)"), "budget"),
    (("--kv", "int8", "--prompt-tokens", "31", "--window", "32"), "leaves nothing"),
])
def test_kv_settings_that_are_refused(cli, tiny, arguments, words):
    result = cli("eval", tiny, "--no-speed", *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_the_headline_and_the_command_come_first(cli, tiny, checkpoint, tmp_path):
    (tmp_path / "my text.txt").write_text("some words of my own, " * 300)
    result = cli("eval", tiny, checkpoint, *SMALL, "-q", "--dtype", "auto",
                 "--text", tmp_path / "my text.txt", "--out", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Take tiny-int8: ") and "times smaller" in result.stdout.splitlines()[0]
    command = json.loads((tmp_path / "report" / "results.json").read_text())["command"]
    assert shlex.split(command) == ["quantkit", "eval", str(tiny), str(checkpoint), "--text",
                                    str(tmp_path / "my text.txt"), "--window", "32", "--windows", "3",
                                    "--no-speed", "--out", str(tmp_path / "report")], "all but defaults"
    assert command in (tmp_path / "report" / "report.md").read_text()
    assert "Reproduce: quantkit eval " in result.stdout


def test_the_command_that_is_printed_runs_and_gives_the_same_numbers(cli, tiny, tmp_path):
    out = tmp_path / "a report"
    first = cli("eval", tiny, "--recipe", "int8,int4-rtn", *SMALL, "-q", "--kv", "none,window(16, sinks=2)",
                "--out", out)
    assert first.exit_code == 0, first.stderr
    results = json.loads((out / "results.json").read_text())["results"]
    printed = first.stdout.partition("Reproduce: ")[2].partition("\n\n")[0]
    (out / "results.json").unlink()
    again = cli(*shlex.split(printed.replace("\\\n", " "))[1:])
    assert again.exit_code == 0, again.stderr
    numbers = json.loads((out / "results.json").read_text())["results"]
    assert [row["kl_mean"] for row in numbers] == [row["kl_mean"] for row in results] and len(numbers) == 6


def test_reporters_by_name(cli, tiny, tmp_path):
    printed = cli("eval", tiny, *SMALL, "-q", "--report", "markdown")
    assert printed.exit_code == 0 and printed.stdout.startswith("# What each variant costs"), printed.stderr
    result = cli("eval", tiny, *SMALL, "-q", "--report", "json,table", "--report", "svg", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.svg", "results.json", "table.txt"]
    assert (tmp_path / "table.txt").read_text() == result.stdout


def test_a_reporter_that_fails_costs_no_measurement(cli, tiny):
    def render(result):
        raise IndexError("no such row")

    with registered("reporters", "broken", Reporter("broken", "broken.txt", render)):
        result = cli("eval", tiny, *SMALL, "-q", "--report", "broken")
    assert result.exit_code == 1 and "reporter 'broken' of quantkit.testing failed" in result.stderr
    assert "IndexError: no such row" in result.stderr
    assert "3 windows of 32 tokens" in result.stdout, "the table instead"


def test_the_plot_shows_what_it_is_told_to(cli, tiny, tmp_path):
    result = cli("eval", tiny, *SMALL, "-q", "--plot", "top1,perplexity", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    svg = (tmp_path / "frontier.svg").read_text()
    assert svg.index("top-1, %, higher is better") < svg.index("perplexity, lower is better")
    assert "decode, tok/s" not in svg


@pytest.mark.parametrize(("arguments", "words"), [
    (("--report", "markdwon"), "did you mean 'markdown'"), (("--report", "json,svg"), "--out"),
    (("--report", "svg", "--json"), "both print"), (("--report", "json,"), "empty name"),
    (("--plot", "kl_maen"), "did you mean 'kl_mean'"), (("--plot", ""), "empty name"),
    (("--plot", "decode_tok_s"), "speed isn't measured")])
def test_reports_that_are_refused_before_anything_is_loaded(cli, arguments, words):
    result = cli("eval", "/nowhere/at/all", "--no-speed", *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["eval", "eval-long"])
def test_out_is_tried_before_anything_is_loaded(cli, tmp_path, command):
    (tmp_path / "file").write_text("in the way")
    for out, code in ((tmp_path / "file", 2), (tmp_path / "file" / "report", 1)):
        result = cli(command, "/nowhere/at/all", "--out", out)
        assert result.exit_code == code and "file" in result.stderr and "/nowhere" not in result.stderr
    result = cli(command, "/nowhere/at/all", "--out", tmp_path / "new")
    assert result.exit_code != 0 and "/nowhere" in result.stderr and not (tmp_path / "new").exists()
