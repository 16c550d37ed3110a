"""Log-likelihoods of many requests at once equal those of each worked out by itself."""

import copy
import dataclasses
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.evaluation.quality.feed import prefill
from quantkit.evaluation.tasks import prefix_scores, scoring
from quantkit.evaluation.tasks.prefix_plan import MIN_INHERITED, plan_prefixes
from quantkit.evaluation.tasks.prefix_scores import token_logprobs
from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.ops import cpu_machine
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import FAMILIES, tiny_model

SETTINGS = ["bf16", "int8", "int4", "window(24, sinks=3)", "window(24)+int8", "snapkv(0.5, window=8)",
            "tova(30, interval=7)", "tova(30, interval=100)+int4"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A tiny model in float32, with a head dimension that every codec takes."""
    return load(str(tiny_model(tmp_path_factory.mktemp("scoring") / "m", head_dim=32)), dtype="float32")


def some_requests(count=12, seed=0):
    draw = random.Random(seed)

    def ids(most):
        return tuple(draw.randrange(4, 300) for _ in range(draw.randint(1, most)))

    found = [ScoringRequest(ids(60), ids(9)) for _ in range(count)]
    context = ids(40)
    # a question with several answers, some of one token, one the beginning of another
    return [*found, *(ScoringRequest(context, answer) for answer in ((5,), (6,), (7, 8), (7, 9), (7, 8, 9)))]


@torch.inference_mode()
def alone(loaded, request):
    """One forward pass, softmax written out in float64."""
    ids = torch.tensor([request.context + request.continuation])
    logits = loaded.model(ids)[0, len(request.context) - 1:-1].double()
    targets = torch.tensor(request.continuation)
    scores = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == targets).all())


def fed_to(monkeypatch, loaded):
    """The number of tokens of each step that the model takes from now on."""
    steps, hidden = [], type(loaded.model).hidden

    def spied(model, ids, positions=None, cache=None):
        steps.append(int((positions >= 0).sum()))
        assert ids.numel() <= prefix_scores.MAX_PADDED * prefix_scores.STEP_TOKENS["cpu"]
        return hidden(model, ids, positions, cache)

    monkeypatch.setattr(type(loaded.model), "hidden", spied)
    return steps


def test_what_requests_share_is_computed_once(exact, monkeypatch):
    steps = fed_to(monkeypatch, exact)
    requests = [*(ScoringRequest((5, 6, 7), (token,)) for token in range(10, 20)),
                ScoringRequest((5, 6), (7, 11)), ScoringRequest((5, 6, 8), (4,))]
    found = Scorer(exact, batch=1).score(requests)
    assert steps == [3, 1]
    for request, got in zip(requests, found, strict=True):
        assert got.logprob == pytest.approx(alone(exact, request)[0], abs=1e-4)


def test_tells_how_far_it_is(exact, monkeypatch):
    monkeypatch.setattr(prefix_scores, "HEAD_ROWS", (4, 4))
    for kv in ("none", "int8", "window(24)"):
        told = []
        Scorer(exact, parse_kv(kv), batch=4).score(some_requests(), told.append)
        assert sum(told) == 17 and len(told) > 2


def test_a_step_stays_bounded(exact, monkeypatch):
    monkeypatch.setattr(prefix_scores, "STEP_TOKENS", {"cpu": 10})
    monkeypatch.setattr(prefix_scores, "HEAD_ROWS", (3, 3))
    monkeypatch.setattr(prefix_scores, "MAX_PADDED", 2)
    steps, requests = fed_to(monkeypatch, exact), some_requests()
    for request, found in zip(requests, Scorer(exact).score(requests), strict=True):
        assert found.logprob == pytest.approx(alone(exact, request)[0], abs=1e-4)
    assert len(steps) > 9 and max(steps) == 10


def test_memory_stays_bounded(exact, monkeypatch):
    """Sequences side by side are as many as their keys and values may take."""
    caches, add = [], KVCache.add
    monkeypatch.setattr(KVCache, "add", lambda cache, length=0: caches.append(cache) or add(cache, length))
    for pages, most in ((3, 3), (0, 1)):
        monkeypatch.setattr(prefix_scores, "KV_BYTES", pages * 64 * KVCache(
            exact.config, dtype=torch.float32).bytes_per_token)
        caches.clear()
        Scorer(exact).score([ScoringRequest((5 + i, 6), (7,) * 40) for i in range(20)])
        assert len(caches) == most and not caches[0].numbers


def test_a_context_that_is_too_long_loses_its_beginning(exact):
    ids = tuple(4 + i % 290 for i in range(600))
    long, short = ScoringRequest(ids, (7, 8)), ScoringRequest((5, 6), (7,))
    for kv in ("none", "bf16"):
        with pytest.warns(UserWarning, match="1 of 2 requests are longer than the 512 tokens"):
            found = Scorer(exact, parse_kv(kv)).score([long, short])
        # 513 tokens: the last is predicted and never read
        kept = ScoringRequest(ids[-511:], (7, 8))
        assert found[0].logprob == pytest.approx(alone(exact, kept)[0], abs=1e-4 if kv == "none" else 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scorer(exact).score([kept])


def test_what_cannot_be_scored(exact):
    with pytest.raises(UsageError, match="513 tokens"):
        Scorer(exact).score([ScoringRequest((5,), (6,) * 513)])
    for request in (ScoringRequest((), (5,)), ScoringRequest((5,), ())):
        with pytest.raises(UsageError, match="empty"):
            Scorer(exact).score([request])
    with pytest.raises(UsageError, match="batch"):
        Scorer(exact, batch=0)
    assert Scorer(exact).score([]) == []


@pytest.mark.parametrize("kv", ["none", "int8", "window(24)"])
def test_a_broken_model_is_an_error(exact, kv):
    model = copy.copy(exact.model._model)
    model.norm = copy.copy(model.norm)
    model.norm.weight = torch.full_like(model.norm.weight, torch.nan)
    broken = dataclasses.replace(exact, model=CpuModel(model))
    with pytest.raises(QuantkitError, match="not finite"):
        Scorer(broken, parse_kv(kv)).score([ScoringRequest((5, 6), (7,))])


@torch.inference_mode()
def decoded(loaded, kv, request):
    """As a server would: the context as a prompt, then a token at a time; and what it writes then."""
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
    row = cache.add()
    total = 0.0
    greedy = True
    likeliest = []
    phase, ids = "prefill_end", torch.tensor([request.context])
    for token in (*request.continuation, None, None, None):
        batch = Batch(cache, [row], phase)
        logits = loaded.model(ids, batch.next_positions(ids.shape[1]), batch)[0, -1]
        best = int(logits.argmax())
        if token is None:
            likeliest.append(token := best)
        else:
            total, greedy = total + float(logits.double().log_softmax(-1)[token]), greedy and token == best
        phase, ids = "decode", torch.tensor([[token]])
    return total, greedy, tuple(likeliest)


@pytest.mark.parametrize("kv", SETTINGS)
def test_through_a_cache_it_is_what_decoding_reads(exact, kv):
    draw = random.Random(5)
    long = tuple(draw.randrange(4, 300) for _ in range(150))
    # bf16 pages in a float32 model: a single query attends in bf16, several in float32
    bound = 0.1 if kv == "bf16" else 2e-4
    requests = [*some_requests(4), ScoringRequest(long[:70], long[70:]),
                ScoringRequest(long[:70], long[70:90]), ScoringRequest(long[:70], (9,))]
    # and what the model itself writes after that context
    _, _, likeliest = decoded(exact, kv, ScoringRequest(long[:70], ()))
    requests.append(ScoringRequest(long[:70], likeliest))
    for request, found in zip(requests, Scorer(exact, parse_kv(kv)).score(requests), strict=True):
        logprob, greedy, _ = decoded(exact, kv, request)
        assert found.logprob == pytest.approx(logprob, abs=bound) and found.greedy == greedy
    assert found.greedy


def test_a_context_is_read_once(exact, monkeypatch):
    scorer, read = Scorer(exact, parse_kv("window(24)")), []
    monkeypatch.setattr(scoring, "prefill",
                        lambda loaded, cache, row, ids: read.append(ids) or prefill(loaded, cache, row, ids))
    scorer.score([ScoringRequest((5, 6, 7), (token, 9))
                  for token in range(10, 50)] + [ScoringRequest((5, 6), (4,))])
    assert read == [(5, 6, 7), (5, 6)]


# -- prefixes that are shared, in every family

LONG = {"phi3": {"original_max_position_embeddings": 40, "max_position_embeddings": 256,
                 "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}}}


def model_of(folder, family="llama", **overrides):
    return load(str(tiny_model(folder / "m", family, dtype="float32", **overrides)), dtype="float32")


def tree(seed=0, count=24, longest=70):
    """Requests that branch off one another at all places: at a page's end, within it, at the first token."""
    draw = random.Random(seed)
    texts = [tuple(draw.randrange(4, 300) for _ in range(longest))]
    while len(texts) < count:
        stem = draw.choice(texts)
        kept = draw.choice([0, 1, 5, 33, 63, 64, 65, len(stem) - 1, len(stem)])
        branch = tuple(draw.randrange(4, 300) for _ in range(draw.randint(2, 12)))
        texts.append((stem[:kept] + branch)[:longest + 9])
    asked = []
    for ids in texts:
        at = draw.randint(1, len(ids) - 1)
        asked.append(ScoringRequest(ids[:at], ids[at:]))
    # equal ones, one that begins another, and the same text cut elsewhere
    ids = texts[-1]
    return [*asked, asked[0], ScoringRequest(ids[:1], ids[1:2]), ScoringRequest(ids[:2], (*ids[2:], 7)),
            ScoringRequest(ids[:1], (*ids[1:], 7))]


def check(loaded, requests, **options):
    scorer = Scorer(loaded, **options)
    results = scorer.score(requests)
    for request, got in zip(requests, results, strict=True):
        logprob, greedy = alone(loaded, request)
        assert got.logprob == pytest.approx(logprob, abs=1e-4) and got.greedy == greedy
    assert scorer.score(requests) == results, "the same call gives the same bits"
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tmp_path):
    check(model_of(tmp_path, family), tree(), batch=5)


