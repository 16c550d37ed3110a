"""Whoever else is there, a request gets the bits that it gets alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantkit.kv.spec import parse_kv
from quantkit.ops import cpu_machine, cpu_weight
from quantkit.quantization.run import quantize
from quantkit.runtime import engine as module
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from quantkit_kernels.cpu.pool import Pool

KV = ("none", "int8", "int4", "window(12, sinks=2)+int8", "snapkv(0.4, window=4)",
      "tova(10, interval=3)+int4")


FAMILIES = {"qwen3": {},
            "odd": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 32, "num_attention_heads": 3,
                    "num_key_value_heads": 1},
            "mixtral": {"intermediate_size": 51, "head_dim": 32}, "qwen3_moe": {"head_dim": 32},
            "gpt_oss": {"head_dim": 32},
            "gemma2": {"final_logit_softcapping": 7.0, "head_dim": 32},
            "phi3": {"partial_rotary_factor": 0.5, "hidden_size": 128}}
"""Two of them in sizes that fill no vector; the last two run operation by operation."""
MODELS = ("qwen3 bf16", "qwen3 fp16", "qwen3 fp32", "odd bf16", "odd fp16", "odd fp32", "qwen3 int8 bf16",
          "qwen3 w8a8 bf16", "qwen3 fp8 bf16", "qwen3 int4-rtn bf16", "qwen3 nf4 bf16", "qwen3 int8 fp16",
          "qwen3 w8a8 fp16", "qwen3 int4-rtn fp16", "qwen3 nf4 fp16", "mixtral bf16", "mixtral fp32",
          "mixtral int8 fp16", "mixtral w8a8 bf16", "qwen3_moe fp16", "qwen3_moe int4-rtn bf16",
          "gpt_oss fp32", "gpt_oss mxfp4-datafree bf16")
"""A family, a recipe if it is quantized, and the dtype."""
BY_OPERATION = ("qwen3 int4-rtn fp32", "qwen3 w8a8 fp32", "qwen3 fp8 fp32", "mixtral int8 fp32",
                "gemma2 fp16", "gemma2 fp32", "phi3 fp16", "phi3 fp32", "qwen3 nvfp4-a4 bf16",
                "qwen3 mxfp4-a4 bf16")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Models(dict):
    def __init__(self, folder):
        self._folder = folder

    def __missing__(self, name):
        family, *recipe, dtype = name.split()
        path = self._folder / family
        if not path.exists():
            tiny_model(path, "llama" if family == "odd" else family, **FAMILIES[family])
        if recipe:
            source, path = path, self._folder / f"{family} {recipe[0]}"
            if not path.exists():
                quantize(str(source), recipe[0], path)
        self[name] = load(str(path), dtype=DTYPES[dtype])
        assert (self[name].fallback_reason is not None) == (name in BY_OPERATION)
        return self[name]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", 16)


@pytest.fixture(scope="module", autouse=True)
def _pool():
    """Two threads, whatever this machine has: units are shared out, and each has rows of its own."""
    pool = Pool(2)
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu_machine, cpu_weight):
            patch.setattr(module, "pool", lambda: pool)
        yield
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By a name of ``MODELS``; made when it is first asked for."""
    return Models(tmp_path_factory.mktemp("engine"))


def prompt_of(length, seed=0):
    return torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclasses.dataclass(frozen=True)
class Request:
    """When it comes, what it asks, and after how many of its tokens it is cancelled."""

    arrives: int
    length: int
    seed: int
    sampling: Sampling
    leaves: int | None = None


REQUESTS = st.builds(
    Request, st.integers(0, 25), st.integers(1, 50), st.integers(0, 2**16),
    st.builds(Sampling, max_tokens=st.integers(1, 14), temperature=st.sampled_from([0.0, 1.0, 1.7]),
              seed=st.integers(0, 2**16), top_k=st.sampled_from([0, 20]), ignore_eos=st.just(True),
              repetition_penalty=st.sampled_from([1.0, 1.3])),
    st.sampled_from([None, None, None, 1, 4]))


