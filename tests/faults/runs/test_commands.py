"""Commands killed at random times and typed again: the same bytes as undisturbed ones."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import pytest

from quantkit.cli.main import main
from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model

KILLS = 50


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk() -> None:
    """Not here: writing takes the time that it takes."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """By name, the arguments without the folder that the command makes. ``eval`` is asked for no speed: its
    report holds only what must be equal byte for byte. Of that of ``eval-long`` see :func:`untimed`."""
    folder = tmp_path_factory.mktemp("commands")
    model = tiny_model(folder / "model", head_dim=32, num_hidden_layers=4)
    checkpoint = quantize(str(model), "int4-rtn", folder / "int4").out
    recipe = folder / "recipe.yaml"
    spec = {"bits": 4, "granularity": {"strategy": "group", "size": 32}}
    recipe.write_text(json.dumps({"calibration": {"windows": 8, "window": 64}, "rules": [
        {"match": "lm_head", "optional": True}, {"match": "*", "method": "gptq", "spec": spec}]}))
    return {
        "quantize": ["quantize", model, "--recipe", recipe, "-q", "--out"],
        "export": ["export", checkpoint, "--to", "gptq", "-q"],
        "eval": ["eval", model, checkpoint, "--window", 128, "--windows", 6, "--no-speed", "-q", "--out"],
        "eval-long": ["eval-long", model, "--kv", "int8,snapkv(0.5)", "--tasks",
                      "passkey,positions,generated", "--context", "300", "--depths", 2, "--samples", 1,
                      "--prompt-tokens", 64, "--max-tokens", 12, "--filler", "-q", "--out"]}


def untimed(files: dict[str, bytes]) -> dict[str, bytes]:
    """Without tokens a second, in ``results.json`` and in the last column of the report's table of memory:
    the only figures that each run of ``eval-long`` measures anew. Nothing else is left out."""
    speed = {"results.json": rb'"decode_tok_s": [\d.e+]+', "report.md": rb"(?<= MB \|) \d+ \|$"}
    return {name: re.sub(speed[name], b"", raw, flags=re.MULTILINE) if name in speed else raw
            for name, raw in files.items()}


def typed(arguments, after: float | None = None) -> int:
    """The exit code of a command in a process of its own, which is killed after so many seconds."""
    if (pid := os.fork()) == 0:
        code = 99
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            main([str(one) for one in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantize", "export", "eval", "eval-long"])
def test_50_kills(name, commands, contents, tmp_path, figures):
    """One to three kills, then the command is left alone; until 50 have struck."""
    arguments, chance = commands[name], random.Random(name)
    (tmp_path / "whole").mkdir()
    took = []
    for number in range(2):  # the second time, machine code is compiled
        start = time.monotonic()
        assert typed([*arguments, tmp_path / "whole" / str(number)]) == 0
        took.append(time.monotonic() - start)
    left_out = untimed if name == "eval-long" else dict
    undisturbed = left_out(contents(tmp_path / "whole" / "0"))
    assert undisturbed and left_out(contents(tmp_path / "whole" / "1")) == undisturbed
    landed = missed = ends = left = 0
    while landed < KILLS:
        out = tmp_path / str(ends) / "out"
        out.parent.mkdir()
        for _ in range(min(chance.randint(1, 3), KILLS - landed)):
            if typed([*arguments, out], chance.uniform(0, took[1])) == -signal.SIGKILL:
                landed += 1
                left += any(out.parent.iterdir())
            else:
                missed += 1
        code = typed([*arguments, out])
        # a run that makes a checkpoint may have been over but for its exit: its folder is never written over
        over = name in ("quantize", "export") and not out.with_name("out.partial").exists()
        assert code == 0 or over, code
        assert left_out(contents(out)) == undisturbed
        assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing else is left"
        ends += 1
    figures.setdefault("commands killed at random times", {})[name] = {
        "kills": landed, "that left something": left, "over before the signal": missed,
        "ended byte-identical": ends, "seconds undisturbed": round(took[1], 2)}
