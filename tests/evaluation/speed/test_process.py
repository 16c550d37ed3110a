"""Speed and memory, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import quantkit
from quantkit.evaluation.speed import process as speed
from quantkit.evaluation.speed.decoding import weights_in_memory
from quantkit.evaluation.speed.results import SpeedSweep, Spread, SweepSettings
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError

SETTINGS = SweepSettings(batches=(1, 2), contexts=(0, 70, 600), prefill=20, decode=4, repeats=2)


def measure(uri, **options):
    return speed.measure_sweep(str(uri), [5, 6, 7], SETTINGS, threads=1, **options)


def test_a_sweep_of_a_tiny_checkpoint_through_its_worker(int8):
    """600 tokens are more than it was made for; two pages of 64 slots hold 70 tokens."""
    sweep = measure(int8, kv="int8")
    assert SpeedSweep.model_validate_json(sweep.model_dump_json()) == sweep and sweep.settings == SETTINGS
    assert [(case.context, case.batch) for case in sweep.decode] == [
        (context, batch) for context in (0, 70, 600) for batch in (1, 2)]
    for case in sweep.decode:
        if case.context == 600:
            assert "604 tokens" in case.left_out and "512" in case.left_out and case.tok_s is None
        else:
            assert case.left_out is None and (case.runs, case.tokens) == (2, 4)
            assert 0 < case.tok_s.low <= case.tok_s.median <= case.tok_s.high
            assert case.of_read == case.bytes_s.median / case.read_bytes_s.median
    (prefill,) = sweep.prefill
    assert (prefill.tokens, prefill.runs) == (20, 2)
    for spread in (prefill.tok_s, prefill.first_token_s, prefill.decode_tok_s):
        assert 0 < spread.low <= spread.median <= spread.high
    assert 0 < sweep.gap_ms["median"] <= sweep.gap_ms["p99"] and sweep.load_s > 0 and sweep.read_bytes_s > 0
    assert set(sweep.kernels) == {"prefill", "decode"}
    assert all(sum(names.values()) == 14 for names in sweep.kernels.values()), "a kernel for every Linear"


@pytest.mark.slow
def test_the_memory_of_a_sweep(int8):
    sweep, loaded = measure(int8, kv="int8"), load(str(int8))
    memory, cache = sweep.memory, KVCache(loaded.config, parse_kv("int8"), loaded.dtype)
    linears = [*loaded.model.linears().values(), loaded.model._model.head]
    weights = {id(linear.weight): linear.weight.nbytes for linear in linears}
    weights[id(loaded.model._model.embedding)] = loaded.model._model.embedding.nbytes
    assert memory.weights == sum(weights.values()) == weights_in_memory(loaded)
    page = cache.bytes_per_token * 64
    assert memory.kv_by_context == ((0, page), (70, 2 * page))
    assert 20e6 < memory.steady <= memory.peak < 4e9
    assert memory.workspace > 512 * 4 * loaded.config.hidden_size


def test_a_missing_model_is_the_workers_own_error(tmp_path):
    with pytest.raises(QuantkitError) as caught:
        measure(tmp_path / "nowhere")
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
        measure(tiny)
    error = caught.value
    assert str(tiny) in error.what and word in error.why and error.why and "--no-speed" in error.next


def test_the_last_line_is_the_answer(monkeypatch):
    answer = SpeedSweep(load_s=0.1, settings=SETTINGS)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(
        command, 0, stdout="a library's chatter\n" + answer.model_dump_json(), stderr=""))
    assert measure("any") == answer


def test_a_spread_is_the_median_and_the_range():
    assert Spread.of([1.0, 9.0, 3.0]) == Spread(median=3.0, low=1.0, high=9.0)


@pytest.mark.parametrize("wrong", [{"batches": (0,)}, {"contexts": (-1,)}, {"repeats": 0}, {"case_s": 0.0},
                                   {"prefill": 0}, {"decode": "4"}])
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        SweepSettings(**wrong)


def test_nothing_is_imported_from_the_folder_that_the_user_is_in(tiny, monkeypatch, tmp_path):
    for name in ("json", "torch", "quantkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert measure(tiny).load_s > 0


@pytest.mark.parametrize(("outcome", "words"), [
    ({"code": -9}, "SIGKILL, probably for want of memory"), ({"code": -11}, "SIGSEGV"),
    ({"code": 1, "stderr": "Traceback\n  File x\nRuntimeError: deep trouble\n"}, "RuntimeError: deep"),
    ({"stdout": "nothing useful"}, "no answer"), ({"stdout": "[1]"}, "no answer"), ({"code": 3}, "code 3"),
    ({"stdout": "{}"}, "no answer"), ({"code": 1, "stdout": "{}", "stderr": "too late"}, "too late")])
def test_the_cause_of_a_failure_is_told(monkeypatch, outcome, words):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(
        command, outcome.get("code", 0), outcome.get("stdout", ""), outcome.get("stderr", "")))
    with pytest.raises(QuantkitError) as caught:
        measure("some/model")
    assert "some/model" in caught.value.what and words in caught.value.why


def test_the_worker_keeps_the_environment_and_finds_the_same_quantkit(monkeypatch):
    monkeypatch.setenv("SOME_SETTING", "kept")
    environment = speed._environment()
    entries = environment["PYTHONPATH"].split(os.pathsep)
    assert environment["SOME_SETTING"] == "kept"
    assert str(Path(quantkit.__file__).parent.parent) in entries
    assert "" not in entries and len(entries) == len(set(entries))
