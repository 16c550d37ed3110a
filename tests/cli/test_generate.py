"""``quantkit generate``: text on stdout, figures on stderr, and every refusal in words."""

import io
import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli import generate as module
from quantkit.cli.main import main
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling

SHORT = ("-n", 12)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def expected(folder, prompt, **settings):
    loaded = load(str(folder))
    ids = prompt if isinstance(prompt, list) else loaded.tokenizer.encode(prompt)
    return generate(loaded, [ids], Sampling(max_tokens=12, **settings))[0]


def test_text_on_stdout_and_figures_on_stderr(cli, tiny):
    result = cli("generate", tiny, "the cat", *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(tiny, "the cat").text + "\n"
    assert " tokens in (" in result.stderr and "12 out (" in result.stderr
    assert "--max-tokens reached" in result.stderr
    quiet = cli("generate", tiny, "the cat", *SHORT, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_a_checkpoint_generates(cli, checkpoint):
    result = cli("generate", checkpoint, "the cat", *SHORT, "-q")
    assert result.stdout == expected(checkpoint, "the cat").text + "\n"


def test_json(cli_json, checkpoint):
    data = cli_json("generate", checkpoint, "the cat", *SHORT, "--ignore-eos", "--dtype", "float32")
    assert data["model"] == str(checkpoint) and data["method"].startswith("rtn int8")
    assert data["prompt_tokens"] == len(load(str(checkpoint)).tokenizer.encode("the cat"))
    assert data["completion_tokens"] == len(data["token_ids"]) == 12 and data["finish_reason"] == "length"
    assert data["text"] == load(str(checkpoint)).tokenizer.decode(data["token_ids"])
    assert data["prefill_tok_s"] > 0 and data["decode_tok_s"] > 0
    assert data["sampling"]["temperature"] == 0 and data["sampling"]["seed"] is None
    assert data["protocol"] == {"chat": False, "dtype": "float32", "device": "cpu", "threads": 1,
                                "torch": torch.__version__}


def test_one_token_has_no_decode_speed(cli_json, tiny):
    assert cli_json("generate", tiny, "the", "-n", 1)["decode_tok_s"] is None


def test_a_drawn_seed_is_told_and_repeats_the_text(cli, cli_json, tiny):
    drawn = cli_json("generate", tiny, "the cat", *SHORT, "-t", 1.5)
    seed = drawn["sampling"]["seed"]
    again = cli("generate", tiny, "the cat", *SHORT, "-t", 1.5, "--seed", seed)
    assert again.stdout == drawn["text"] + "\n" and f"seed {seed}" in again.stderr
    assert cli_json("generate", tiny, "the cat", *SHORT, "-t", 1.5)["sampling"]["seed"] != seed


def test_every_option_arrives(cli_json, tiny):
    sampling = cli_json("generate", tiny, "a", "-n", 3, "-t", 0.7, "--top-k", 9, "--top-p", 0.8, "--min-p",
                        0.1, "--seed", 4,
                        "--repetition-penalty", 1.2, "--stop", "x y", "--stop", "z",
                        "--ignore-eos")["sampling"]
    assert sampling == {"max_tokens": 3, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1,
                        "seed": 4,
                        "repetition_penalty": 1.2, "stop": ["x y", "z"], "ignore_eos": True,
                        "stop_token_ids": [], "logit_bias": [], "presence_penalty": 0.0,
                        "frequency_penalty": 0.0}


def test_chat_uses_the_template(cli_json, tiny):
    tokenizer = load(str(tiny)).tokenizer
    ids = tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    data = cli_json("generate", tiny, "hi", *SHORT, "--chat", "--system", "Be brief.")
    assert (data["prompt_tokens"], data["token_ids"]) == (len(ids), expected(tiny, ids).token_ids)
    assert cli_json("generate", tiny, "hi", *SHORT, "--chat")["prompt_tokens"] < len(ids)


def test_a_control_token_in_a_message_is_text(cli_json, tiny):
    tokenizer, said = load(str(tiny)).tokenizer, [{"role": "user", "content": "a<|im_end|>b"}]
    data = cli_json("generate", tiny, "a<|im_end|>b", *SHORT, "--chat")
    assert data["prompt_tokens"] == len(tokenizer.chat(said))
    data = cli_json("generate", tiny, "a<|im_end|>b", *SHORT, "--chat", "--parse-special-tokens")
    assert data["prompt_tokens"] == len(tokenizer.chat(said, parse_special=True)) < len(tokenizer.chat(said))


def test_a_stop_text_is_not_printed(cli, tiny):
    whole = expected(tiny, "the cat").text
    stop = whole[5:8]
    result = cli("generate", tiny, "the cat", *SHORT, "--stop", stop)
    assert result.stdout == whole[:whole.index(stop)] + "\n" and "a stop text came" in result.stderr


@pytest.mark.parametrize(("given", "prompt"), [("the cat\n", "the cat"), ("the cat\n\n", "the cat\n"),
                                               ("the cat\r\n", "the cat"), ("naïve", "naïve")])
def test_the_prompt_from_standard_input(tiny, given, prompt):
    result = CliRunner().invoke(main, ["generate", str(tiny), "-", "-n", "12"], input=given.encode())
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(tiny, prompt).text + "\n"


def test_standard_input_that_is_no_text(tiny):
    result = CliRunner().invoke(main, ["generate", str(tiny), "-"], input=b"ab\xff")
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr and "byte 2" in result.stderr


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["a", "--system", "x"], 2, "--system is given without --chat"),
    (["a", "--parse-special-tokens"], 2, "--parse-special-tokens is given without --chat"),
    (["a", "-t", "-1"], 2, "temperature is '-1.0'"), (["a", "--top-p", "2"], 2, "top_p is '2.0'"),
    (["a", "-n", "0"], 2, "--max-tokens"), (["a", "--stop", ""], 2, "stop is"),
    (["a " * 600], 2, "tokens and 128 are to follow"), (["a", "-n", "600"], 2, "made for 512"),
    (["a", "--dtype", "int8"], 2, "--dtype"), (["a", "--revision", "v1"], 1, "makes no sense"),
    (["a", "--trace", "no/folder/trace.json"], 2, "the trace can't be written"),
])
def test_what_cant_be_is_refused(cli, tiny, arguments, code, said):
    result = cli("generate", tiny, *arguments)
    assert result.exit_code == code
    assert said in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_trace(cli_json, tiny, tmp_path):
    path = tmp_path / "trace.json"
    made = cli_json("generate", tiny, "the cat", "-n", 20, "--ignore-eos", "--trace", path)
    events = json.loads(path.read_text())
    assert sum(event["args"]["tokens"] for event in events if event["name"] == "decode") == 20
    read = [event["args"]["tokens"] for event in events if event["name"] == "prefill"]
    assert sum(read) == made["prompt_tokens"]
    assert "cat" not in path.read_text(), "it has no text"


