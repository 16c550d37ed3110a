"""Measures each variant's speed and memory in a fresh process, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

import quantkit
from quantkit.evaluation.speed.results import SpeedSweep, SweepSettings
from quantkit.support.errors import QuantkitError
from quantkit.support.frozen import Frozen


class _WorkerError(Frozen):
    """What a worker answers if it can't measure: what, why and next."""

    error: tuple[str, str | None, str | None]


def measure_sweep(uri: str, ids: Sequence[int], settings: SweepSettings, *, threads: int,
                  revision: str | None = None, dtype: str = "auto", device: str = "auto",
                  kv: str | None = None) -> SpeedSweep:
    """Measure one variant in a process of its own.

    Args:
        uri: the model to load.
        ids: tokens of a text, repeated where they are too few.
        settings: the choice of measurements.
        threads: the number of torch's threads.
        revision, dtype, device: as for ``load``.
        kv: the KV setting, if not the model's own.

    Raises:
        QuantkitError: the process failed; its last words are shown.
    """
    request = {"uri": uri, "revision": revision, "dtype": dtype, "device": device, "ids": list(ids),
               "settings": settings.model_dump(mode="json"), "threads": threads, "kv": kv}
    # -P: nothing is imported from the folder that the user happens to be in
    done = subprocess.run([sys.executable, "-P", "-m", "quantkit.evaluation.speed.worker"],
                          input=json.dumps(request), capture_output=True, text=True, env=_environment(),
                          check=False)
    answer = _answer(done.stdout)
    if isinstance(answer, QuantkitError):
        raise answer
    if answer is None or done.returncode:
        raise QuantkitError(f"measuring the speed of {uri} failed", why=_cause(done),
                            next="quantkit eval … --no-speed measures quality alone")
    return answer


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


def _answer(stdout: str) -> SpeedSweep | QuantkitError | None:
    """The last line: a sweep, or an error as a worker says it; ``None``: it is neither."""
    line = (stdout.strip().splitlines() or [""])[-1]
    with contextlib.suppress(ValidationError):
        what, why, then = _WorkerError.model_validate_json(line).error
        return QuantkitError(what, why=why, next=then)
    with contextlib.suppress(ValidationError):
        sweep = SpeedSweep.model_validate_json(line)
        return sweep if sweep.settings is not None else None  # ``{}`` would be one too
    return None


def _environment() -> dict[str, str]:
    """The parent's, with its import path: the child must find the same quantkit."""
    path = [entry for entry in sys.path if entry] + [str(Path(quantkit.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}

