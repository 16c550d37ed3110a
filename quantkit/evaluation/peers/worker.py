"""Runs another tool's model in a process: ``python -I worker.py BACKEND.py``. It imports nothing of quantkit.

Requests are lines of JSON on stdin; an answer is a line of JSON on stdout, and ``bytes`` raw bytes behind it.
A backend is a file with ``open_model(options)``; what that returns has ``facts()``, ``encode(text)``,
``logits(ids, skip)``, ``prefill(ids)`` and ``step(token)``. The python that runs this may be another
environment's: it needs no more than the backend's own packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until stdin ends; an error is answered as ``{"error": text}``."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:  # a library that asks the user a question gets no answer
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what a library prints is no answer
    spec = importlib.util.spec_from_file_location("backend", sys.argv[1])
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    model: Any = None
    for line in requests:
        request = json.loads(line)
        payload: Iterator[bytes] = iter(())
        try:
            if request["do"] == "open":
                model = backend.open_model(request)
                answer = model.facts()
            elif request["do"] == "logits":
                vocab, payload = model.logits(request["ids"], request["skip"])
                rows = len(request["ids"]) - 1 - request["skip"]
                answer = {"rows": rows, "vocab": vocab, "bytes": rows * vocab * 4}
            elif request["do"] == "encode":
                answer = {"ids": model.encode(request["text"])}
            else:
                answer = timed(model, request["prompts"], request["decode"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer).encode() + b"\n")
        for part in payload:
            answers.write(part)
        answers.flush()


def timed(model: Any, prompts: list[list[int]], decode: int) -> dict[str, Any]:
    """Prefill and greedy decoding of every prompt; the first is a warm-up."""
    prefill = []
    steps = []
    first = []
    for ids in prompts:
        begin = time.perf_counter()
        token = model.prefill(ids)
        middle = time.perf_counter()
        for _ in range(decode):
            token = model.step(token)
        end = time.perf_counter()
        prefill.append(len(ids) / (middle - begin))
        steps.append(decode / (end - middle))
        first.append(middle - begin)
    return {"prefill_tok_s": prefill[1:], "decode_tok_s": steps[1:], "first_token_s": first[1:],
            "peak_bytes": peak_bytes()}


def peak_bytes() -> int | None:
    """Largest resident set of this process so far, and of a GPU's memory what torch had at most."""
    torch: Any = sys.modules.get("torch")
    on_gpu = torch.cuda.max_memory_allocated() if torch and torch.cuda.is_initialized() else 0
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 + int(on_gpu)
    except OSError:
        pass
    if sys.platform == "win32":
        return None
    import resource

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return resident + int(on_gpu)


if __name__ == "__main__":
    main()
