"""However a prompt is cut into chunks beside others that decode, its request gets the same bits."""

from __future__ import annotations

import random

import pytest

from quantkit.kv.spec import parse_kv
from quantkit.runtime import engine as module
from quantkit.runtime.chunk_size import ChunkSizer
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """Two layers in bfloat16 that run as a program, and a context for more than a few chunks."""
    folder = tmp_path_factory.mktemp("chunks")
    return load(str(tiny_model(folder / "m", "qwen3", max_position_embeddings=2048)))


KV = ("none", "int8", "int4", "int2", "rotation(4)", "window(70, sinks=2)", "window(70, sinks=2)+int8",
      "window(70)+int2", "snapkv(0.4, window=8)+int4", "adakv(0.4)", "pyramidkv(60, window=8)",
      "tova(90, interval=3)", "h2o(0.4)", "h2o(100)+int2", "expected(0.4)", "kvzip(0.4)+int4",
      "kvzip(100, chunk=128)")


def run(loaded, kv, prompt, seed, monkeypatch):
    """Tokens and exact log-probabilities of a request, alone (``seed`` is ``None``) or cut by chance beside
    others."""
    heard, engine = [], Engine(loaded, kv=parse_kv(kv), max_itl=1.0)
    if seed is not None:
        draw = random.Random(seed)
        monkeypatch.setattr(ChunkSizer, "tokens_in",
                            lambda self, seconds: draw.choice((1, 3, 16, 40, 64, 100)))
        engine.submit(prompt[:9], Sampling(max_tokens=400, ignore_eos=True))
        engine.step()
    request = engine.submit(prompt, Sampling(max_tokens=12, ignore_eos=True), logprobs=2,
                           on_token=heard.append)
    steps = 0
    while not request.done:
        engine.step()
        steps += not heard
    engine.close()
    assert steps > 4 if seed is not None else steps == 2
    return heard


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", KV)
def test_tokens_do_not_depend_on_the_cut(long_model, kv, prompt_of, monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", 256)
    prompt = prompt_of(600)
    whole = run(long_model, kv, prompt, None, monkeypatch)
    for seed in range(3):
        assert run(long_model, kv, prompt, seed, monkeypatch) == whole
