"""What only the run needs is durable too: text that the model wrote, what each token matters."""

from __future__ import annotations

import pytest

from quantkit.checkpoint import durable
from quantkit.quantization import run as module

RECIPE = {
    "calibration": {"text": "self", "windows": 6, "window": 16},
    "rules": [{"match": "lm_head", "optional": True},
              {"match": "*", "method": "gptq",
               "spec": {"bits": 4, "granularity": {"strategy": "group", "size": 32}}}]}


@pytest.fixture
def run(run_from):
    return run_from("own text", RECIPE)


def killed(run, number, out, at_step, in_child, kill, monkeypatch):
    out.parent.mkdir()
    at_step(number, kill)
    assert in_child(lambda: run(out)) == -9
    monkeypatch.setattr(durable, "step", lambda what: None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what, kept", [
    ("create part-work-text.json", ()), ("create part-work-importance.safetensors", ("write",)),
    ("rename part-work-importance.json", ("write",)),
    ("create part-layer-0.safetensors", ("write", "token_gradients")),
    ("remove part-work-text.safetensors", ("write", "token_gradients", "LayerRunner"))])
def test_what_was_found_is_not_found_again(run, tmp_path, at_step, in_child, kill, monkeypatch, what, kept):
    assert run.reference
    out = tmp_path / "here" / "out"
    killed(run, run.steps.index(what), out, at_step, in_child, kill, monkeypatch)
    for name in kept:
        monkeypatch.setattr(module, name, lambda *a, name=name: pytest.fail(f"{name} was called again"))
    run.again(out)


def test_damaged_work_is_done_again(run, tmp_path, at_step, in_child, kill, monkeypatch):
    """A power cut may tear what a kill leaves whole."""
    assert run.reference
    out = tmp_path / "here" / "out"
    killed(run, run.steps.index("create part-layer-1.safetensors"), out, at_step, in_child, kill, monkeypatch)
    for name in ("text", "importance"):
        part = out.with_name("out.partial") / f"part-work-{name}.safetensors"
        part.write_bytes(part.read_bytes()[:-8] + b"\0" * 8)
    run.again(out)
