"""Batches, streams, stops and limits; and a real model that knows a capital."""


import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime import kv_manager
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampler, Sampling
from quantkit.support.errors import UsageError

GREEDY = Sampling(max_tokens=12, ignore_eos=True)


def prompts_of(*lengths, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 300, (n,), generator=random).tolist() for n in lengths]


def without_cache(loaded, prompt, sampling):
    """The whole sequence again for every token: slow, and nothing to get wrong."""
    ids, sampler = list(prompt), Sampler(sampling)
    for _ in range(sampling.max_tokens):
        ids.append(sampler(loaded.model(torch.tensor([ids]))[0, -1], ids))
    return ids[len(prompt):]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_tokens=12, temperature=1.2, top_k=20, top_p=0.9,
                                                       min_p=0.01,
                                                       repetition_penalty=1.2, seed=3, ignore_eos=True)])
def test_equals_running_the_whole_sequence_again(loaded, sampling):
    (prompt,) = prompts_of(9)
    (got,) = generate(loaded, [prompt], sampling)
    assert got.token_ids == without_cache(loaded, prompt, sampling)
    assert (got.prompt_tokens, got.finish_reason) == (9, "length")


def test_each_sequence_has_its_own_settings_and_leaves_when_it_is_done(by_operation, monkeypatch):
    loaded = by_operation
    prompts = prompts_of(5, 9, 2, 7)
    settings = [Sampling(max_tokens=n, temperature=t, seed=s, ignore_eos=True)
                for n, t, s in ((3, 0, None), (12, 1.0, 7), (1, 1.0, 7), (8, 2.0, 1))]
    batches = []
    attend = Batch.attend

    def seen(self, layer, q, *rest):
        if layer == 0 and q.shape[2] == 1:
            batches.append(q.shape[0])
        return attend(self, layer, q, *rest)

    monkeypatch.setattr(Batch, "attend", seen)
    together = generate(loaded, prompts, settings)
    # a prompt joins at each step, the shortest first: 1, 3, 8 and 12 tokens, each first one its prompt's
    assert batches == [1, *[2] * 7, *[1] * 5]
    for prompt, one, got in zip(prompts, settings, together):
        assert got == generate(loaded, [prompt], one)[0]
        assert len(got.token_ids) == one.max_tokens


def test_the_end_of_a_sequence(loaded, monkeypatch):
    (prompt,) = prompts_of(6)
    ids = generate(loaded, [prompt], GREEDY)[0].token_ids
    monkeypatch.setattr(loaded.tokenizer, "eos_ids", frozenset({ids[4]}))
    cut = ids.index(ids[4]) + 1
    (got,) = generate(loaded, [prompt], Sampling(max_tokens=12))
    assert (got.token_ids, got.finish_reason) == (ids[:cut], "stop")
    assert got.text == loaded.tokenizer.decode(ids[:cut - 1]), "the token that ends it is no text"
    assert generate(loaded, [prompt], GREEDY)[0].token_ids == ids
    (got,) = generate(loaded, [prompt], Sampling(max_tokens=cut))
    assert got.finish_reason == "stop", "also when it is the last that may come"


def test_a_recipes_kv_setting_is_obeyed_when_its_checkpoint_runs(folder, tmp_path, monkeypatch):
    recipe = tmp_path / "lean.yaml"
    recipe.write_text("""\
kv: int8 + window(sinks=2, budget=8)
rules:
  - match: "*"
    method: rtn
    spec: {bits: 8, granularity: {strategy: channel}}
""")
    quantize(str(folder), str(recipe), tmp_path / "out")
    quantized, made = load(str(tmp_path / "out")), []
    assert str(quantized.kv) == "window(8, sinks=2)+int8" == quantized.manifest.recipe["kv"]

    class Watched(KVCache):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self.spec)

    monkeypatch.setattr(kv_manager, "KVCache", Watched)
    (prompt,) = prompts_of(40)
    (got,) = generate(quantized, [prompt], GREEDY)
    (same,) = generate(quantized, [prompt], GREEDY, kv=parse_kv("window(8, sinks=2)+int8"))
    (whole,) = generate(quantized, [prompt], GREEDY, kv=parse_kv("none"))
    assert got == same and got.token_ids != whole.token_ids
    assert whole.token_ids == without_cache(quantized, prompt, GREEDY)
    assert [str(spec) for spec in made] == ["window(8, sinks=2)+int8"] * 2 + ["none"]


def test_prefill_asks_for_one_position_a_sequence(by_operation, monkeypatch):
    loaded = by_operation
    asked = []
    logits = type(loaded.model).logits
    monkeypatch.setattr(type(loaded.model), "logits",
                        lambda self, x: asked.append(tuple(x.shape[:-1])) or logits(self, x))
    generate(loaded, prompts_of(30, 12), Sampling(max_tokens=2, ignore_eos=True))
    assert asked == [(1,), (1,), (1, 1), (1, 1)]


def test_timing_counts_every_token(loaded):
    timings = []
    generate(loaded, prompts_of(30, 12), [Sampling(max_tokens=n, ignore_eos=True) for n in (5, 3)],
             on_done=timings.append)
    (timing,) = timings
    assert (timing.prefill_tokens, timing.decode_tokens) == (42, 4 + 2)
    assert timing.prefill_s > 0 and timing.decode_s > 0


def test_no_prompts(loaded):
    assert generate(loaded, [], GREEDY) == []


def test_nothing_is_kept_for_gradients(loaded):
    seen = []
    generate(loaded, prompts_of(3), GREEDY, on_text=lambda *_: seen.append(torch.is_inference_mode_enabled()))
    assert all(seen)


def test_settings_must_be_as_many_as_prompts(loaded):
    with pytest.raises(UsageError, match="2 prompts have 1"):
        generate(loaded, prompts_of(2, 3), [GREEDY])


def test_a_real_model_answers(real):
    messages = [{"role": "user", "content": "Name the capital of France."}]
    ids = real.tokenizer.chat(messages)
    pieces = []
    (done,) = generate(real, [ids], Sampling(max_tokens=24), on_text=lambda _, text: pieces.append(text))
    assert "Paris" in done.text == "".join(pieces)
    assert done.finish_reason == "stop"
