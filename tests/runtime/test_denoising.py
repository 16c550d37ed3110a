"""Blocks are written as a plain loop over the whole text writes them, step by step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.reread import reread
from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime.denoising import Denoiser, Denoising, parse_denoising, transfer_count
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model
from tests.models.test_block_diffusion import MASK, SIZES, diffusing

GREEDY = Sampling(max_tokens=24, ignore_eos=True)
CHANCE = dataclasses.replace(GREEDY, temperature=1.2, top_p=0.9, seed=3, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(family, recipe=None, **keys)`` → the model, loaded."""
    def make(family, recipe=None, size=None, **keys):
        folder = diffusing(tmp_path_factory.mktemp("diffusing") / "m", family, size or SIZES[family],
                           **{"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1} | keys)
        if recipe is not None:
            folder = quantize(str(folder), recipe, folder.parent / "out", calibration=None).out
        return load(str(folder))

    return make


def prompt_of(length, seed=0):
    return torch.randint(4, 290, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(loaded, prompt, count, steps, threshold):
    """The answer, and what each step commits: without a cache, by torch's operators."""
    size, even = loaded.config.diffusion.block_size, loaded.config.diffusion.even
    text, commits = list(prompt), []
    while len(text) < len(prompt) + count:
        start = len(text) // size * size
        text += [MASK] * (start + size - len(text))
        for step in range(steps):
            masked = [at for at in range(start, start + size) if text[at] == MASK]
            if not masked:
                break
            logits = loaded.model._model(torch.tensor([text]))[0].float()
            logits[:, MASK] = -1e30
            chances, tokens = logits.softmax(-1).max(-1)
            least = transfer_count(len(masked), step, steps, size, even)
            chosen = [at for at in masked if chances[at] > threshold]
            if len(chosen) < least:
                chosen = sorted(masked, key=lambda at: -float(chances[at]))[:least]
            for at in chosen:
                text[at] = int(tokens[at])
            commits.append([(at, text[at]) for at in sorted(chosen)])
    return text[len(prompt):len(prompt) + count], commits


def run(loaded, prompts, sampling, kv="none", **options):
    engine = Engine(loaded, kv=parse_kv(kv), **{"max_batch": 4, **options})
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while engine.step():
        pass
    engine.close()
    assert engine.stats()["kv_used_bytes"] == 0
    return [request.result.token_ids for request in requests], requests


@pytest.mark.parametrize(("family", "steps", "threshold"), [
    ("sdar", 4, 0.85), ("sdar", 2, 1.0), ("sdar", 4, 0.005), ("a2d-qwen3", 5, 1.0), ("a2d-qwen2", 8, 0.006)])
@torch.inference_mode()
def test_each_step_commits_what_a_plain_loop_does(made, monkeypatch, family, steps, threshold):
    loaded, commits = made(family, dtype="float32"), []
    commit = Denoiser._commit

    def watched(self, request, logits):
        canvas = self._canvases[request.id]
        before, start = list(canvas.tokens), canvas.start
        tokens = commit(self, request, logits)
        commits.append([(start + at, now) for at, (was, now) in enumerate(zip(before, canvas.tokens))
                        if was != now])
        return tokens

    monkeypatch.setattr(Denoiser, "_commit", watched)
    for length in (3, 8, 37):
        commits.clear()
        prompt = prompt_of(length)
        expected, steps_of = reference(loaded, prompt, GREEDY.max_tokens, steps, threshold)
        denoising = Denoising(steps=steps, confidence=threshold)
        (tokens,), (request,) = run(loaded, [prompt], GREEDY, denoising=denoising)
        assert tokens == expected
        assert commits == steps_of[:len(commits)] and len(steps_of) - len(commits) < steps
        assert request.result.accepted_tokens == sum(map(len, commits))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["none", "int8", "int4", "window(40, sinks=2)+int8", "snapkv(0.4, window=32)",
                                "kvzip(0.5)+int4"])
@pytest.mark.parametrize("family", ["sdar", "a2d-qwen3"])
def test_blocks_of_several_requests_are_written_side_by_side(made, monkeypatch, kv, family):
    """Also where they are more rows than go through the model at once, none of which divides a block."""
    monkeypatch.setattr("quantkit.runtime.cpu.model.MAX_ROWS", 75)
    loaded, prompts = made(family), [prompt_of(length, length) for length in (2, 70, 37, 129)]
    for sampling in (GREEDY, CHANCE):
        together, _ = run(loaded, prompts, sampling, kv)
        assert [run(loaded, [prompt], sampling, kv)[0][0] for prompt in prompts] == together
        assert all(len(tokens) == sampling.max_tokens and MASK not in tokens for tokens in together)


@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "nf4", "w8a8"])
def test_quantized_weights(made, recipe):
    loaded = made("sdar", recipe, head_dim=64, hidden_size=128, intermediate_size=256)
    assert loaded.fallback_reason is None
    prompts = [prompt_of(30), prompt_of(41, 1)]
    together, _ = run(loaded, prompts, GREEDY, "int8")
    assert [run(loaded, [prompt], GREEDY, "int8")[0][0] for prompt in prompts] == together


def test_prefixes_and_pages_that_run_out_change_nothing(made):
    loaded, prompts = made("sdar"), [[*prompt_of(64), *prompt_of(count, count)] for count in (0, 13, 64, 70)]
    sampling = dataclasses.replace(CHANCE, max_tokens=180)
    plain, _ = run(loaded, prompts, sampling, "int8")
    cached, requests = run(loaded, prompts, sampling, "int8", prefix_cache=2**22, max_batch=1)
    assert cached == plain and [request.result.cached_tokens for request in requests] == [0, 64, 64, 64]
    engine = Engine(loaded, kv=parse_kv("int8"), memory=80_000, context=320, max_batch=4, prefix_cache=None)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while engine.step():
        pass
    assert engine.stats()["preemptions"] > 0
    assert [request.result.token_ids for request in requests] == plain


