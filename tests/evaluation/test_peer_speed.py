"""Speed beside other tools, and models off every grid: what the scripts read, keep and make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.runtime.loader import load
from quantkit.sources.gguf import GGUFSource
from quantkit.testing import tiny_model

PEERS = Path(__file__).resolve().parents[2] / "evals" / "peers"
PROGRAM = """#!/bin/sh
case "$*" in
--version) echo "version: 7 (build 7)";;
*"-npl 8"*) echo "| 16 | 32 | 8 | 384 | 1.000 | 128.00 | 2.000 | 128.00 | 3.000 | 128.00 |";;
*) echo "warming up" && echo "| 512 | 4 | 1 | 516 | 4.000 | 128.00 | 0.500 | 8.00 | 4.5 | 114.7 |";;
esac
"""


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_rounds_are_added_to_a_row(tmp_path):
    (tmp_path / "Q4_0.gguf").write_bytes(bytes(1000))
    program = tmp_path / "llama-batched-bench"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    out = tmp_path / "speed.json"
    for _ in range(2):
        done = script(str(PEERS / "speed.py"), str(tmp_path), "--tool", f"llama.cpp={tmp_path}", "--out",
                      str(out))
        assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tool"], row["weights"], row["version"], row["file_bytes"]) for row in rows] == [
        ("llama.cpp", "Q4_0", "7 (build 7)", 1000)]
    cases = {(case["prompt"], case["batch"]): case for case in rows[0]["cases"]}
    assert cases[512, 1]["prefill_tok_s"] == [128, 128]
    assert cases[16, 8]["decode_tok_s"] == [128, 128]
    assert len(rows[0]["read_bandwidth"]) == len(rows[0]["ready_s"]) == 2
    line = done.stdout.splitlines()[-1].split()
    assert line[:3] == ["llama.cpp", "Q4_0", "0.00"] and line[5] == "128"


def test_a_tool_times_its_cases(tmp_path):
    model = tiny_model(tmp_path / "model")
    done = script(str(PEERS / "theirs" / "timed.py"), "quantkit", str(model), "2", "[[16, 2, 1], [20, 3, 4]]")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["version", "case", "case"]
    assert all(float(seconds) > 0 for line in lines[1:] for seconds in line[1:])


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_twin_computes_the_same_from_other_weights(tmp_path, family):
    pytest.importorskip("transformers")
    model, twin = tiny_model(tmp_path / "model", family), tmp_path / "twin"
    done = script(str(PEERS / "off_grid.py"), str(model), str(twin))
    assert done.returncode == 0, done.stderr
    assert "before rounding to bfloat16" in done.stdout
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        ours, theirs = (load(str(folder), dtype="float32").model(ids) for folder in (model, twin))
    assert (ours - theirs).abs().max() < 0.05 * ours.abs().max()
    file = GGUFSource(tmp_path / "twin.gguf", "twin.gguf")
    assert all(torch.equal(file.tensor(name).float(), tensor.float())
               for name, tensor in load_file(twin / "model.safetensors").items())
    before, after = (load_file(folder / "model.safetensors") for folder in (model, twin))
    for name in (name for name in before if "proj.weight" in name):
        ratio = (after[name].float() / before[name].float()).nan_to_num(1.0)
        assert ratio.max() > 1.15 > 0.9 > ratio.min()
