"""A plugin's metric beside the built-ins: per token, window and run; and one that breaks its promise."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.evaluation.metric_table import RegisteredMetric
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Metric
from quantkit.evaluation.quality import window_scores
from quantkit.evaluation.quality.token_scores import TokenScores, joined, tails
from quantkit.evaluation.quality.window_scores import WindowScores

BUILTINS = [RegisteredMetric(metric, "quantkit") for metric in (PERPLEXITY, KL, TOP1)]
MINE = Metric("mine", lambda reference, candidate, targets: torch.ones(len(targets)))


def windows(count=3, tokens=20, vocab=11):
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(tokens, vocab, generator=random), torch.randn(tokens, vocab, generator=random),
             torch.randint(vocab, (tokens,), generator=random)) for _ in range(count)]


def summaries(metrics, data=None):
    scores = WindowScores(metrics, 2)
    for reference, candidate, targets in data or windows():
        scores.add(0, reference, reference, targets)
        scores.add(1, reference, candidate, targets)
    return scores.summaries()


def mine(metric, owner="quantkit-mine"):
    return [*BUILTINS, RegisteredMetric(metric, owner)]


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_a_metric_of_whole_windows_sees_whole_windows(monkeypatch, rows):
    monkeypatch.setattr(window_scores, "LOGITS", rows * 11)
    lengths = []

    def largest(reference, candidate, targets):
        lengths.append(len(targets))
        assert reference.dtype == candidate.dtype == torch.float32
        return (reference - candidate).abs().amax()

    data = windows()
    interval = summaries(mine(replace(MINE, score=largest, per="window")), data)[1]["mine"]
    expected = [(r.log_softmax(-1) - c.log_softmax(-1)).abs().amax().item() for r, c, _ in data]
    assert interval.value == pytest.approx(np.mean(expected)) and set(lengths) == {20}


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_statistics_of_a_run_are_means_over_all_tokens(monkeypatch, rows):
    monkeypatch.setattr(window_scores, "LOGITS", rows * 11)
    data = windows()
    metric = Metric("deviation", lambda r, c, t: torch.stack([c[:, 0], c[:, 0] ** 2], 1),
                    lambda mean: np.sqrt(mean[..., 1] - mean[..., 0] ** 2), per="run")
    first = torch.cat([c.log_softmax(-1)[:, 0] for _, c, _ in data]).double()
    assert summaries(mine(metric), data)[1]["deviation"].value == pytest.approx(
        float(first.std(unbiased=False)), rel=1e-5)


def raises(reference, candidate, targets):
    raise IndexError("vocabulary")


def only_sometimes():
    calls = itertools.count(1)

    def score(reference, candidate, targets):
        return torch.ones(len(targets)) * (math.nan if next(calls) == 4 else 1)

    return score


@pytest.mark.parametrize(("metric", "reason"), [
    (replace(MINE, score=raises), "IndexError: vocabulary"),
    (replace(MINE, score=lambda r, c, t: 1.0), "score returns a float, not a tensor"),
    (replace(MINE, score=lambda r, c, t: torch.ones(())), r"returns \[\]; per token it must return \[20\]"),
    (replace(MINE, score=lambda r, c, t: torch.ones(20, 1)), r"score returns \[20, 1\]"),
    (replace(MINE, per="window"), r"score returns \[20\]; per window it must return \[\]"),
    (replace(MINE, per="run"), r"score returns \[20\]; per run it must return \[20, K\]"),
    (replace(MINE, per="run", score=lambda r, c, t: torch.full((20, 2), math.inf)), "infinite statistic"),
    (replace(MINE, score=lambda r, c, t: torch.ones(20) * 1j), "no real numbers"),
    (replace(MINE, score=only_sometimes()), "score returns NaN"),
    (replace(MINE, of_mean=lambda mean: mean[0]), "of_mean makes"),
    (replace(MINE, of_mean=lambda mean: 1 / 0), "ZeroDivisionError")])
def test_a_plugin_s_metric_that_fails_costs_itself(metric, reason):
    with pytest.warns(UserWarning, match=f"'mine' of quantkit-mine was left out: .*{reason}") as caught:
        rows = summaries(mine(metric))
    assert len(caught) == 1, "one warning, however many windows there are"
    assert rows == summaries(BUILTINS), "the others are as they were, and the key is absent"


def test_a_built_in_that_fails_raises():
    with pytest.raises(IndexError):
        summaries([RegisteredMetric(replace(MINE, score=raises), "quantkit")])


def test_infinite_scores_are_allowed():
    metric = replace(MINE, score=lambda r, c, t: torch.full((len(t),), math.inf))
    assert summaries(mine(metric))[1]["mine"].value == math.inf


def writes(argument):
    def score(*arguments):
        arguments[argument].zero_()
        return torch.ones(len(arguments[2]))

    return score


@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("per", ["token", "window"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_plugin_s_metric_that_writes_spoils_nobody_s_numbers(argument, per, inference):
    score = writes(argument)
    metric = replace(MINE, per=per, score=score if per == "token" else lambda *all_: score(*all_).mean())
    after = RegisteredMetric(replace(KL, name="after"), "quantkit-after")
    with torch.inference_mode(inference):
        data = [tuple(tensor.clone() for tensor in window) for window in windows()]
        with pytest.warns(UserWarning, match="'mine' of quantkit-mine was left out: score writes to an "
                                             "argument"):
            rows = summaries([*mine(metric), after], data)
        assert rows == summaries([*BUILTINS, after]), "neither a built-in nor another plugin's metric"
    assert all(torch.equal(*pair) for window in zip(data, windows()) for pair in zip(*window))


def test_writing_past_torch_spoils_nobody_s_numbers():
    def score(reference, candidate, targets):
        for argument in (reference, candidate, targets):
            argument.numpy()[:] = 0  # no version counts that
        return torch.ones(len(targets))

    after = RegisteredMetric(replace(KL, name="after"), "quantkit-after")
    data = windows()
    rows = summaries([*mine(replace(MINE, score=score)), after], data)
    for row, sound in zip(rows, summaries([*BUILTINS, after])):
        assert {name: row[name] for name in sound} == sound
    assert all(torch.equal(window[2], untouched[2]) for window, untouched in zip(data, windows()))


def scores(kl, agrees):
    kl, agrees = np.asarray(kl, np.float32), np.asarray(agrees, bool)
    return TokenScores(kl, np.zeros_like(kl), np.zeros(kl.shape, np.int32), agrees)


def test_percentiles_and_flips():
    kl = np.arange(1000.0).reshape(10, 100)
    agrees = np.ones((10, 100), bool)
    agrees[:, :7] = False
    tail_values = tails(scores(kl, agrees))
    assert tail_values["kl_median"].value == pytest.approx(499.5)
    assert tail_values["kl_p99"].value == pytest.approx(989.01)
    assert tail_values["kl_p999"].value == pytest.approx(998.001)
    assert tail_values["flips"].value == pytest.approx(0.07)
    # each window has as many
    assert tail_values["flips"].low == tail_values["flips"].high == pytest.approx(0.07)
    for interval in tail_values.values():
        assert interval.low <= interval.value <= interval.high
    assert tail_values["kl_median"].low < 499.5 < tail_values["kl_median"].high


def test_what_is_left_of_rounding_counts_as_nothing():
    tail_values = tails(scores([[-1e-9, -2e-9, 0.0, 0.0]], [[True] * 4]))
    assert tail_values["kl_median"].value == tail_values["kl_p999"].value == 0


def test_texts_are_joined():
    together = joined([scores([[1, 2]], [[1, 0]]), scores([[3, 4], [5, 6]], [[1, 1], [0, 0]])])
    assert together.kl.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tails(together)["flips"].value == pytest.approx(0.5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    inside = 0
    for seed in range(60):
        kl = random.exponential(1.0, (40, 50))
        interval = tails(scores(kl, np.ones((40, 50), bool)), seed)["kl_median"]
        inside += interval.low <= np.log(2) <= interval.high
    assert 50 <= inside <= 60
