"""What a worker measures of one model."""

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
from pydantic import ValidationError

from quantkit.evaluation.speed import answering, decoding, worker
from quantkit.evaluation.speed.decoding import LEAST_TOKENS, DecodeRunner
from quantkit.evaluation.speed.machine_load import MachineLoad, busy_reason
from quantkit.evaluation.speed.results import Spread, SweepSettings
from quantkit.evaluation.speed.worker import by_context, kernels, measure
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.runtime.loader import load
from quantkit.runtime.memory.machine import peak_bytes

SETTINGS = SweepSettings(batches=(1,), contexts=(), prefill=20, decode=3, repeats=2)
REQUEST = {"revision": None, "dtype": "auto", "device": "cpu", "ids": list(range(5, 12)),
           "settings": SETTINGS.model_dump(mode="json")}


def test_the_load_is_that_of_the_busiest_part(tiny, monkeypatch):
    loads = [MachineLoad(stolen=0.0, others=0.01), MachineLoad(stolen=0.5, others=0.0)]
    monkeypatch.setattr(worker, "timed_quietly", lambda run, spread, threads: (run(), loads.pop(0)))
    sweep = measure({**REQUEST, "uri": str(tiny)})
    assert sweep.load == MachineLoad(stolen=0.5, others=0.0) and not loads
    assert busy_reason(sweep.load) is not None


def test_tokens_are_counted_as_asked(tiny, monkeypatch):
    results, run = [], answering._timed

    def spy(*arguments):
        results.append(run(*arguments))
        return results[-1]

    monkeypatch.setattr(answering, "_timed", spy)
    monkeypatch.setattr("quantkit.evaluation.speed.machine_load.ROUNDS", 1)  # however busy this machine is
    sweep = measure({**REQUEST, "uri": str(tiny)})
    assert [result.timing.decode_tokens for result in results] == [2, 3, 3], "a warm-up, then what was asked"
    assert {result.timing.prefill_tokens for result in results} == {20}, "the text is repeated"
    assert [len(result.gaps) for result in results] == [2, 3, 3]
    gaps = sorted(1000 * gap for result in results[1:] for gap in result.gaps)
    assert sweep.gap_ms == {"median": median(gaps), "p99": gaps[-1]}
    assert sweep.prefill[0].first_token_s == Spread.of([result.first_token_s for result in results[1:]])


def test_it_runs_on_as_many_threads_as_asked(tiny):
    measure({**REQUEST, "uri": str(tiny), "threads": 1})
    assert torch.get_num_threads() == 1


def test_settings_from_elsewhere_are_checked(tiny):
    with pytest.raises(ValidationError):
        measure({**REQUEST, "uri": str(tiny), "settings": {"batches": ["many"]}})


def runner_of(loaded, **options):
    return DecodeRunner(loaded, [5, 6, 7], **({"tokens": 8, "repeats": 3} | options))


def test_a_case_that_takes_long_is_cut_and_says_so(loaded):
    """No time is short enough: one run of the fewest tokens is left."""
    (case,) = runner_of(loaded, case_s=1e-9).decode(KVSpec(), [2], 5)
    assert (case.runs, case.tokens) == (1, LEAST_TOKENS) and case.tok_s.low == case.tok_s.high
    (case,) = runner_of(loaded).decode(KVSpec(), [2], 5)
    assert (case.runs, case.tokens) == (3, 8)
    short = answering.answer_speed(loaded, [5] * 9, SETTINGS.model_copy(update={"case_s": 1e-9}))
    assert short.prefill.runs == 1


def test_the_bytes_of_a_step_are_the_weights_and_what_every_sequence_has(loaded):
    """Bytes a second times seconds a step: the step in the middle of a run stands for all."""
    (case,) = runner_of(loaded, repeats=1).decode(KVSpec(), [2], 5)
    config = loaded.config
    token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    moved = case.bytes_s.median / case.tok_s.median * 2
    assert moved == pytest.approx(loaded.model.step_bytes + 2 * token * (5 + 2 + 8 / 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["none", "int8", "window(16, sinks=2)"])
def test_every_run_begins_with_the_same_context(loaded, kv):
    """Bytes a token are the same in the slowest and the fastest run, whether tokens are taken back or not."""
    for case in runner_of(loaded).decode(parse_kv(kv), [1, 3], 70):
        ratios = [getattr(case.bytes_s, end) / getattr(case.tok_s, end) for end in ("low", "median", "high")]
        assert ratios == pytest.approx([ratios[0]] * 3)


def test_what_does_not_fit_into_memory_is_left_out(loaded, monkeypatch):
    monkeypatch.setattr(decoding, "available_memory", lambda: 1 << 20)
    few, many = runner_of(loaded).decode(KVSpec(), [1, 500], 5)
    assert few.left_out is None and few.tok_s is not None
    assert "KV cache takes" in many.left_out and "1.0 MB are left" in many.left_out and many.tok_s is None
    monkeypatch.setattr(decoding, "available_memory", lambda: 1)
    assert all(case.left_out for case in runner_of(loaded).decode(KVSpec(), [1, 2], 5))
    monkeypatch.setattr(decoding, "available_memory", lambda: None)
    assert all(case.left_out is None for case in runner_of(loaded, tokens=1).decode(KVSpec(), [1], 5))


def test_a_context_that_takes_too_long_to_read_is_left_out(loaded):
    settings = SweepSettings(batches=(1, 2), contexts=(4, 100), decode=2, repeats=1, context_s=10.0)
    cases = list(by_context(runner_of(loaded, tokens=2, repeats=1), KVSpec(), settings, 512, 5.0))
    assert [case.left_out for case in cases[:2]] == [None, None]
    assert all("100 tokens would take about 20 s" in case.left_out for case in cases[2:])


def test_the_kernel_of_every_linear_is_named(tiny, int4):
    plain, packed = kernels(load(str(tiny))), kernels(load(str(int4)))
    assert set(plain) == set(packed) == {"prefill", "decode"}
    assert plain == {"prefill": {"cpu-bf16": 14}, "decode": {"cpu-bf16": 14}}
    assert kernels(load(str(tiny), dtype="float32"))["decode"] == {"cpu-f32": 14}
    for phase in packed.values():
        assert sum(phase.values()) == 14 and "torch" not in phase


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux's account of memory")
def test_the_peak_is_of_this_process_and_not_of_its_parent():
    """Linux's ru_maxrss is inherited through exec."""
    ask = "from quantkit.runtime.memory.machine import peak_bytes; print(peak_bytes())"
    code = (f"import subprocess, sys\nheld = b'x' * (400 << 20)\ndel held\n"
            f"print(subprocess.run([sys.executable, '-c', {ask!r}], capture_output=True, text=True).stdout)\n"
            "from quantkit.runtime.memory.machine import peak_bytes\nprint(peak_bytes())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    child, parent = map(int, done.stdout.split())
    assert parent > 400 << 20
    assert child < 200 << 20


def test_the_peak_grows_with_what_is_used():
    before = peak_bytes()
    code = ("from quantkit.runtime.memory.machine import peak_bytes\nbefore = peak_bytes()\n"
            "held = b'x' * (200 << 20)\ndel held\nprint(peak_bytes() - before)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) > 190 << 20
    assert before > 1 << 20