def run(loaded, kv, requests, max_batch=11):
    """Tokens with their exact log-probabilities, a list for each request; all pages are back at the end."""
    engine = Engine(loaded, kv=parse_kv(kv), max_batch=max_batch, max_queue=100)
    heard, submitted, now = [[] for _ in requests], [None] * len(requests), 0

    def listen(index, info):
        heard[index].append((info.id, info.logprob, info.top))
        if len(heard[index]) == requests[index].leaves:
            submitted[index].cancel()

    while True:
        for index, one in enumerate(requests):
            if one.arrives == now:
                submitted[index] = engine.submit(prompt_of(one.length, one.seed), one.sampling, logprobs=2,
                                               on_token=lambda info, index=index: listen(index, info))
        now += 1
        if not engine.step() and all(submitted):
            break
    assert all(request.done for request in submitted)
    assert engine.cache.allocated_bytes == 0 == engine.stats()["running"]
    return heard


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [*MODELS, *BY_OPERATION])
def test_a_request_gets_the_same_bits_in_any_company(models, name):
    # what fails is a whole crowd: making it small takes minutes and shows little
    @settings(max_examples=3 if name in BY_OPERATION else 9, deadline=None,
              suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate])
    @given(st.sampled_from(KV), st.lists(REQUESTS, min_size=2, max_size=11), st.integers(1, 11))
    def holds(kv, requests, max_batch):
        together = run(models[name], kv, requests, max_batch)
        for request, got in zip(requests, together):
            (alone,) = run(models[name], kv, [dataclasses.replace(request, arrives=0, leaves=None)])
            assert got == alone[:len(got)], "tokens or log-probabilities differ"
            # cancelling takes effect at the next step
            assert len(got) == len(alone) or len(got) - (request.leaves or -9) in (0, 1)

    holds()


def test_more_at_once_than_a_multiply_takes_as_decode(models):
    requests = [Request(0, 3 + i, i, Sampling(max_tokens=40, ignore_eos=True)) for i in range(20)]
    together = run(models["qwen3 bf16"], "int8", requests, max_batch=20)
    for i in (0, 7, 15, 16, 19):
        assert together[i] == run(models["qwen3 bf16"], "int8", [requests[i]])[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3 nvfp4-a4 bf16", "qwen3 mxfp4-a4 bf16", "qwen3 fp16",
                                  "qwen3 gguf-q4_0 bf16", "qwen3 gguf-q8_0 bf16", "qwen3 gguf-iq4_nl fp16"])
def test_64_at_once_are_each_as_alone(models, name):
    requests = [Request(i % 3, 2 + i % 9, i, Sampling(max_tokens=5, ignore_eos=True)) for i in range(64)]
    together = run(models[name], "none", requests, max_batch=64)
    for i in (0, 13, 31, 63):
        assert together[i] == run(models[name], "none", [dataclasses.replace(requests[i], arrives=0)])[0]


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_a_value_that_overflows_ends_its_request_alone(tmp_path, kv):
    """Token 7 makes a value of 480,000 in the first layer; no other token does. A page of float16 lacks it,
    one of int8 has scales in bfloat16."""
    folder = tiny_model(tmp_path / "model", dtype="float16", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][7] = torch.eye(64)[0]
    tensors["model.layers.0.input_layernorm.weight"][0] = 1
    tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 6e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded, sampling, errors = load(str(folder)), Sampling(max_tokens=6, ignore_eos=True), []
    prompts = [[5, 9, 20 + i, 30] for i in range(5)]
    alone = [generate(loaded, [prompt], sampling, kv=parse_kv(kv))[0].token_ids for prompt in prompts]
    assert not any(7 in ids for ids in alone)
    engine = Engine(loaded, kv=parse_kv(kv), max_batch=8)
    good = [engine.submit(prompt, sampling) for prompt in prompts[:3]]
    bad = engine.submit([5, 7, 9], sampling, on_error=errors.append)
    good += [engine.submit(prompt, sampling) for prompt in prompts[3:]]
    while engine.step():
        pass
    if kv == "none":
        assert len(errors) == 1 and "not finite" in str(errors[0])
    else:
        exact = generate(load(str(folder), dtype="float32"), [[5, 7, 9]], sampling)[0]
        assert not errors and bad.result.token_ids == exact.token_ids
    assert [request.result.token_ids for request in good] == alone and engine.cache.allocated_bytes == 0


@pytest.mark.parametrize("kv", KV)
def test_a_request_ends_as_the_model_says_for_each_setting(models, kv):
    """Against the model and a cache by hand: one chunk after another, one token after another."""
    from quantkit.kv.batch import Batch
    from quantkit.kv.cache import KVCache

    small, prompt, ids = models["qwen3 bf16"], prompt_of(40), []
    cache = KVCache(small.config, parse_kv(kv), small.dtype)
    number, feed = cache.add(), prompt
    for phase in ("prefill", "prefill", "prefill_end", *["decode"] * 11):
        chunk, feed = feed[:16], feed[16:]
        batch = Batch(cache, [number], phase)
        with torch.inference_mode():
            logits = small.model(torch.tensor([chunk]), batch.next_positions(len(chunk)), batch,
                                 torch.tensor([len(chunk) - 1]))[0]
        if phase != "prefill":
            ids.append(int(logits.argmax()))
            feed = ids[-1:]
    (got,) = generate(small, [prompt], Sampling(max_tokens=12, ignore_eos=True), kv=parse_kv(kv))
    assert got.token_ids == ids
