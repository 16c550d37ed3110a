"""What a worker measures of one model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.evaluate.worker import kernels, measure, peak_bytes
from quantkit.runtime.loader import load

REQUEST = {"revision": None, "dtype": "auto", "device": "cpu", "ids": list(range(5, 25)), "decode": 3,
           "repeats": 2}


def test_it_times_every_repeat(tiny):
    threads = torch.get_num_threads()
    found = measure({**REQUEST, "uri": str(tiny), "threads": threads})
    assert set(found) == {"load_s", "peak_bytes", "kernels", "prefill_tok_s", "decode_tok_s"}
    for name in ("prefill_tok_s", "decode_tok_s"):
        assert len(found[name]) == 2 and all(value > 0 for value in found[name])
    assert found["load_s"] > 0
    assert json.loads(json.dumps(found)) == found


def test_tokens_are_counted_as_asked(tiny, monkeypatch):
    import quantkit.evaluate.worker as module

    seen, run = [], module._timed

    def spy(engine, ids, sampling):
        seen.append(run(engine, ids, sampling))
        return seen[-1]

    monkeypatch.setattr(module, "_timed", spy)
    measure({**REQUEST, "uri": str(tiny)})
    assert [timing.decode_tokens for timing in seen] == [2, 3, 3], "a warm-up, then what was asked"
    assert {timing.prefill_tokens for timing in seen} == {20}


def test_it_runs_on_as_many_threads_as_asked(tiny):
    measure({**REQUEST, "uri": str(tiny), "threads": 1})
    assert torch.get_num_threads() == 1


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
    ask = "from quantkit.evaluate.worker import peak_bytes; print(peak_bytes())"
    code = (f"import subprocess, sys\nheld = b'x' * (400 << 20)\ndel held\n"
            f"print(subprocess.run([sys.executable, '-c', {ask!r}], capture_output=True, text=True).stdout)\n"
            "from quantkit.evaluate.worker import peak_bytes\nprint(peak_bytes())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    child, parent = map(int, done.stdout.split())
    assert parent > 400 << 20
    assert child < 200 << 20


def test_the_peak_grows_with_what_is_used():
    before = peak_bytes()
    code = ("from quantkit.evaluate.worker import peak_bytes\nbefore = peak_bytes()\n"
            "held = b'x' * (200 << 20)\ndel held\nprint(peak_bytes() - before)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) > 190 << 20
    assert before > 1 << 20
