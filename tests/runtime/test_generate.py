"""Batches, streams, stops and limits; and a real model that knows a capital."""

import dataclasses

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime import engine as module
from quantkit.runtime import kv_manager
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampler, Sampling
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model

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


@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_ragged_batch_equals_each_alone(family, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", chunk)
    loaded = load(str(tiny_model(tmp_path, family, dtype="float32")))
    prompts = prompts_of(7, 1, 23, 4, 8)
    together = generate(loaded, prompts, GREEDY)
    monkeypatch.undo()
    for prompt, got in zip(prompts, together):
        assert got == generate(loaded, [prompt], GREEDY)[0]


def test_a_window_slides_in_a_batch_as_alone(tmp_path):
    loaded = load(str(tiny_model(tmp_path, "mistral", dtype="float32", sliding_window=6)))
    prompts = prompts_of(3, 20, 11)
    for prompt, got in zip(prompts, generate(loaded, prompts, GREEDY)):
        assert got.token_ids == without_cache(loaded, prompt, GREEDY)


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


def test_an_order_of_prompts_changes_nothing(loaded):
    prompts = prompts_of(5, 9, 2)
    sampling = Sampling(max_tokens=10, temperature=1.0, seed=1)
    forward, backward = generate(loaded, prompts, sampling), generate(loaded, prompts[::-1], sampling)
    assert forward == backward[::-1]


def test_a_seed_repeats_a_text(loaded):
    (prompt,) = prompts_of(6)
    sampling = Sampling(max_tokens=20, temperature=1.5, seed=11)
    assert generate(loaded, [prompt], sampling) == generate(loaded, [prompt], sampling)
    other = dataclasses.replace(sampling, seed=12)
    assert generate(loaded, [prompt], sampling) != generate(loaded, [prompt], other)


def test_the_pieces_are_the_text(loaded):
    prompts = prompts_of(5, 9, 2)
    pieces = {0: [], 1: [], 2: []}
    done = generate(loaded, prompts, Sampling(max_tokens=40, temperature=1.0, seed=2),
                    on_text=lambda i, text: pieces[i].append(text))
    for i, one in enumerate(done):
        assert "".join(pieces[i]) == one.text == loaded.tokenizer.decode(one.token_ids)
        assert len(pieces[i]) > 5 and all(pieces[i])


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


def test_a_stop_string_across_tokens(loaded):
    (prompt,) = prompts_of(6)
    (whole,) = generate(loaded, [prompt], GREEDY)
    text, first = whole.text, len(loaded.tokenizer.decode(whole.token_ids[:4]))
    stop = text[first - 1:first + 2]  # from the fourth token into the next
    pieces = []
    (got,) = generate(loaded, [prompt], dataclasses.replace(GREEDY, stop=("nowhere", stop)),
                      on_text=lambda _, piece: pieces.append(piece))
    assert got.finish_reason == "stop_string"
    assert got.text == text[:text.index(stop)] == "".join(pieces)
    assert len(got.token_ids) < len(whole.token_ids)


def test_text_held_for_a_stop_string_comes_out_at_the_end(loaded):
    (prompt,) = prompts_of(6)
    (whole,) = generate(loaded, [prompt], GREEDY)
    (got,) = generate(loaded, [prompt], dataclasses.replace(GREEDY, stop=(whole.text[-2:] + "never",)))
    assert got == whole


def test_a_quantized_model_generates(folder, tmp_path):
    quantize(str(folder), "int8", tmp_path / "out")
    quantized = load(str(tmp_path / "out"))
    prompts = prompts_of(5, 12)
    done = generate(quantized, prompts, GREEDY)
    for prompt, one in zip(prompts, done):
        assert one.token_ids == without_cache(quantized, prompt, GREEDY)


@pytest.mark.parametrize("kv", ["none", "int8", "window(12, sinks=2)+int8", "snapkv(8, window=2)",
                                "tova(9, interval=2)"])
def test_a_kv_setting_in_a_batch_as_alone(loaded, kv):
    prompts, setting = prompts_of(30, 3, 17), parse_kv(kv)
    together = generate(loaded, prompts, GREEDY, kv=setting)
    for prompt, got in zip(prompts, together):
        assert got == generate(loaded, [prompt], GREEDY, kv=setting)[0]
    assert (together == generate(loaded, prompts, GREEDY)) == (kv in ("none", "int8"))


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


def test_a_kv_setting_that_cannot_be_is_an_error_before_any_work(loaded):
    with pytest.raises(UsageError, match="window"):
        generate(loaded, prompts_of(3), GREEDY, kv=parse_kv("window(0)"))
    with pytest.raises(UsageError, match="divisible by 32"):
        generate(loaded, prompts_of(3), GREEDY, kv=parse_kv("int4"))


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


@pytest.mark.parametrize(("length", "more", "fits"), [(500, 12, True), (500, 13, False), (512, 1, False)])
def test_a_prompt_too_long_is_refused_with_both_numbers(loaded, length, more, fits):
    prompts, sampling = prompts_of(2, length), Sampling(max_tokens=more, ignore_eos=True)
    if fits:
        assert len(generate(loaded, prompts, sampling)[1].token_ids) == more
        return
    with pytest.raises(UsageError, match=f"{length} tokens") as caught:
        generate(loaded, prompts, sampling)
    assert "512" in caught.value.why and caught.value.next


@pytest.mark.parametrize(("prompt", "said"), [([], "is empty"), ([3, 300], "doesn't know"), ([-1],
                                                                                             "doesn't know")])
def test_a_bad_prompt_is_refused(loaded, prompt, said):
    with pytest.raises(UsageError, match=said):
        generate(loaded, [[5], prompt], GREEDY)


def test_settings_must_be_as_many_as_prompts(loaded):
    with pytest.raises(UsageError, match="2 prompts have 1"):
        generate(loaded, prompts_of(2, 3), [GREEDY])


def test_a_real_model_answers(real):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = real.tokenizer.chat(messages)
    pieces = []
    (done,) = generate(real, [ids], Sampling(max_tokens=24), on_text=lambda _, text: pieces.append(text))
    assert "Paris" in done.text == "".join(pieces)
    assert done.finish_reason == "stop"
