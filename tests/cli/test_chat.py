"""``quantkit chat``: what is typed line by line, and what is answered."""

from __future__ import annotations

import json
import os
import signal

import pytest
from click.testing import CliRunner

from quantkit.cli.main import main
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model


def chat(model, typed: str, *options: object):
    return CliRunner().invoke(main, ["chat", str(model), "-n", "8", *map(str, options)], input=typed)


def answers(model, *questions: str, system: str | None = None) -> list[str]:
    """What the model says to each, one after another."""
    loaded, texts = load(str(model)), []
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        (done,) = generate(loaded, [loaded.tokenizer.chat(messages)], Sampling(max_tokens=8))
        texts.append(done.text)
        messages.append({"role": "assistant", "content": done.text})
    return texts


def test_a_conversation_goes_on_and_begins_anew(tiny):
    first, second = answers(tiny, "the cat", "and the dog")
    result = chat(tiny, "the cat\n\nand the dog\n/clear\nthe cat\n/exit\nnever read\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{first}\n{second}\n{first}\n"
    assert "Ctrl-C stops an answer" in result.stderr


def test_the_end_of_the_input_leaves_and_a_system_message_counts(tiny):
    (answer,) = answers(tiny, "the cat", system="be brief")
    result = chat(tiny, "the cat", "--system", "be brief", "--kv", "none")
    assert (result.exit_code, result.stdout) == (0, f"{answer}\n\n")


def test_ctrl_c_stops_the_answer_and_not_the_conversation(tiny, monkeypatch):
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(len(steps))
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = chat(tiny, "the cat\n/clear\nthe cat\n/exit\n")
    whole = answers(tiny, "the cat")[0]
    assert result.exit_code == 0 and result.stdout.endswith(f"\n{whole}\n")
    stopped = result.stdout.removesuffix(f"\n{whole}\n")
    assert whole.startswith(stopped) and len(stopped) < len(whole)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_does_not_fit_is_told_and_left_out(tmp_path):
    model = tiny_model(tmp_path / "short", max_position_embeddings=64)
    result = chat(model, f"{'the cat ' * 64}\nthe cat\n/exit\n")
    assert result.exit_code == 0 and result.stdout == answers(model, "the cat")[0] + "\n"
    assert "/clear begins anew" in result.stderr and "64" in result.stderr


def test_a_model_without_a_template_is_refused_before_anything_is_typed(tmp_path):
    folder = tiny_model(tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    result = chat(folder, "the cat\n")
    assert result.exit_code == 1 and "no chat template" in result.stderr and not result.stdout


@pytest.mark.parametrize("options", [("--kv", "none,int8"), ("--temperature", "-1")])
def test_wrong_options(tiny, options):
    result = chat(tiny, "the cat\n", *options)
    assert result.exit_code != 0 and result.stderr
