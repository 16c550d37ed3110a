"""Metrics against their definitions in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval, Metric


@st.composite
def pairs(draw):
    """Log-probabilities of two models, float32 [T, vocab], and targets."""
    tokens, vocab = draw(st.integers(1, 5)), draw(st.integers(2, 300))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, noise = draw(st.sampled_from([0.0, 1.0, 20.0])), draw(st.sampled_from([0.0, 1e-3, 0.3, 10.0]))
    logits = torch.randn(tokens, vocab, generator=random) * scale
    other = logits + torch.randn(tokens, vocab, generator=random) * noise
    targets = torch.randint(vocab, (tokens,), generator=random)
    return logits.log_softmax(-1), other.log_softmax(-1), targets


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pairs())
def test_scores_equal_their_definitions(pair):
    reference, candidate, targets = pair
    p, q = (x.double().numpy() for x in (reference, candidate))
    rows = np.arange(len(targets))
    np.testing.assert_allclose(PERPLEXITY.score(*pair).numpy(), -q[rows, targets.numpy()], rtol=1e-6)
    np.testing.assert_allclose(KL.score(*pair).numpy(), (np.exp(p) * (p - q)).sum(-1), rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(TOP1.score(*pair).numpy(), p.argmax(-1) == q.argmax(-1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pairs())
def test_kl_is_not_negative_and_nothing_against_itself(pair):
    reference, candidate, targets = pair
    assert (KL.score(reference, candidate, targets) >= -1e-5).all()
    assert (KL.score(reference, reference, targets) == 0).all()
    assert (TOP1.score(reference, reference, targets) == 1).all()


def test_a_token_that_the_reference_excludes_adds_nothing():
    reference = torch.tensor([[0.0, -math.inf, -math.inf]])
    candidate = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert KL.score(reference, candidate, torch.tensor([0])).item() == pytest.approx(math.log(2))
    assert KL.score(reference, reference, torch.tensor([0])).item() == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.sampled_from([PERPLEXITY, KL, TOP1]))
def test_the_interval_holds_the_value(means, metric):
    found = metric.summarize(means)
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(float(metric.of_mean(np.float64(np.mean(means)))))
    assert metric.summarize(means) == found, "the same windows give the same interval"


def test_an_interval_covers_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = sum(found.low <= 1.0 <= found.high for found in
               (KL.summarize(list(random.normal(1.0, 0.2, 40)), seed=i) for i in range(200)))
    assert 0.88 <= hits / 200 <= 0.99


def test_one_window_has_no_spread_and_none_has_no_value():
    interval = KL.summarize([0.25])
    assert (interval.low, interval.value, interval.high) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="no windows"):
        KL.summarize([])


def test_an_overflow_is_infinite():
    assert PERPLEXITY.summarize([1e4, 2e4]).value == math.inf


def test_statistics_of_a_run_are_resampled_before_their_function():
    """A ratio of means: neither the mean of windows' ratios, nor a ratio of percentiles."""
    ratio = Metric("ratio", lambda *_: None, lambda mean: mean[..., 0] / mean[..., 1], per="run")
    windows = np.array([[1.0, 2.0], [30.0, 4.0], [2.0, 8.0], [5.0, 5.0]])
    interval = ratio.summarize(windows)
    assert interval.value == pytest.approx(38 / 19)
    picks = np.random.default_rng(0).integers(0, 4, (2000, 4))
    low, high = np.percentile([windows[pick][:, 0].sum() / windows[pick][:, 1].sum() for pick in picks],
                              [2.5, 97.5])
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert ratio.summarize(windows[:1]) == Interval(0.5, 0.5, 0.5)


def test_what_is_missing_in_a_resample_is_left_out_of_the_interval():
    share = Metric("share", lambda *_: None, lambda mean: mean[..., 0] / mean[..., 1], per="run")
    interval = share.summarize(np.array([[0.0, 0.0], [1.0, 2.0]]))
    assert interval == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="not a number"):
        share.summarize(np.array([[0.0, 0.0]]))


def test_infinite_windows_make_infinite_ends():
    interval = KL.summarize([1.0, 2.0, 3.0, math.inf])
    assert interval.value == interval.high == math.inf and 1 <= interval.low < math.inf


@pytest.mark.parametrize(("of_mean", "words"), [
    (lambda mean: mean.sum(), r"of_mean makes \[\] of \[3\]; it should be \[3\]"),
    (lambda mean: -mean, "gives less for a larger mean"), (lambda mean: mean * np.nan, "not a number"),
    (lambda mean: mean + 1j, "complex128, no real numbers"),
    (lambda mean: ["a"] * 3, "no real numbers")])
def test_an_of_mean_that_breaks_its_promise(of_mean, words):
    with pytest.raises(ValueError, match=words):
        Metric("mine", lambda *_: None, of_mean).summarize([1.0, 2.0])


def test_an_excluded_token_that_the_reference_hardly_expects_adds_nothing():
    reference = torch.tensor([[0.0, -200.0]])
    candidate = torch.tensor([[0.0, -math.inf]])
    assert KL.score(reference, candidate, torch.tensor([0])).item() == 0
