"""Whatever is drafted, a request gets the bits that it gets without drafts."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from quantkit.kv.spec import parse_kv
from quantkit.quantization.run import quantize
from quantkit.runtime import speculation
from quantkit.runtime.drafting.base import parse_drafter
from quantkit.runtime.drafting.draft_model import LowBitDrafter
from quantkit.runtime.drafting.ngram import NgramDrafter
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from tests.helpers.drafts import Script, Scripted, run, scripted

pytestmark = pytest.mark.usefixtures("short_chunks", "always_drafted")

KV = ("none", "int8", "fp8", "int4", "int3", "window(12, sinks=2)+int8", "window(20)+int4",
      "snapkv(0.4, window=4)", "kvzip(0.5)+int4", "h2o(24, interval=7)", "h2o(24, interval=7)+int4",
      "tova(20, interval=5)+int4", "expected(0.5)+int8")


GREEDY = Sampling(max_tokens=60, ignore_eos=True)
CHANCE = Sampling(max_tokens=60, ignore_eos=True, temperature=1.3, top_p=0.9, seed=5, repetition_penalty=1.1,
                  presence_penalty=0.5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", KV)
def test_no_setting_lets_a_draft_change_a_bit(small, prompt_of, kv):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 40, 90, 17))]
    samplings = [GREEDY, CHANCE, GREEDY, CHANCE]
    plain, _ = run(small, prompts, samplings, kv)
    for wrong in (0.0, 0.3, 1.0):
        drafted, counts = run(small, prompts, samplings, kv, scripted(prompts, plain, wrong=wrong))
        assert drafted == plain
        assert counts.tokens > 60 and counts.drafts > 10
        assert (counts.accepted == counts.tokens) == (wrong == 0) and (counts.accepted < 8) == (wrong == 1)
        assert counts.accepted == sum(counts.accepted_at)


@pytest.mark.parametrize("recipe", ["int8", "int4-rtn", "nf4", "w8a8"])
def test_nor_does_a_format(tmp_path, prompt_of, recipe):
    quantize(str(tiny_model(tmp_path / "source", "qwen3")), recipe, tmp_path / "out")
    loaded, prompts = load(str(tmp_path / "out")), [prompt_of(30), prompt_of(70, 1)]
    plain, _ = run(loaded, prompts, [GREEDY, CHANCE], "int8")
    drafted, counts = run(loaded, prompts, [GREEDY, CHANCE], "int8", scripted(prompts, plain))
    assert drafted == plain and counts.accepted > 20


def test_models_with_windows_of_their_own(tmp_path, prompt_of):
    loaded = load(str(tiny_model(tmp_path / "tiny", "gemma3_text", sliding_window=24, head_dim=32,
                                 query_pre_attn_scalar=32)))
    assert loaded.fallback_reason is None
    prompts = [prompt_of(30), prompt_of(70, 1)]
    for kv in ("none", "int4"):
        plain, _ = run(loaded, prompts, [GREEDY, CHANCE], kv)
        drafted, counts = run(loaded, prompts, [GREEDY, CHANCE], kv, scripted(prompts, plain))
        assert drafted == plain and counts.accepted > 20


@pytest.mark.parametrize(("kv", "sizes"), [("none", (0.3, 0.5, 4.0)), ("int8", (0.2, 4.0)), ("int4", (2.3,))])
def test_scarce_memory_changes_nothing(small, prompt_of, kv, sizes):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((60, 80, 70, 90))]
    answers = [Sampling(max_tokens=220, ignore_eos=True)] * 4
    plain, _ = run(small, prompts, answers, kv)
    for megabytes in sizes:
        drafted, counts = run(small, prompts, answers, kv, scripted(prompts, plain), preempts=megabytes < 1,
                              memory=int(megabytes * 2**20), context=320, prefix_cache=None)
        assert drafted == plain and counts.accepted > 100


@pytest.mark.parametrize("kv", ["none", "int8", "window(300, sinks=4)+int4"])
def test_attention_over_a_long_cache_is_split_along_it(tmp_path, prompt_of, kv):
    """Drafted tokens of one text are few rows, so their units are parts of the cache, as for one token."""
    from quantkit_kernels.cpu.attention import SPLIT

    loaded = load(str(tiny_model(tmp_path / "long", "qwen3", max_position_embeddings=2048)))
    prompts = [prompt_of(4 * SPLIT + 100)]
    plain, _ = run(loaded, prompts, [GREEDY], kv)
    drafted, counts = run(loaded, prompts, [GREEDY], kv, scripted(prompts, plain))
    assert drafted == plain and counts.accepted > 20
    program = next(iter(loaded.model._programs.values()))
    assert program._current_tiles[1] >= 4 or kv.startswith("window")


def test_what_was_taken_back_is_no_prefix(small, prompt_of):
    """An answer's blocks are kept for texts that go on with it; none has a drafted token."""
    prompt = prompt_of(100)
    (plain,), _ = run(small, [prompt], [GREEDY], "none")
    answer = [token.id for token in plain]
    drafter = scripted([prompt], [plain], wrong=0.5)
    engine = Engine(small, drafter=drafter, prefix_cache=1 << 24)
    follow_up = [*prompt, *answer, *prompt_of(9, 3)]
    for text in (prompt, follow_up):
        request = engine.submit(text, GREEDY if text is prompt else Sampling(max_tokens=20, ignore_eos=True))
        if text is follow_up:
            drafter.answers[tuple(text)] = []
            drafter.answers.pop(tuple(prompt))
        while engine.step():
            pass
    assert request.result.cached_tokens == (len(prompt) + len(answer) - 1) // 64 * 64 > 64
    (fresh,), _ = run(small, [follow_up], [Sampling(max_tokens=20, ignore_eos=True)], "none")
    assert request.result.token_ids == [token.id for token in fresh]