def test_windows_reach_back_behind_what_was_taken_back(tmp_path):
    """A window of 16 over prefixes of 65 tokens, to which later requests go back."""
    loaded = model_of(tmp_path, "gemma3_text", sliding_window=16)
    assert 16 in loaded.config.sliding_windows
    check(loaded, tree(seed=1), batch=2)


def test_a_rotation_that_depends_on_the_length(tmp_path):
    loaded = model_of(tmp_path, "phi3", **LONG["phi3"])
    requests = tree(seed=2)
    lengths = [len(request.context + request.continuation) - 1 for request in requests]
    assert min(lengths) <= 40 < max(lengths)
    check(loaded, requests)


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_in_any_company_the_same_bits(exact, batch, monkeypatch):
    monkeypatch.setattr(prefix_scores, "MIN_PART", 1)
    requests = tree(seed=3)
    single = [Scorer(exact).score([request])[0] for request in requests]
    order = random.Random(batch).sample(range(len(requests)), len(requests))
    monkeypatch.setattr(prefix_scores, "STEP_TOKENS", {"cpu": 37})
    results = Scorer(exact, batch=batch).score([requests[index] for index in order])
    assert [results[order.index(index)] for index in range(len(requests))] == single


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_codecs_that_encode_each_token_by_itself(exact, kv):
    requests = tree(seed=4)
    single = [Scorer(exact, parse_kv(kv)).score([request])[0] for request in requests]
    assert Scorer(exact, parse_kv(kv), batch=6).score(requests) == single


