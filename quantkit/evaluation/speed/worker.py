"""Measures speed and memory of one variant in a process of its own.

``python -m quantkit.evaluation.speed.worker`` reads one JSON request from stdin and writes one JSON answer to
stdout. Peak memory is the
process's largest resident set, the interpreter and torch included: what the machine had to have.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from quantkit.evaluation.speed.answering import EngineSpeed, answer_speed
from quantkit.evaluation.speed.decoding import DecodeRunner, weights_in_memory
from quantkit.evaluation.speed.machine_load import timed_quietly
from quantkit.evaluation.speed.results import DecodeSpeed, MemoryUse, SpeedSweep, SweepSettings
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.ops.dispatch import Phase
from quantkit.plugins.blame import plugin_failure
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.loader import load as load_model
from quantkit.runtime.memory.machine import peak_bytes
from quantkit.support.errors import QuantkitError


def measure(request: dict[str, Any]) -> SpeedSweep:
    """Load a model and measure it: first one request at a time, when the process has nothing but the model,
    and then decoding by batch and context.

    Args:
        request: ``uri``, ``revision``, ``dtype``, ``device``, ``ids`` (of a text), ``settings`` (of the
            sweep), and, if it isn't torch's own choice, ``threads``; ``kv`` if it isn't the model's own.
    """
    settings = SweepSettings.model_validate_json(json.dumps(request["settings"]))
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    start = time.perf_counter()
    loaded = load_model(request["uri"], revision=request["revision"], dtype=request["dtype"],
                        device=request["device"])
    load_s = time.perf_counter() - start
    kv = parse_kv(request["kv"]) if request.get("kv") else loaded.kv
    ids = request["ids"]
    prompt = (ids * -(-settings.prefill // len(ids)))[:settings.prefill]
    threads = torch.get_num_threads() if loaded.model.device.type == "cpu" else None
    answers, load = timed_quietly(lambda: answer_speed(loaded, prompt, settings, kv), _spread, threads)
    workspace = loaded.model.workspace_bytes if isinstance(loaded.model, CpuModel) else None
    memory = MemoryUse(weights=weights_in_memory(loaded), workspace=workspace, steady=answers.resident,
                       peak=peak_bytes())
    runner = DecodeRunner(loaded, ids, tokens=settings.decode, repeats=settings.repeats,
                          case_s=settings.case_s)
    cases, decode_load = timed_quietly(
        lambda: tuple(by_context(runner, kv, settings, loaded.config.max_position_embeddings,
                                 answers.prefill.tok_s.median)), _widest, threads)
    load = max(filter(None, (load, decode_load)), key=lambda load: load.worst, default=None)
    sizes = {case.context: case.kv_bytes for case in cases if case.kv_bytes is not None}
    read = runner.ceilings.read_bytes_s
    return SpeedSweep(
        decode=tuple(case.below(read) for case in cases), prefill=(answers.prefill,), gap_ms=answers.gap_ms,
        load_s=load_s,
        memory=memory.model_copy(update={"kv_by_context": tuple(sorted(sizes.items()))}),
        kernels=kernels(loaded), read_bytes_s=None if read is None else read.median,
        settings=settings, load=load)


def _spread(answers: EngineSpeed) -> float:
    speed = answers.prefill.decode_tok_s
    return 0.0 if speed is None else speed.relative


def _widest(cases: tuple[DecodeSpeed, ...]) -> float:
    return max((case.tok_s.relative for case in cases if case.tok_s is not None), default=0.0)


def by_context(runner: DecodeRunner, kv: KVSpec, settings: SweepSettings, limit: int, prefill_tok_s: float
               ) -> Iterator[DecodeSpeed]:
    """Decode by context and batch.

    Args:
        runner: the runner of the model.
        kv: the KV setting.
        settings: the contexts and batches.
        limit: tokens that the model was made for.
        prefill_tok_s: at which it reads.

    Yields:
        A case each, also of contexts that are left out: the model is too short for them, or would read them
        for too long.
    """
    for context in settings.contexts:
        length, seconds = context + settings.decode, context / prefill_tok_s
        reason = None
        if length > limit:
            reason = f"it needs {length} tokens, and the model was made for {limit}"
        elif seconds > settings.context_s:
            reason = (f"reading {context} tokens would take about {seconds:.0f} s, and a context may take "
                      f"{settings.context_s:.0f} s")
        if reason is None:
            yield from runner.decode(kv, settings.batches, context)
        else:
            yield from (DecodeSpeed(batch=batch, context=context, left_out=reason)
                        for batch in settings.batches)


def kernels(loaded: LoadedModel) -> dict[str, dict[str, int]]:
    """How many Linears each kernel runs, by phase."""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    return {phase: dict(Counter(linear.weight.kernel_name(loaded.dtype, loaded.model.device, phase)
                                for linear in loaded.model.linears().values()))
            for phase in phases}


def main() -> None:
    """Answer one request; an error is answered as ``{"error": [what, why, next]}``."""
    try:
        answer = measure(json.load(sys.stdin)).model_dump_json()
    except QuantkitError as error:
        answer = json.dumps({"error": [error.what, error.why, error.next]})
    except Exception as error:
        if (failure := plugin_failure(error)) is None:
            raise
        answer = json.dumps({"error": [failure.what, failure.why, failure.next]})
    print(answer)


if __name__ == "__main__":
    main()
