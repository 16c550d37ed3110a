"""Answers are those of the engine and of plain scoring; what a policy can't know makes a difference."""

import pytest
import torch

from quantkit.evaluation.long.answer import MORE, LongContextModel, _begins
from quantkit.evaluation.long.haystack import FillerHaystack
from quantkit.evaluation.long.items import make_items
from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.generate import generate
from quantkit.runtime.loader import load
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model

SETTINGS = ["none", "int8", "int4", "snapkv(0.5)", "snapkv(0.3, window=8)+int4", "tova(200, interval=3)",
            "window(100, sinks=2)"]


def near(loaded):
    """Log-probabilities differ by no more in another order of additions: policies that ask for queries go
    operation by operation, where bfloat16 rounds by the number of rows."""
    return 2e-3 if loaded.dtype == torch.float32 else 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", SETTINGS)
def test_a_question_in_the_prompt_is_answered_as_the_engine_does(exact, item, kv):
    found = LongContextModel(exact, parse_kv(kv)).read(item, ("known",))
    (answers,) = found
    questions = zip(item.questions, answers.answers, strict=True)
    scores = Scorer(exact, parse_kv(kv)).score([
        ScoringRequest((*item.context, *one.ids), one.answer)
        for one in item.questions]) if kv != "none" else None
    for number, (question, answer) in enumerate(questions):
        prompt = [*item.context, *question.ids]
        sampling = Sampling(max_tokens=len(question.answer) + MORE)
        (written,) = generate(exact, [prompt], sampling, kv=parse_kv(kv))
        assert answer.text == written.text.strip()
        assert answer.right == _begins(written.text.strip(), question.text)
        if scores is not None:
            assert answer.logprob == pytest.approx(scores[number].logprob, abs=near(exact))


@pytest.mark.parametrize("kv", ["none", "int8", "int4"])
def test_when_the_question_comes_makes_no_difference_where_nothing_is_dropped(exact, item, kv):
    reader = LongContextModel(exact, parse_kv(kv))
    (known,), (later,) = reader.read(item, ("known",)), reader.read(item, ("later",))
    assert [one.text for one in known.answers] == [one.text for one in later.answers]
    for one, other in zip(known.answers, later.answers):
        assert one.logprob == pytest.approx(other.logprob, abs=near(exact))
    assert len(reader.read(item)) == 1, "asked once"


def test_later_means_that_the_policy_acted_before_the_question(exact, item):
    """An oracle that does so by hand, one token at a time."""
    spec = parse_kv("snapkv(0.25, window=8)")
    known, later = LongContextModel(exact, spec).read(item)
    assert (known.when, later.when) == ("known", "later")
    for question, answer, other in zip(item.questions, later.answers, known.answers):
        cache = KVCache(exact.config, spec, exact.dtype)
        row = cache.add()
        exact.model(torch.tensor([item.context]), cache=Batch(cache, [row], "prefill_end"))
        ids = [*question.ids, *question.answer]
        rows = torch.stack([exact.model(torch.tensor([[token]]), cache=Batch(cache, [row], "decode"))[0, 0]
                            for token in ids]).float().log_softmax(-1)
        first = len(question.ids) - 1
        logprob = sum(float(rows[first + place, token]) for place, token in enumerate(question.answer))
        assert answer.logprob == pytest.approx(logprob, abs=near(exact))
        assert abs(answer.logprob - other.logprob) > 0.15, "the question would have been seen"


def test_bytes_are_those_of_the_compressed_prompt(exact, item):
    def held(kv, when):
        (found,) = LongContextModel(exact, parse_kv(kv)).read(item, (when,))
        return found.kv_bytes

    full = held("none", "known")
    cache = KVCache(exact.config, parse_kv("none"), exact.dtype)
    tokens = len(item.context) + len(item.questions[0].ids)
    assert 0 <= full - tokens * cache.bytes_per_token < 128 * cache.bytes_per_token
    assert held("int8", "known") < 0.8 * full
    for when in ("known", "later"):
        assert 0.4 * full < held("snapkv(0.5)", when) < 0.65 * full


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["snapkv(5000)", "window(5000)", "snapkv(0.5)+int4", "h2o(0.5)"])
def test_bytes_are_a_sequences_own_whatever_it_shares(exact, item, kv):
    both = LongContextModel(exact, parse_kv(kv)).read(item, ("known", "later"))
    for found in both:
        (alone,) = LongContextModel(exact, parse_kv(kv)).read(item, (found.when,))
        assert found.kv_bytes == alone.kv_bytes


def test_both_times_are_what_each_is_alone(exact, item):
    reader = LongContextModel(exact, parse_kv("snapkv(0.5)"))
    fed = []
    assert reader.read(item, ("known", "later"), fed.append) == [
        *reader.read(item, ("known",)), *reader.read(item, ("later",))]
    assert sum(fed) == len(item.context)


@pytest.mark.parametrize(("text", "right"), [("12345", True), ("12345. Then", True), ("123456", False),
                                             ("1234", False), ("a 12345", False), ("12345s", False)])
def test_an_answer_is_right_if_it_ends_where_a_number_or_word_does(text, right):
    assert _begins(text, "12345") is right


@pytest.mark.parametrize("kv", ["none", "snapkv(0.5)"])
def test_a_prompt_may_fill_the_model_s_context(tmp_path, kv):
    loaded = load(str(tiny_model(tmp_path / "short", max_position_embeddings=600)))
    (full,) = make_items(loaded.tokenizer, "passkey", FillerHaystack(), length=600, depths=1, samples=1)
    for answers in LongContextModel(loaded, parse_kv(kv)).read(full):
        assert len(answers.answers) == 1 and answers.answers[0].logprob < 0
