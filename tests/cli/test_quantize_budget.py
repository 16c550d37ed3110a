"""``quantkit quantize --budget``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from quantkit.checkpoint.reader import Checkpoint
from quantkit.runtime.verify import verify

FEW = ("--windows", 3, "--window", 40)


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where sensitivities are kept."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sensitivity"


@pytest.fixture
def ladder(tmp_path):
    """A recipe whose candidates need no solving."""
    path = tmp_path / "ladder.yaml"
    one = "  - {{method: rtn, spec: {{bits: {}, granularity: {{strategy: group, size: 32}}}}}}\n"
    path.write_text("candidates:\n" + "".join(map(one.format, (3, 4, 6))) + "  - {method: null}\n")
    return path


def test_dry_run_shows_the_choice_what_it_should_cost_and_one_width_for_all(cli, tiny):
    result = cli("quantize", tiny, "--budget", "4.25bpw", "--dry-run", *FEW)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    for words in ("predicted KL", "q/k/v", "gate/up", "down", "one for all", "int4 g64 sym",
                  "int8 channel sym", "*.mlp.down_proj", "budget        4.25bpw: 4."):
        assert words in result.stdout, words
    again = f"quantkit quantize {tiny} --budget 4.25bpw --window 40 --windows 3 --out OUT"
    assert lines[-1] == f"next          {again}"
    assert max(map(len, lines[:-1])) <= 80


def test_json_of_the_plan_and_of_the_run(cli_json, tiny, ladder, tmp_path, kept):
    asked = (tiny, "--recipe", ladder, "--budget", "80kB", *FEW)
    plan = cli_json("quantize", *asked, "--dry-run")
    assert plan["budget"]["tensor_bytes"] == plan["disk_bytes"] <= 80_000
    assert plan["budget"]["predicted_kl"] > 0 and len(plan["budget"]["uniform"]) == 3
    assert plan["recipe"]["rules"] and "candidates" not in plan["recipe"]
    measured = {path: path.stat().st_mtime_ns for path in kept.rglob("part-*")}
    made = cli_json("quantize", *asked, "--out", tmp_path / "OUT", "--quiet")
    assert made["budget"] == plan["budget"] and made["tensor_bytes"] == plan["disk_bytes"]
    assert measured == {path: path.stat().st_mtime_ns for path in kept.rglob("part-*")}, "measured again"
    assert verify(tmp_path / "OUT").ok
    with Checkpoint.open(tmp_path / "OUT") as checkpoint:
        assert checkpoint.manifest.recipe == plan["recipe"]
        assert {row.name: row.spec and row.spec.bits for row in checkpoint.manifest.layers} == {
            row["name"]: row["spec"] and row["spec"]["bits"] for row in plan["rows"]}


def test_a_run_prints_the_choice_too(cli, tiny, ladder, tmp_path):
    result = cli("quantize", tiny, "-r", ladder, "--budget", "5bpw", "-o", tmp_path / "OUT", *FEW)
    assert result.exit_code == 0, result.stderr
    assert "predicted KL" in result.stdout and "checkpoint" in result.stdout
    assert cli("generate", tmp_path / "OUT", "Once", "--max-tokens", 2, "-q").exit_code == 0


@pytest.mark.parametrize("arguments, said", [
    ((), ("neither --recipe nor --budget", "--budget 4.25bpw")),
    (("--budget", "4.25"), ("'4.25' is no budget", "5GB")),
    (("--budget", "1bpw"), ("less than any choice", "the same command with --budget 2.28bpw")),
    (("--budget", "99GB"), ("more than any choice", "16bpw")),
    (("-r", "int4", "--budget", "4bpw"), ("recipe 'int4' has no candidates", "leave out --recipe")),
    (("-r", "mixed"), ("recipe 'mixed' leaves a choice", "--budget 4.25bpw")),
])
def test_budgets_that_are_refused(cli, tiny, tmp_path, arguments, said, kept):
    result = cli("quantize", tiny, *arguments, "-o", tmp_path / "OUT", *FEW)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert all(words in result.stderr for words in said) and "next: " in result.stderr
    assert not kept.exists() and not (tmp_path / "OUT.partial").exists()


def test_out_is_asked_for_before_anything_is_measured(cli, tiny, tmp_path, kept):
    result = cli("quantize", tiny, "--budget", "4.25bpw")
    assert result.exit_code == 2 and "--budget 4.25bpw --out OUT" in result.stderr
    (tmp_path / "OUT").mkdir()
    result = cli("quantize", tiny, "--budget", "4.25bpw", "-o", tmp_path / "OUT")
    assert result.exit_code == 1 and "already exists" in result.stderr and not kept.exists()


def test_recipes_show_names_the_candidates(cli):
    shown = " ".join(cli("recipes", "show", "mixed").stdout.split())
    assert "candidate 1 gptq, int2 g64 sym" in shown and "--recipe mixed --budget 4.25bpw --out OUT" in shown


@pytest.mark.slow
def test_killed_while_measuring_and_quantizing_it_ends_with_the_same_bytes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "other"))
    command = [sys.executable, "-m", "quantkit.cli.main", "quantize", str(tiny), "--budget", "4bpw", "-q",
               "--windows", "3", "--window", "40", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=300, capture_output=True)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    for there in ("cache/sensitivity/*/part-work-layer.0.json", "out.partial/part-layer-0.json"):
        running = subprocess.Popen([*command, str(tmp_path / "out")], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 200
        while not list(tmp_path.glob(there)) and running.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        assert not (tmp_path / "out").exists(), "it was over before it could be killed"
    done = subprocess.run([*command, str(tmp_path / "out"), "--json"], check=True, timeout=300,
                          capture_output=True)
    assert json.loads(done.stdout)["resumed_units"] >= 1
    whole, out = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
                  for name in ("whole", "out"))
    assert whole == out


def test_the_next_command_is_the_one_that_was_typed(cli, tiny, ladder, tmp_path):
    text = tmp_path / "a text.txt"
    text.write_text("Once upon a time. " * 200)
    result = cli("quantize", tiny, "-r", ladder, "--budget", "80kB", "--dry-run", "--calibration", text, *FEW,
                 "--seed", "3", "--device", "cpu", "--strict", "--quiet")
    assert result.stdout.splitlines()[-1].split(None, 1)[1] == (
        f"quantkit quantize {tiny} --recipe {ladder} --budget 80kB --calibration '{text}' "
        "--window 40 --windows 3 --seed 3 --device cpu --strict --quiet --out OUT")


def no_gpu(name: str):
    """As torch says it of a machine without one, also where there is one."""
    raise RuntimeError("no NVIDIA driver was found")


@pytest.mark.parametrize(("option", "value"), [("--device", "cuda"), ("--executor", "ray")])
def test_what_this_machine_lacks_is_said_before_anything_is_measured(cli, tiny, tmp_path, kept, option, value,
                                                                      monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    if value == "cuda":
        monkeypatch.setattr("quantkit.support.device.torch", SimpleNamespace(device=no_gpu))
    result = cli("quantize", tiny, "--budget", "4.25bpw", "--out", tmp_path / "OUT", option, value, *FEW)
    assert result.exit_code != 0 and not kept.exists() and not (tmp_path / "OUT.partial").exists()
    assert ("can't be used" if value == "cuda" else "needs Ray") in result.stderr


def test_a_run_says_which_phase_of_how_many_it_is_in(cli, tiny, ladder, tmp_path):
    asked = ("quantize", tiny, "--recipe", ladder, "--budget", "80kB", *FEW)
    phases = [line.partition("phase ")[2].partition(":")[0]
              for line in cli(*asked, "--out", tmp_path / "OUT").stderr.splitlines() if "phase " in line]
    assert list(dict.fromkeys(phases)) == [
        "1 of 7, weighing tokens forward", "2 of 7, weighing tokens backward", "3 of 7, measuring candidates",
        "6 of 7, quantizing layers", "7 of 7, assembling and rereading"], "rtn needs no weighing once more"
    again = cli(*asked, "--dry-run").stderr
    assert "phase 3 of 3, measuring candidates" in again and "weighing" not in again, "it is kept"
