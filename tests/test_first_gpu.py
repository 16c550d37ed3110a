"""The script for the first half hour on a GPU: rehearsed without one, and killed in the middle."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest


@pytest.fixture
def rehearsal(root, tmp_path):
    """Starts stages in a process group of their own; results come to ``out``."""
    begun = []

    def start(*stages):
        environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"),
                                    "WORK": str(tmp_path / "work"), "CARRY": str(tmp_path / "carry"),
                                    "PACK_SECONDS": "1", "OMP_NUM_THREADS": "1"}
        begun.append(subprocess.Popen(["bash", "evals/first_gpu.sh", "--rehearse", *stages], cwd=root,
                                      env=environment, text=True, start_new_session=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def results(out):
    """What came back: names and contents."""
    with tarfile.open(out / "results.tar.gz") as archive:
        return {member.name.removeprefix("results/"): archive.extractfile(member).read().decode()
                for member in archive.getmembers() if member.isfile()}


@pytest.mark.slow
def test_every_stage_runs_and_what_it_measures_comes_back(rehearsal, tmp_path):
    kernel = tmp_path / "work" / "triton" / "HASH"
    kernel.mkdir(parents=True)
    for name in ("kernel.json", "kernel.cubin", "kernel.ptx"):
        (kernel / name).write_text(name)
    process = rehearsal("all")
    printed, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, printed
    out = tmp_path / "out"
    files = list(out.iterdir())
    assert len(files) <= 8 and all(file.stat().st_size <= 16 << 20 for file in files)
    found = results(out)
    lines = [json.loads(line) for line in found["check.jsonl"].splitlines()]
    assert lines[0]["torch"] and lines[1]["copy_bytes_per_second"] > 0
    assert {line["product"] for line in lines[2:]} == {"w16a16", "w8a16", "fp8", "w4a16 g128", "nf4"}
    assert all(line["right"] for line in lines[2:])
    assert "passed" in found["tests.log"] or "100%" in found["tests.log"]
    for name in ("kernels", "kernels-pdl"):
        assert [row["fault"] for row in json.loads(found[f"{name}.json"])["rows"]] == [None]
    for name in ("decode-int4", "decode-int8", "decode-int4-pdl", "decode-int8-pdl"):
        measured = json.loads(found[f"{name}.json"])
        assert measured["cases"] and measured["pdl"] == name.endswith("-pdl")
    assert len(json.loads(found["same.json"])["rows"]) == 4
    assert json.loads(found["tuned/no_gpu.json"])["products"]
    with tarfile.open(out / "triton-cache.tar.gz.a") as archive:
        assert {member.name: member.size for member in archive if member.isfile()} == {
            "triton/HASH/kernel.json": 11, "triton/HASH/kernel.cubin": 12, "triton/HASH/kernel.ptx": 0}


def test_a_run_that_is_killed_leaves_what_it_had(rehearsal, tmp_path):
    carried = tmp_path / "carry" / "triton-cache.tar.gz.a"
    carried.parent.mkdir()
    (tmp_path / "kernel.cubin").write_text("machine code")
    with tarfile.open(carried, "w:gz") as archive:
        archive.add(tmp_path / "kernel.cubin", "triton/HASH/kernel.cubin")
    process = rehearsal("check")
    archive, deadline = tmp_path / "out" / "results.tar.gz", time.monotonic() + 600
    while not (archive.exists() and "w16a16" in results(archive.parent).get("check.jsonl", "")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert json.loads(results(archive.parent)["check.jsonl"].splitlines()[0])["torch"]
    assert (tmp_path / "work" / "triton" / "HASH" / "kernel.cubin").read_text() == "machine code"


def test_what_is_missing_is_said(root, tmp_path):
    """A Python that has nothing at all."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = subprocess.run(["bash", "evals/first_gpu.sh", "check"], cwd=root, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "bare/bin/python"),
                               "OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"),
                               "CARRY": str(tmp_path / "carry")}, check=False)
    assert done.returncode == 1
    assert "MISSING torch: needed for everything" in done.stdout and "pack" in done.stdout


def test_an_unknown_stage_prints_the_usage(root):
    done = subprocess.run(["bash", "evals/first_gpu.sh", "nothing"], cwd=root, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2 and "first_gpu.sh check" in done.stdout and "set -u" not in done.stdout


def load(root, name):
    spec = importlib.util.spec_from_file_location(name, root / "evals" / "first_gpu" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_test_a_function_is_picked(root):
    pick = load(root, "pick_tests").pick
    assert pick(["a.py::t[cuda-float16]\n", "a.py::t[cuda-bfloat16-1]\n", "a.py::t[cuda-bfloat16-2]\n",
                 "a.py::u\n", "\n", "3 tests collected\n", "b.py::t[x]\n"], ["bfloat16", "cuda"]) == [
        "a.py::t[cuda-bfloat16-1]", "a.py::u", "b.py::t[x]"]


@pytest.mark.slow
def test_a_model_is_cut_to_a_size(root, tmp_path, smollm2):
    from quantkit.checkpoint.open import open_model

    cut = load(root, "cut_model")
    target = tmp_path / "cut.gguf"
    assert cut.cut(cut.packaged(), target, 21_000_000) == 1 and target.stat().st_size < 23_000_000
    source = open_model(str(target))
    assert source.config()["num_hidden_layers"] == 1
    source.close()
    with pytest.raises(ValueError, match="one layer takes"):
        cut.cut(cut.packaged(), target, 1_000_000)
