"""``quantkit demo`` on a tiny model: checkpoints, table, answers and report; a second run uses them again."""

import json
from pathlib import Path

import pytest

from quantkit.cli import demo
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def chatless(tmp_path_factory) -> Path:
    """A model that takes the demo's windows and speed test, without a chat template."""
    folder = tiny_model(tmp_path_factory.mktemp("models") / "chatless", max_position_embeddings=1024)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo") / "quantkit-demo"


@pytest.fixture(autouse=True)
def _fewer(monkeypatch):
    """Of everything that only costs time."""
    monkeypatch.setattr(demo, "CALIBRATION_WINDOWS", 2)
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(demo, "DECODE", 2)


def made(out):
    return {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}


@pytest.mark.slow
def test_first_run_and_second(cli, chatless, out):
    result = cli("demo", chatless, "--out", out, "--windows", 2)
    assert result.exit_code == 0, result.stderr
    for name in ("chatless · bf16", "int8 · cost ", "int4 · cost ", "gptq int6", "nf4 · cost ",
                 demo.QUESTION, "perplexity", "KL"):
        assert name in result.stdout
    for recipe in demo.RECIPES:
        assert (out / recipe / "config.json").is_file()
        assert f"\n{recipe} (" in result.stdout, "an answer of every variant"
    report = (out / "report.md").read_text()
    assert result.stdout.startswith(("Take ", "Keep "))
    assert f"Reproduce: `quantkit demo {chatless} --out {out} --windows 2`" in report
    assert all(f"| {recipe} |" in report for recipe in demo.RECIPES) and demo.QUESTION in report
    assert (out / "frontier.svg").is_file() and str(out / "report.md") in result.stderr

    before = made(out)
    assert len(before) == 3
    result = cli("demo", chatless, "--out", out, "--windows", 2, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert made(out) == before, "nothing was quantized again"
    assert result.stderr.count("is there already") == 3
    assert len(found["results"]) == 4 and all(row["answer"] is not None for row in found["results"])
    assert found["results"][2]["kl_mean"] > found["results"][1]["kl_mean"] > 0


def test_checkpoints_of_another_model_are_not_used(cli, tiny, chatless, tmp_path):
    from quantkit.quantization.run import quantize

    quantize(str(tiny), "int8", tmp_path / "demo" / "int8")
    result = cli("demo", chatless, "--out", tmp_path / "demo", "--windows", 1)
    assert result.exit_code == 1 and "--out" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "demo" / "report.md").exists()


def test_a_folder_that_is_no_checkpoint_is_left_alone(cli, chatless, tmp_path):
    (tmp_path / "demo" / "int8").mkdir(parents=True)
    (tmp_path / "demo" / "int8" / "mine.txt").write_text("mine")
    result = cli("demo", chatless, "--out", tmp_path / "demo", "--windows", 1)
    assert result.exit_code == 1 and result.stdout == ""
    assert (tmp_path / "demo" / "int8" / "mine.txt").read_text() == "mine"


def test_an_answer_cannot_move_the_terminals_cursor(capsys):
    from quantkit.evaluation.result import EvalResult, ModelResult

    demo._show_answers(EvalResult(None, [ModelResult("m", "bf16", 16.0, 1,
                                                     answer="one\x1b[2Jtwo\rthree\nfour")],
                                  question="Why?"))
    said = capsys.readouterr().out
    assert not [char for char in said if not char.isprintable() and char != "\n"]
    assert "one" in said and "four" in said