def test_an_answer_that_ends_inside_a_draft(small, prompt_of):
    prompt = prompt_of(20)
    (plain,), _ = run(small, [prompt], [GREEDY], "none")
    texts = "".join(token.text for token in plain)
    for end in (texts[8:10], texts[20:23]):
        sampling = Sampling(max_tokens=60, ignore_eos=True, stop=(end,))
        (stopped,), _ = run(small, [prompt], [sampling], "none")
        (drafted,), counts = run(small, [prompt], [sampling], "none", scripted([prompt], [plain], wrong=0.0))
        assert drafted == stopped and counts.accepted
    for count in range(1, 9):
        sampling = Sampling(max_tokens=count, ignore_eos=True)
        (drafted,), counts = run(small, [prompt], [sampling], "none", scripted([prompt], [plain], wrong=0.0))
        assert [token.id for token in drafted] == [token.id for token in plain[:count]]
        assert counts.tokens < count  # never beyond the end


@pytest.mark.parametrize("drafted", [False, True])
def test_a_request_that_cancels_itself_gets_no_token_after_that(small, prompt_of, drafted):
    prompts = [prompt_of(20), prompt_of(30, 2)]
    plain, _ = run(small, prompts, [GREEDY] * 2, "none")
    for count in range(1, 9):
        engine = Engine(small, drafter=scripted(prompts, plain, wrong=0.0) if drafted else None)
        seen, submitted = [], []

        def stop(token, seen=seen, submitted=submitted, count=count):
            seen.append(token)
            if len(seen) == count:
                submitted[0].cancel()

        submitted += [request := engine.submit(prompts[0], GREEDY, on_token=stop),
                      other := engine.submit(prompts[1], GREEDY)]
        while engine.step():
            pass
        result = request.result
        assert result.token_ids == [token.id for token in seen] == [token.id for token in plain[0][:count]]
        assert result.finish_reason == "cancelled" and result.accepted_tokens == result.drafted_tokens
        assert other.result.token_ids == [token.id for token in plain[1]]
        assert engine.stats()["kv_used_bytes"] == 0


def test_a_drafter_that_fails_costs_a_warning(small, prompt_of):
    class Failing(Scripted):
        def start(self, target):
            source = Script(self, target.config.vocab_size)
            source.propose = self.propose
            return source

        def propose(self, texts, limits):
            raise RuntimeError("no idea")

    class Wild(Failing):
        def propose(self, texts, limits):
            return [[10**6] for _ in texts]

    class Long(Failing):
        def propose(self, texts, limits):
            return [[5] * (limit + 1) for limit in limits]

    prompts = [prompt_of(9), prompt_of(30, 2)]
    plain, _ = run(small, prompts, [GREEDY, CHANCE], "none")
    for kind, reason in ((Failing, "no idea"), (Wild, "can't be used"), (Long, "can't be used")):
        with pytest.warns(UserWarning, match=f"go on without drafts.*{reason}"):
            drafted, counts = run(small, prompts, [GREEDY, CHANCE], "none", kind())
        assert drafted == plain and not counts.tokens


def test_ngrams_follow_what_repeats(small, prompt_of):
    text = prompt_of(40)
    prompt = [*text, *prompt_of(20, 4), *text[:20]]
    source = NgramDrafter(max_match=3).start(small)
    index = speculation.DraftedText(list(prompt), None, 0, None)
    source.begin(index)
    assert source.propose([index], [6]) == [text[20:26]]
    index.tokens += [text[20], 999, 998]
    assert source.propose([index], [6]) == [[]]
    index.tokens += [7, 8, 9, 7, 8, 9]
    assert source.propose([index], [7]) == [[7, 8, 9, 7, 8, 9, 7]]


def test_real_answers_with_ngrams(real):
    content = "Repeat this exactly: " + "red green blue one two three " * 4
    ids = real.tokenizer.chat([{"role": "user", "content": content}])
    sampling = Sampling(max_tokens=80, ignore_eos=True)
    (plain,) = generate(real, [ids], sampling)
    (drafted,) = generate(real, [ids], sampling, drafter=parse_drafter("ngram"))
    assert drafted.token_ids == plain.token_ids and drafted.accepted_tokens > 10