def test_examples_that_all_share(exact, monkeypatch):
    """Runs that begin in the middle of the same examples, whose pages they share until they write to them."""
    monkeypatch.setattr(prefix_scores, "STEP_TOKENS", {"cpu": 64})
    draw = random.Random(5)
    examples = tuple(draw.randrange(4, 300) for _ in range(100))
    requests = [ScoringRequest((*examples, *question), (answer,)) for question in (
        tuple(draw.randrange(4, 300) for _ in range(6)) for _ in range(12)) for answer in (5, 6, 7)]
    requests += [ScoringRequest(examples[:70], examples[70:]), ScoringRequest(examples, (9, 8))]
    check(exact, requests, batch=8)


def test_other_instruction_sets(tmp_path, monkeypatch):
    requests = tree(seed=6)
    expected = Scorer(model_of(tmp_path / "a")).score(requests)
    monkeypatch.setenv("QUANTKIT_ISA", "plain")
    cpu_machine.isa.cache_clear()
    try:
        assert cpu_machine.isa().name == "plain"
        assert Scorer(model_of(tmp_path / "b")).score(requests) == expected
    finally:
        cpu_machine.isa.cache_clear()


def test_a_row_depends_on_no_other(exact):
    logits = torch.randn(5, 60_000, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.tensor([3, int(logits[1].argmax()), 59_999, 0, 17])
    together = token_logprobs(exact, logits, torch.arange(5), tokens)
    for row in range(5):
        logprob, greedy = token_logprobs(exact, logits[row:row + 1], torch.tensor([0]), tokens[row:row + 1])
        assert (logprob[0], greedy[0]) == (together[0][row], together[1][row])
    expected = logits.double().log_softmax(-1)[torch.arange(5), tokens]
    assert torch.allclose(together[0], expected, atol=1e-5) and together[1].tolist() == [
        False, True, False, False, False]


def test_of_equal_tokens_the_first_is_the_likeliest(exact):
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    results = token_logprobs(exact, logits, torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert results[1].tolist() == [True, False] and results[0][0] == results[0][1]


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), max_size=25)