def test_an_answer_ends_where_its_tokens_say(made):
    loaded, prompt = made("sdar"), prompt_of(10)
    (tokens,), _ = run(loaded, [prompt], GREEDY)
    for count in range(1, 9):
        assert run(loaded, [prompt], dataclasses.replace(GREEDY, max_tokens=count))[0][0] == tokens[:count]
    end = tokens[9]
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(end,))
    (ended,), (request,) = run(loaded, [prompt], sampling)
    assert ended == tokens[:tokens.index(end) + 1] and request.result.finish_reason == "stop"


def test_a_prompt_is_read_while_others_write(made):
    """Steps of blocks say how long a step takes, too."""
    engine = Engine(made("sdar"), kv=parse_kv("int8"), max_batch=4, max_itl=0.05)
    long = engine.submit(prompt_of(10), dataclasses.replace(GREEDY, max_tokens=100))
    while not long.result.token_ids:
        engine.step()
    late = engine.submit(prompt_of(9), GREEDY)
    while not late.done:
        engine.step()
    assert not long.done
    engine.close()


@torch.inference_mode()
def test_what_is_kept_of_a_prompt_does_not_depend_on_where_it_is_cut(made):
    loaded, kept = made("a2d-qwen3", dtype="float32"), []
    tokens = prompt_of(150)
    for budget in (512, 17, 45):
        cache = KVCache(loaded.config, parse_kv("kvzip(0.5)"), loaded.dtype)
        number = cache.add()
        loaded.model.forward([tokens[:128]], Batch(cache, [number]), [0])
        for _ in reread(cache, number, loaded.model, tokens[:128], 100, lambda budget=budget: budget):
            pass
        kept.append(torch.stack([state.attention_received for state in cache.sequence(number).layers]))
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


def test_a_context_that_no_block_divides_is_used_to_its_end(made):
    loaded = made("a2d-qwen3", max_position_embeddings=100)
    sampling = dataclasses.replace(GREEDY, max_tokens=20)
    (tokens,), _ = run(loaded, [prompt_of(80)], sampling, "int8", memory=2_000_000)
    assert len(tokens) == 20


@pytest.mark.parametrize("even", [True, False])
def test_steps_share_out_a_block(even):
    for size in (4, 8, 32):
        for steps in range(1, size + 1):
            masks, counts = size, []
            for step in range(steps):
                counts.append(transfer_count(masks, step, steps, size, even))
                masks -= counts[-1]
                if not masks:
                    break
            assert masks == 0 and min(counts) > 0


def test_what_blocks_have_not_is_refused(made, monkeypatch):
    loaded = made("sdar")
    engine = Engine(loaded)
    for asked, words in (({"logprobs": 1}, "log-probabilities"), ({"echo": True}, "log-probabilities"),
                         ({"pooling": "mean"}, "embeddings"), ({"constraint": object()}, "structured")):
        with pytest.raises(UsageError, match=words):
            engine.submit([5, 6], GREEDY, **asked)
    with pytest.raises(UsageError, match="token 1 of the prompt is the mask"):
        engine.submit([5, MASK], GREEDY)
    for kv in ("h2o(24, interval=8)", "tova(20, interval=4)", "window(3)"):
        with pytest.raises(UsageError, match="blocks of 4 tokens"):
            engine.submit([5, 6], GREEDY, kv=parse_kv(kv))
    with monkeypatch.context() as patch:  # as with a codec that has no kernel
        patch.setattr(type(loaded.model), "chunk_invariant", lambda self, cache: False)
        with pytest.raises(UsageError, match="no kernel for it"):
            engine.submit([5, 6], GREEDY, kv=parse_kv("int4"))
    with pytest.raises(UsageError, match="no drafts"):
        Engine(loaded, drafter=NgramDrafter())
    for wrong in ("0", "steps=2.5", "confidence=0", "confidence=1.5", "step=2", "2, 3", "confidence=x", "("):
        with pytest.raises(UsageError, match=r"--blocks|block-diffusion"):
            parse_denoising(wrong)
    assert parse_denoising("2, confidence=1") == Denoising(steps=2, confidence=1.0)


def test_commands_write_blocks_or_say_why_not(cli, tmp_path):
    folder = diffusing(tmp_path / "m", "sdar", 4)
    written = cli("generate", folder, "Once upon", "-n", "12", "--ignore-eos", "--blocks", "steps=2")
    assert written.exit_code == 0 and "tokens a step" in written.stderr
    # less than a block
    assert cli("generate", folder, "O", "-n", "3", "--ignore-eos", "--quiet").exit_code == 0
    for arguments, words in ((("eval", folder), "has the mask in it"),
                             (("eval-long", folder), "isn't asked about long contexts"),
                             (("bench", "decode", folder), "no speed of token after token"),
                             (("generate", folder, "x", "--draft", "ngram"), "no drafts"),
                             (("generate", folder, "x", "--blocks", "steps=0"), "blocks"),
                             (("quantize", folder, "--recipe", "int8-gptq", "--calibration", "self", "--out",
                               tmp_path / "out"),
                              "its own calibration text")):
        refused = cli(*arguments)
        assert refused.exit_code and words in refused.stderr.replace("\n", " ")
    plain = tiny_model(tmp_path / "plain")
    refused = cli("generate", plain, "x", "--blocks", "2")
    assert refused.exit_code and "token after the other" in refused.stderr