def test_no_such_model(cli):
    result = cli("generate", "./nothing", "a")
    assert result.exit_code == 1 and "nothing" in result.stderr


def test_options_that_change_nothing_are_named(cli, tiny):
    result = cli("generate", tiny, "a", *SHORT, "--top-p", 0.5, "--seed", 1)
    assert "warning: --top-p, --seed changes nothing at temperature 0" in result.stderr
    assert "warning" not in cli("generate", tiny, "a", *SHORT).stderr


def test_text_comes_as_it_is_made(cli, tiny, monkeypatch):
    pieces = []
    monkeypatch.setattr(module.click, "echo", lambda text="", **_: pieces.append(text))
    cli("generate", tiny, "the cat", *SHORT, "-q")
    assert len(pieces) > 5 and "".join(pieces) == expected(tiny, "the cat").text


def test_an_interruption_ends_the_line(cli, tiny, monkeypatch):
    def interrupted(stream):
        if stream.result.text:
            raise KeyboardInterrupt
        stream.result.text = "half a"
        return "half a"

    monkeypatch.setattr("quantkit.api.model.TextStream.__next__", interrupted)
    result = cli("generate", tiny, "the cat")
    assert (result.exit_code, result.stdout) == (130, "half a\n")
    assert "interrupted" in result.stderr


def test_a_terminal_gets_no_control_characters(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    module.StreamedText()("a\x1b]0;title\x07b\x9b31m\tc\nd\re")
    assert screen.getvalue() == "a]0;titleb31m\tc\nde"
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stdout", plain)
    module.StreamedText()("a\x1b[0m")
    assert plain.getvalue() == "a\x1b[0m", "a file gets the text as it is"


def test_importing_the_command_is_cheap():
    code = ("import sys, quantkit.cli.generate\n"
            "print([m for m in ('torch', 'tokenizers', 'jinja2') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_real_model_answers(cli, smollm2):
    result = cli("generate", smollm2, "Name the capital of France.", "--chat", "-n", 24)
    assert result.exit_code == 0 and "Paris" in result.stdout
    assert "the model ended it" in result.stderr
