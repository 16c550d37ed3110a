"""Log-likelihoods of many requests at once equal those of each worked out by itself."""

import copy
import dataclasses
import random
import warnings

import pytest
import torch

from quantkit.evaluation.quality.feed import prefill
from quantkit.evaluation.tasks import prefix_scores, scoring
from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

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
