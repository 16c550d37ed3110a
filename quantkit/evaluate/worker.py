"""Measures speed and memory of one model in a separate process: ``python -m quantkit.evaluate.worker``.

Reads one JSON request from stdin and writes one JSON answer to stdout. Peak memory is the
process's largest resident set, the interpreter and torch included: what the machine had to have.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.loader import LoadedModel
    from quantkit.runtime.sampler import Sampling
    from quantkit.runtime.timing import Timing

WARM_UP_TOKENS = 2
"""Decode steps before any timing: kernels repack their weights at the first one."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load, then prefill and decode ``repeats`` times after a warm-up.

    Args:
        request: ``uri``, ``revision``, ``dtype``, ``device``, ``ids`` (the prompt), ``decode``, ``repeats``,
            and, if it isn't torch's own choice, ``threads``; ``kv`` if it isn't the model's own.

    Returns:
        ``load_s``, ``prefill_tok_s`` and ``decode_tok_s`` (one number a repeat), ``peak_bytes``,
        ``kernels`` (phase → kernel → layers).
    """
    import torch

    from quantkit.kvspec import parse_kv
    from quantkit.runtime.engine import Engine
    from quantkit.runtime.loader import load
    from quantkit.runtime.sampler import Sampling

    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    start = time.perf_counter()
    loaded = load(request["uri"], revision=request["revision"], dtype=request["dtype"],
                  device=request["device"])
    load_s = time.perf_counter() - start
    # the first new token comes out of the prefill
    sampling = Sampling(max_tokens=request["decode"] + 1, ignore_eos=True)
    kv = parse_kv(request["kv"]) if request.get("kv") else None
    # one engine for all: what a GPU's first steps prepare belongs to it
    engine = Engine(loaded, kv=kv, max_batch=1,
                    context=len(request["ids"]) + max(request["decode"], WARM_UP_TOKENS) + 1)
    _timed(engine, request["ids"], Sampling(max_tokens=WARM_UP_TOKENS + 1, ignore_eos=True))
    timings = [_timed(engine, request["ids"], sampling) for _ in range(request["repeats"])]
    return {"load_s": load_s, "peak_bytes": peak_bytes(), "kernels": kernels(loaded),
            "prefill_tok_s": [t.prefill_tokens / t.prefill_s for t in timings],
            "decode_tok_s": [t.decode_tokens / t.decode_s for t in timings]}


def _timed(engine: Engine, ids: list[int], sampling: Sampling) -> Timing:
    """What one request took."""
    before = dataclasses.replace(engine.timing)
    engine.submit(ids, sampling)
    while engine.step():
        pass
    now = engine.timing
    return dataclasses.replace(now, **{field.name: getattr(now, field.name) - getattr(before, field.name)
                                       for field in dataclasses.fields(now)})


def peak_bytes() -> int:
    """Largest resident set of this process so far, and what it had of a GPU's memory at most.

    Linux's ``ru_maxrss`` survives ``exec`` and so begins at what the *parent* had at its peak; the
    kernel's own high-water mark of this program's memory doesn't.
    """
    torch = sys.modules.get("torch")  # importing it would be measured too
    if torch is None or not torch.cuda.is_initialized():
        return _resident()
    return _resident() + int(torch.cuda.max_memory_allocated())


def _resident() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # absent on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kernels(loaded: LoadedModel) -> dict[str, dict[str, int]]:
    """How many Linears each kernel runs, by phase."""
    from quantkit.ops.dispatch import Phase
    phases: tuple[Phase, ...] = ("prefill", "decode")
    return {phase: dict(Counter(linear.weight.kernel_name(loaded.dtype, loaded.model.device, phase)
                                for linear in loaded.model.linears().values()))
            for phase in phases}


def main() -> None:
    """Answer one request; an error is answered as ``{"error": [what, why, next]}``."""
    from quantkit.errors import QuantkitError
    from quantkit.plugins import plugin_failure

    try:
        answer = measure(json.load(sys.stdin))
    except QuantkitError as error:
        answer = {"error": [error.what, error.why, error.next]}
    except Exception as error:
        if (failure := plugin_failure(error)) is None:
            raise
        answer = {"error": [failure.what, failure.why, failure.next]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
