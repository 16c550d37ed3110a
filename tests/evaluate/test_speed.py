"""Speed and memory, measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit.errors import QuantkitError
from quantkit.evaluate import speed


def test_numbers_of_a_tiny_checkpoint(int8):
    found = speed.measure(str(int8), list(range(4, 12)), decode=4, repeats=3, threads=1)
    for interval in (found.prefill_tok_s, found.decode_tok_s):
        assert 0 < interval.low <= interval.value <= interval.high
    assert 20e6 < found.peak_bytes < 4e9 and found.load_s > 0
    assert set(found.kernels) == {"prefill", "decode"}
    assert all(sum(names.values()) == 14 for names in found.kernels.values()), "a kernel for every Linear"


def test_a_missing_model_is_the_workers_own_error(tmp_path):
    with pytest.raises(QuantkitError) as caught:
        speed.measure(str(tmp_path / "nowhere"), [5], decode=1, repeats=1, threads=1)
    error = caught.value
    assert "nowhere" in error.what and "exist" in error.what and error.next


@pytest.mark.parametrize(("code", "word"), [
    ("import sys; sys.exit('no idea')", "no idea"),
    ("print('noise')", ""),
    ("import os; os.kill(os.getpid(), 9)", ""),
])
def test_a_worker_that_dies_is_an_error_in_three_parts(monkeypatch, tiny, code, word):
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: real([sys.executable, "-c", code],
                                                                           **options))
    with pytest.raises(QuantkitError) as caught:
        speed.measure(str(tiny), [5], decode=1, repeats=1, threads=1)
    error = caught.value
    assert str(tiny) in error.what and word in error.why and error.why and "--no-speed" in error.next


def test_the_median_is_reported_and_the_range(monkeypatch):
    answer = {"prefill_tok_s": [1.0, 9.0, 3.0], "decode_tok_s": [2.0], "peak_bytes": 5, "load_s": 0.1,
              "kernels": {}}
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(
        command, 0, stdout="a library's chatter\n" + json.dumps(answer), stderr=""))
    found = speed.measure("any", [5], decode=1, repeats=3, threads=1)
    assert (found.prefill_tok_s.value, found.prefill_tok_s.low, found.prefill_tok_s.high) == (3.0, 1.0, 9.0)


def test_nothing_is_imported_from_the_folder_that_the_user_is_in(tiny, monkeypatch, tmp_path):
    for name in ("json", "torch", "quantkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert speed.measure(str(tiny), [5, 6, 7], decode=1, repeats=1, threads=1).load_s > 0


@pytest.mark.parametrize(("outcome", "said"), [
    ({"code": -9}, "SIGKILL, probably for want of memory"), ({"code": -11}, "SIGSEGV"),
    ({"code": 1, "stderr": "Traceback\n  File x\nRuntimeError: deep trouble\n"}, "RuntimeError: deep"),
    ({"stdout": "nothing useful"}, "no answer"), ({"stdout": "[1]"}, "no answer"), ({"code": 3}, "code 3"),
    ({"code": 1, "stdout": "{}", "stderr": "too late"}, "too late")])
def test_the_cause_of_a_failure_is_told(monkeypatch, outcome, said):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(
        command, outcome.get("code", 0), outcome.get("stdout", ""), outcome.get("stderr", "")))
    with pytest.raises(QuantkitError) as caught:
        speed.measure("some/model", [5], decode=1, repeats=1, threads=1)
    assert "some/model" in caught.value.what and said in caught.value.why


def test_the_worker_keeps_the_environment_and_finds_the_same_quantkit(monkeypatch):
    monkeypatch.setenv("SOME_SETTING", "kept")
    found = speed._environment()
    entries = found["PYTHONPATH"].split(os.pathsep)
    assert found["SOME_SETTING"] == "kept"
    assert str(Path(quantkit.__file__).parent.parent) in entries
    assert "" not in entries and len(entries) == len(set(entries))