def prefixes(sequences):
    return {ids[:end] for ids in sequences for end in range(1, len(ids) + 1)}


@given(TEXTS, st.integers(1, 6), st.integers(1, 40), st.integers(1, 5))
def test_every_token_has_its_prefix(sequences, runs, step, least):
    plan = plan_prefixes(sequences, runs, step, least)
    assert plan.sequences == sorted(set(sequences)) and len(plan.runs) <= runs
    assert [number for run in plan.runs for number in range(run.first, run.end)] == [
        *range(len(plan.sequences))]
    for before, run in zip([None, *plan.runs], plan.runs):
        assert run.first < run.end and plan.shared[run.first] == run.inherited
        if run.inherited:
            assert run.inherited >= least
            assert (plan.sequences[before.first][:run.inherited]
                    == plan.sequences[run.first][:run.inherited])
        for number in range(run.first + 1, run.end):
            shared = plan.shared[number]
            assert plan.sequences[number - 1][:shared] == plan.sequences[number][:shared]
    for number, shared in enumerate(plan.shared):
        assert 0 <= shared < len(plan.sequences[number]), "each has a token of its own"


@given(TEXTS, st.integers(1, 6), st.integers(1, 5))
def test_who_computes_a_token(sequences, runs, least):
    plan = plan_prefixes(sequences, runs, 40, least)
    for number, computed_by in enumerate(plan.computed_by()):
        ids = plan.sequences[number]
        for place in range(len(ids)):
            owner = computed_by[place]
            assert owner <= number and plan.sequences[owner][:place + 1] == ids[:place + 1]
            assert place >= plan.shared[owner]


@given(TEXTS)
def test_one_run_computes_every_prefix_once(sequences):
    assert plan_prefixes(sequences, 1, 512).tokens == len(prefixes(sequences))


def test_runs_begin_where_little_is_shared():
    questions = [(subject, *range(50), number, answer)
                 for subject in range(4) for number in range(100, 105) for answer in range(200, 204)]
    plan = plan_prefixes(questions, 4, 512)
    assert [run.first for run in plan.runs] == [0, 20, 40, 60]
    assert plan.tokens == len(prefixes(questions))


def test_runs_of_the_same_examples_take_them_over():
    questions = [(*range(300), number, 1, 2, 3) for number in range(400, 440)]
    plan = plan_prefixes(questions, 8, 512)
    assert len(plan.runs) > 1 and {run.inherited for run in plan.runs[1:]} == {300}
    assert plan.tokens == len(prefixes(questions))
    short = plan_prefixes([ids[300 - MIN_INHERITED + 1:] for ids in questions], 8, 512)
    assert len(short.runs) > 1 and not any(run.inherited for run in short.runs)


def test_no_more_runs_than_fill_a_step():
    long = [(number, *range(1000)) for number in range(40)]
    assert len(plan_prefixes(long, 40, 512).runs) == 1
    assert plan_prefixes([], 4, 512).runs == []
