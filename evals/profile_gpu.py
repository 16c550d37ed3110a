"""Where a GPU's time goes: kernels by name, in decoding or while a prompt is read.

    python evals/profile_gpu.py synthetic:llama-3.1-8b --random int4-rtn --batch 64 --context 1100 --out FILE
    python evals/profile_gpu.py synthetic:llama-3.1-8b --random int4-rtn --prompt 2048 --out FILE

Contexts are random numbers. Of a prompt it also says how long the host takes to launch a chunk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from quantkit.evaluation.bench.random_model import random_model
from quantkit.evaluation.protocol import machine
from quantkit.evaluation.quality import feed
from quantkit.evaluation.speed import decoding
from quantkit.evaluation.speed.decoding import DecodeRunner
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.models.interfaces import LanguageModel
from quantkit.runtime.loader import load
from quantkit.runtime.memory.scratch import GPU_ROWS
from quantkit.support.device import find_device

STEPS = 12


class TimedModel:
    """A model that notes how long the host takes for each call."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.milliseconds = model, list[float]()

    def __call__(self, *given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = self.model(*given, **named)
        self.milliseconds.append(1e3 * (time.perf_counter() - begin))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@torch.inference_mode()
def decode(runner: DecodeRunner, kv: KVSpec, batch: int, context: int) -> dict[str, Any]:
    """Seconds of a step and its kernels' microseconds."""
    cache = runner.cache(kv)
    first = cache.add(context + 3 * STEPS)
    runner.hold(cache, first, context)
    rows = [cache.fork(first, shared=False) for _ in range(batch)]
    runner.steps(cache, rows, [1] * batch, STEPS)
    spent, _ = runner.steps(cache, rows, [1] * batch, STEPS)
    return {"step_ms": 1e3 * spent / STEPS,
            "kernels": kernels(lambda: runner.steps(cache, rows, [1] * batch, STEPS),
                               STEPS + decoding.WARM_UP)}


@torch.inference_mode()
def prefill(runner: DecodeRunner, kv: KVSpec, prompt: int, chunk: int) -> dict[str, Any]:
    """Tokens a second, the host's milliseconds a chunk, and kernels' microseconds a prompt."""
    spent = list[float]()

    def read() -> None:
        cache = runner.cache(kv)
        decoding.keep_pages(cache, 1, prompt)
        if cache.device.type == "cuda":
            torch.cuda.synchronize(cache.device)
        begin = time.perf_counter()
        runner.feed(cache, cache.add(prompt), prompt)
        spent.append(time.perf_counter() - begin)

    feed.prompt_portion = lambda model, cache: chunk
    for _ in range(5):
        read()
    loaded, timed = runner.loaded, TimedModel(runner.loaded.model)
    runner.loaded = replace(loaded, model=timed)
    read()
    runner.loaded = loaded
    return {"prompt": prompt, "tok_s": prompt / median(spent[2:5]), "chunk": chunk,
            "host_ms": timed.milliseconds, "kernels": kernels(read, 1)}


def kernels(run: Callable[[], Any], times: int) -> list[tuple[str, float, float]]:
    """Name, launches and microseconds, those that take longest first; each divided by ``times``."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    rows = [(event.key[:90], event.count / times,
             (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / times)
            for event in profiled.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:30]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--random", metavar="RECIPE", help="random weights of these formats")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv", default="none")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--prompt", metavar="LIST", help="read prompts of these lengths instead of decoding")
    parser.add_argument("--chunk", default=str(GPU_ROWS), metavar="LIST",
                        help="prompt tokens at a time")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device, kv = find_device(args.device), parse_kv(args.kv)
    loaded = random_model(args.model, args.random, device) if args.random else load(args.model,
                                                                                     device=args.device)
    runner = DecodeRunner(loaded, [5, 6, 7], tokens=4 * STEPS, repeats=1)
    runs = [partial(decode, runner, kv, args.batch, args.context)] if args.prompt is None else [
        partial(prefill, runner, kv, int(prompt), int(chunk))
        for prompt in args.prompt.split(",") for chunk in args.chunk.split(",")]
    asked = {key: value for key, value in vars(args).items() if key != "out"}
    results = []
    for run in runs:
        results.append(run())
        print({key: value for key, value in results[-1].items() if key != "kernels"})
        for name, count, spent in results[-1]["kernels"][:14]:
            print(f"{spent:10.1f} µs {count:7.1f} × {name}", flush=True)
        args.out.write_text(json.dumps({"machine": machine(device), **asked, "results": results}, indent=1)
                            + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
