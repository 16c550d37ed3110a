"""``quantkit auto``: the plan's choice, made and run by one command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from quantkit.cli.main import main
from quantkit.runtime.verify import verify
from quantkit.testing import tiny_model

CONTEXT = ("--context", "64")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Some MB in bfloat16, so that its weights count beside the runtime."""
    return tiny_model(tmp_path_factory.mktemp("models") / "large", hidden_size=256, intermediate_size=1024,
                      num_hidden_layers=2, vocab_size=2048, tie_word_embeddings=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def auto(model, *options: object, typed: str = "/exit\n"):
    return CliRunner().invoke(main, ["auto", str(model), *CONTEXT, *map(str, options)], input=typed)


def needed(cli_json, model, recipe: str) -> int:
    """Bytes with a recipe and a plain KV cache."""
    plan = cli_json("plan", model, *CONTEXT, "--memory", "64GB", "--recipe", recipe, "--kv", "none")
    return plan["chosen"]["total_bytes"]


def test_a_model_that_fits_is_run_as_it_is(tiny, here):
    result = auto(tiny, "--memory", "8GB", typed="the cat\n/exit\n")
    assert result.exit_code == 0, result.stderr
    assert "weights none" in result.stdout and "nothing is expected to lose less" in result.stdout
    assert f"quantkit chat {tiny} --kv none" in result.stdout and not list(here.iterdir())
    assert result.stdout.splitlines()[-1].strip(), "there was an answer"


def test_what_does_not_fit_is_quantized_verified_and_found_again(large, here, cli_json):
    memory = f"{needed(cli_json, large, 'int8')}B"
    dry = auto(large, "--memory", memory, "--dry-run")
    assert dry.exit_code == 0 and not list(here.iterdir())
    assert "would take" in dry.stdout and "KL about" in dry.stdout and "tokens a second" in " ".join(
        dry.stdout.split())
    first = auto(large, "--memory", memory)
    assert first.exit_code == 0, first.stderr
    (out,) = here.iterdir()
    assert out.name.startswith("large-int8") and verify(out).ok
    recipe = out.name.removeprefix("large-")
    assert f"quantkit quantize {large} --recipe {recipe} --out {out.name}" in dry.stdout
    assert f"{out.name} is whole" in first.stdout and f"quantkit chat {out.name} --kv" in first.stdout
    again = auto(large, "--memory", memory)
    assert again.exit_code == 0 and f"{out.name} is there already" in again.stdout


def test_another_checkpoint_in_its_place_is_refused(large, checkpoint, here, cli_json):
    memory = f"{needed(cli_json, large, 'int8')}B"
    result = auto(large, "--memory", memory, "--out", checkpoint)
    assert result.exit_code == 2 and "is another checkpoint" in result.stderr
    assert "next: name another folder: --out DIR" in result.stderr


def test_it_serves(tiny, monkeypatch):
    served = {}
    monkeypatch.setattr("quantkit.cli.serve.command.command", click.Command("serve-local",
                                                                            callback=served.update))
    result = auto(tiny, "--memory", "8GB", "--serve")
    assert result.exit_code == 0, result.stderr
    assert served == {"models": (str(tiny),), "kv": ("none",), "revision": None, "port": 8000}
    assert f"quantkit serve-local {tiny} --kv none" in result.stdout


def test_what_never_fits_names_the_ways_out(large):
    result = auto(large, "--memory", "100MB")
    assert result.exit_code == 2 and "nothing fits" in result.stderr and "--memory" in result.stderr
