"""Speed and memory of one model, in a process of its own: ``python -m quantkit.evaluate.worker``.

Reads one JSON request from stdin and writes one JSON answer to stdout. Peak memory is the
process's largest resident set, the interpreter and torch included: what the machine had to have.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from typing import Any


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load, then prefill and decode ``repeats`` times after a warm-up.

    Args:
        request: ``uri``, ``revision``, ``dtype``, ``ids`` (the prompt), ``decode``, ``repeats``.

    Returns:
        ``load_s``, ``prefill_tok_s`` and ``decode_tok_s`` (one number a repeat), ``peak_bytes``,
        ``kernels`` (phase → kernel → layers).
    """
    from quantkit.runtime.generate import Timing, generate
    from quantkit.runtime.loader import load
    from quantkit.runtime.sampler import Sampling

    start = time.perf_counter()
    loaded = load(request["uri"], revision=request["revision"], dtype=request["dtype"])
    load_s = time.perf_counter() - start
    sampling = Sampling(max_tokens=request["decode"] + 1, ignore_eos=True)
    warm = Sampling(max_tokens=3, ignore_eos=True)
    timings: list[Timing] = []
    generate(loaded, [request["ids"]], warm)
    for _ in range(request["repeats"]):
        generate(loaded, [request["ids"]], sampling, on_done=timings.append)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"load_s": load_s, "peak_bytes": peak, "kernels": kernels(loaded),
            "prefill_tok_s": [t.prefill_tokens / t.prefill_s for t in timings],
            "decode_tok_s": [t.decode_tokens / t.decode_s for t in timings]}


def kernels(loaded: Any) -> dict[str, dict[str, int]]:
    """How many Linears each kernel runs, by phase."""
    import torch

    from quantkit.ops.dispatch import choose
    from quantkit.ops.linear import query_for

    found: dict[str, dict[str, int]] = {}
    for phase in ("prefill", "decode"):
        names = Counter(
            "torch" if isinstance(one.weight, torch.Tensor) else
            choose(query_for(one.weight, loaded.dtype, loaded.model.device, phase)).kernel.name
            for one in loaded.model.linears().values())
        found[phase] = dict(names)
    return found


def main() -> None:
    """Answer one request; an error is answered as ``{"error": [what, why, next]}``."""
    from quantkit.errors import QuantkitError

    try:
        answer = measure(json.load(sys.stdin))
    except QuantkitError as error:
        answer = {"error": [error.what, error.why, error.next]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
