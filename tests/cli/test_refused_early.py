"""What the command line gets wrong is refused before a model is opened: there is none that could be."""

from __future__ import annotations

import pytest

from tests.helpers.options import OPTIONS, long_name

MISSING = "no-such-model"
COMMANDS = {
    "bench decode": (), "bench drafts": (), "eval": (), "eval-long": (), "chat": (), "generate": ("Hello",),
    "serve-local": ("--port", "0"), "plan": ("--context", "512", "--memory", "1GB"),
    "quantize": ("--recipe", "int4", "--dry-run"),
}
KV = [("--kv", "int9"), ("--kv", "window(1024"), ("--kv", "int8(bits=99)"), ("--kv", "window(-3)"),
      ("--kv", "none,int9"), ("--kv", "int8,,int4"), ("--kv", "snapkv(0.5, nothing=3)+int4")]
DEVICE = [("--device", "gpu"), ("--device", "cuda:99"), ("--device", "mps"), ("--dtype", "int8")]
WRONG = {
    "bench decode": [*KV, *DEVICE[:3], ("--batch", "0"), ("--context", "x"), ("--random", "int44"),
                     ("--max-tokens", "0")],
    "bench drafts": [*KV, *DEVICE[:3], ("--draft", "telepathy"), ("--kv", "int8,int4"),
                     ("--temperature", "-1")],
    "eval": [*KV, *DEVICE, ("--recipe", "int44", "--out", "OUT"), ("--suite", "fast"), ("--gate", "kl<<1"),
             ("--peer", "mind(reader)"), ("--report", "pigeon"), ("--tasks", "telepathy"), ("--plot", "mood"),
             ("--text", "missing.txt"), ("--kv", "int8,int8"), ("--recipe", "int8")],
    "eval-long": [*KV, *DEVICE, ("--tasks", "telepathy"), ("--context", "x"), ("--text", "missing.txt"),
                  ("--kv", "int8,int8")],
    "chat": [*KV, *DEVICE[:3], ("--temperature", "-1"), ("--kv", "int8,int4")],
    "generate": [*KV, *DEVICE, ("--draft", "telepathy"), ("--temperature", "-1"), ("--top-p", "7"),
                 ("--kv", "int8,int4"), ("--system", "Hi")],
    "serve-local": [*KV, *DEVICE, ("--draft", "telepathy"), ("--kv-memory", "much"), ("--prefix-cache", "8"),
                    ("--kv", "int8,int8"), ("--chat-template", "missing.jinja"), ("--random", "int44"),
                    ("--random", "int8", "--verify")],
    "plan": [*KV, ("--recipe", "int44"), ("--recipe", "int4,int44"), ("--flops", "fast"),
             ("--prompt-tokens", "513")],
    "quantize": [("--recipe", "int44"), *DEVICE[:3], ("--budget", "much"),
                 ("--calibration", "self", "--calibration", "random"), ("--window", "1"),
                 ("--executor", "x")],
}


@pytest.mark.parametrize(("command", "wrong"), [
    pytest.param(command, wrong, id=f"{command} {' '.join(wrong)}")
    for command, cases in WRONG.items() for wrong in cases])
def test_it_is_refused_before_a_model_is_opened(cli, tmp_path, monkeypatch, command, wrong):
    monkeypatch.chdir(tmp_path)
    result = cli(*command.split(), MISSING, *COMMANDS[command], *wrong)
    assert result.exit_code in (1, 2) and "Traceback" not in result.stderr
    first = result.stderr.splitlines()[0]
    assert first.startswith("error: ") and MISSING not in first, "the option comes first"


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_mistake_the_model_is_what_is_missing(cli, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    result = cli(*command.split(), MISSING, *COMMANDS[command])
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code and len(errors) == 1 and MISSING in errors[0], result.stderr


def test_every_command_with_such_an_option_is_here():
    wanted = {path for path, option in OPTIONS if long_name(option) in ("--kv", "--recipe", "--draft")}
    assert wanted == set(COMMANDS) == set(WRONG)