def test_models_that_go_by_operation_get_none(by_operation, prompt_of):
    prompts = [prompt_of(9)]
    plain, _ = run(by_operation, prompts, [GREEDY], "none")
    drafted, counts = run(by_operation, prompts, [GREEDY], "none", scripted(prompts, plain))
    assert drafted == plain and counts is None


def test_previews_draw_what_will_be_drawn(small):
    from quantkit.runtime.sampler import Sampler

    logits = torch.randn(20, 320, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(Sampling(temperature=1.0, seed=4, top_k=50))
    history: list[int] = []
    for start in range(0, 20, 5):
        preview = sampler.preview()
        ahead = [preview(row, history) for row in logits[start:start + 5]]
        assert ahead == [sampler(row, history) for row in logits[start:start + 5]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Sampler(Sampling()).preview()(logits[0], []) == int(logits[0].argmax())


@pytest.fixture(scope="module")
def in_four_bits(tmp_path_factory):
    """The model ``small`` in four bits."""
    folder = tmp_path_factory.mktemp("bits")
    quantize(str(tiny_model(folder / "model", "qwen3")), "int4-rtn", folder / "int4")
    return str(folder / "int4")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["none", "int4", "int4(residual_length=0)", "int8(residual_length=64)",
                                "rotation(4)", "window(20)+int4", "h2o(150, interval=60)+int4",
                                "tova(100, interval=9)+int8", "kvzip(0.5)+int4"])
def test_drafts_in_the_models_own_cache_leave_no_trace(small, prompt_of, in_four_bits, kv):
    """Pages are encoded while a draft is written, and again by what is kept."""
    prompts, answers = [prompt_of(90), prompt_of(33, 2)], [
        dataclasses.replace(sampling, max_tokens=250) for sampling in (GREEDY, CHANCE)]
    plain, _ = run(small, prompts, answers, kv)
    drafter = LowBitDrafter(checkpoint=in_four_bits, least_chance=0)
    drafted, counts = run(small, prompts, answers, kv, drafter)
    assert drafted == plain and 20 < counts.accepted < counts.tokens


@pytest.mark.parametrize("kv", ["int4", "rotation(4)"])
def test_a_draft_that_goes_through_in_two_parts(small, prompt_of, kv, monkeypatch):
    monkeypatch.setattr("quantkit.runtime.cpu.model.MAX_ROWS", 11)
    prompts, answers = [prompt_of(9, seed) for seed in range(4)], [
        dataclasses.replace(GREEDY, max_tokens=250)] * 4
    plain, _ = run(small, prompts, answers, kv)
    drafted, counts = run(small, prompts, answers, kv, scripted(prompts, plain, wrong=0.05))
    assert drafted == plain and counts.accepted > 200


def test_a_policy_that_fails_behind_a_draft_ends_its_request_alone(small, prompt_of, monkeypatch):
    prompts = [prompt_of(40), prompt_of(30, 2)]
    plain, _ = run(small, prompts, [GREEDY] * 2, "int8")
    engine = Engine(small, kv=parse_kv("int8"), drafter=scripted(prompts, plain, wrong=0.0))
    failures = []
    breaks = engine.submit(prompts[0], GREEDY, kv=parse_kv("h2o(24, interval=7)"), on_error=failures.append)
    other = engine.submit(prompts[1], GREEDY)
    while len(breaks.result.token_ids) < 3:
        engine.step()

    def keep(policy, view):
        raise RuntimeError("the policy broke")

    monkeypatch.setattr(type(breaks.kv.manager.cache.policy), "keep", keep)
    while engine.step():
        pass
    assert [str(error) for error in failures] == ["the policy broke"]
    assert other.result.token_ids == [token.id for token in plain[1]]
    assert engine.stats()["kv_used_bytes"] == 0


def test_a_step_without_any_request_that_can_be_drafted_for(small, prompt_of, monkeypatch):
    prompts = [prompt_of(9), prompt_of(30, 2)]
    engine = Engine(small, drafter=NgramDrafter())
    apart = engine.submit(prompts[0], GREEDY, kv=parse_kv("int8"))
    manager = apart.kv.manager
    manager.supports_mixed_batches = manager.drafts = False  # as with a codec that has no kernel
    while engine.step():
        pass
    assert len(apart.result.token_ids) == 60 and not apart.result.drafted_tokens


def test_the_token_that_ends_an_answer_may_be_drafted(small, prompt_of, monkeypatch):
    prompt = prompt_of(20)
    (plain,), _ = run(small, [prompt], [GREEDY], "none")
    ids = [token.id for token in plain]
    place = next(at for at in range(6, 60) if ids.index(ids[at]) == at)
    monkeypatch.setattr(small.tokenizer, "eos_ids", frozenset({ids[place]}), raising=False)
    monkeypatch.setattr(Script, "_draft", lambda self, text, limit: ids[len(text.tokens) - 20:][:limit])
    (drafted,), counts = run(small, [prompt], [Sampling(max_tokens=60)], "none",
                             scripted([prompt], [plain], wrong=0.0))
    assert [token.id for token in drafted] == ids[:place + 1]
    assert counts.tokens == counts.accepted > place // 2
