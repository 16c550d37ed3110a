"""Options that take numbers of tokens: one way to write them, everywhere."""

import json

import click
import pytest

from quantkit.cli.main import main
from quantkit.cli.options import TokenCount, TokenCounts
from quantkit.testing import tiny_model

# every option whose help counts tokens
OPTIONS = {"generate": ["--max-tokens"], "plan": ["--context", "--prompt-tokens"],
           "eval": ["--window", "--prompt-tokens", "--prefill", "--max-tokens"],
           "eval-long": ["--context", "--prompt-tokens", "--max-tokens"],
           "bench decode": ["--context", "--prefill", "--max-tokens"], "quantize": ["--window"]}


def command_of(path: str) -> click.Command:
    context, names = click.Context(main), path.split()
    command: click.Command = main
    while names:
        _, command, names = command.resolve_command(context, names)
    return command


@pytest.mark.parametrize("path", OPTIONS)
def test_every_option_that_counts_tokens_takes_suffixes(path):
    options = {option: parameter for parameter in command_of(path).params for option in parameter.opts}
    for option in OPTIONS[path]:
        kind = options[option].type
        assert isinstance(kind, TokenCount | TokenCounts), option
        several = isinstance(kind, TokenCounts)
        value = kind.convert("8k,8K,12" if several else "8k", options[option], None)
        assert value == ((8000, 8192, 12) if several else 8000)
    left = [option for option, parameter in options.items()
            if isinstance(parameter.type, click.IntRange) and "tokens" in (parameter.help or "").lower()
            and option not in ("--top-k", "--windows")]
    assert left == [], "counts tokens too"


def test_a_plan_reads_them(cli, tmp_path):
    model = tiny_model(tmp_path / "model", max_position_embeddings=2048)

    def asked(context):
        result = cli("plan", model, "--context", context, "--memory", "8GB", "--bandwidth", "10GB/s",
                     "--flops", "1T", "--recipe", "int8", "--kv", "none", "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["asked"]["context"]

    assert (asked("1k"), asked("1K")) == (1000, 1024)


@pytest.mark.parametrize(("value", "problem"), [("8kb", "can't be read"), ("0", "--context is 0"),
                                                ("-1", "can't be read"), ("9t", "--context is 9t")])
def test_what_is_refused_says_how_to_write_it(cli, tiny, value, problem):
    result = cli("plan", tiny, f"--context={value}", "--memory", "8GB")
    assert result.exit_code == 2 and problem in result.stderr
    assert "K and M mean 1,024 and 1,048,576" in result.stderr
    assert "next: --context 8192, 8k or 8K" in result.stderr
