"""Measures each model's speed and memory in a fresh process, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import quantkit
from quantkit.errors import QuantkitError
from quantkit.evaluate.metrics import Interval


@dataclass(frozen=True)
class Speed:
    """What a model's process measured.

    Attributes:
        prefill_tok_s, decode_tok_s: median over the timed runs, and their range.
        peak_bytes: largest resident set, torch included.
        load_s: seconds to open the model.
        kernels: phase → kernel → how many Linears it runs.
    """

    prefill_tok_s: Interval
    decode_tok_s: Interval
    peak_bytes: int
    load_s: float
    kernels: dict[str, dict[str, int]]


def measure(uri: str, ids: Sequence[int], *, decode: int, repeats: int, threads: int,
            revision: str | None = None, dtype: str = "auto", device: str = "auto",
            kv: str | None = None) -> Speed:
    """Measure one model in a process of its own.

    Args:
        uri: what to load.
        ids: the prompt.
        decode: tokens to decode after it.
        repeats: timed runs.
        threads: of torch.
        revision, dtype, device: as for ``load``.
        kv: the KV setting, if not the model's own.

    Raises:
        QuantkitError: the process failed; its last words are shown.
    """
    request = {"uri": uri, "revision": revision, "dtype": dtype, "device": device, "ids": list(ids),
               "decode": decode, "repeats": repeats, "threads": threads, "kv": kv}
    # -P: nothing is imported from the folder that the user happens to be in
    done = subprocess.run([sys.executable, "-P", "-m", "quantkit.evaluate.worker"], input=json.dumps(request),
                          capture_output=True, text=True, env=_environment(), check=False)
    answer = _answer(done.stdout)
    if answer is not None and "error" in answer:
        what, why, then = answer["error"]
        raise QuantkitError(what, why=why, next=then)
    if answer is None or done.returncode:
        raise QuantkitError(f"measuring the speed of {uri} failed", why=_cause(done),
                            next="quantkit eval … --no-speed measures quality alone")
    return Speed(_range(answer["prefill_tok_s"]), _range(answer["decode_tok_s"]), answer["peak_bytes"],
                 answer["load_s"], answer["kernels"])


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return f"its process was ended by {name}" + (
            ", probably for want of memory" if name == "SIGKILL" else "")
    words = done.stderr.strip().splitlines()
    return words[-1][:300] if words else f"its process ended with code {done.returncode} and no answer"


def _answer(stdout: str) -> dict[str, Any] | None:
    lines = stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _environment() -> dict[str, str]:
    """The parent's, with its import path: the child must find the same quantkit."""
    path = [entry for entry in sys.path if entry] + [str(Path(quantkit.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def _range(values: list[float]) -> Interval:
    return Interval(median(values), min(values), max(values))
