"""Broken metrics, and what the kit says of each: ``check_metric`` must catch every one of them."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.evaluation.metrics import KL, TOP1, Metric
from quantkit.plugins.manager import registry
from quantkit.support.errors import PluginError
from quantkit.testing import check_metric

GOOD = replace(TOP1, name="switches", score=lambda r, c, t: (r.argmax(-1) != c.argmax(-1)).float(),
               title="switches", direction="lower")


def gap(reference, candidate, targets):
    """A sound score a token: how much likelier the target became."""
    rows = torch.arange(len(targets))
    return (candidate.exp()[rows, targets] - reference.exp()[rows, targets]).double()


def statistics(reference, candidate, targets):
    """Sound statistics a token, for ``per="run"``."""
    change = gap(reference, candidate, targets)
    return torch.stack([change, change.square()], dim=1)


def in_place(reference, candidate, targets):
    scores = gap(reference, candidate, targets)
    candidate.sub_(candidate.logsumexp(-1, keepdim=True))
    candidate.mul_(0.5)
    return scores


def draws(reference, candidate, targets):
    return gap(reference, candidate, targets) + torch.rand(len(targets)) * 0


def keeps_count():
    calls = itertools.count(1)

    def score(reference, candidate, targets):
        return gap(reference, candidate, targets) + next(calls)

    return score


def product_with_zero(reference, candidate, targets):
    return (reference.exp() * (reference - candidate)).sum(-1)


def doubles(mean):
    mean *= 2
    return mean.copy()


GAP = replace(GOOD, name="gap", score=gap)
RUN = Metric("spread", statistics, lambda mean: np.maximum(mean[..., 1] - mean[..., 0] ** 2, 0) ** 0.5, "run")
BROKEN = {
    "no metric": (gap, "is no metric"),
    "a key of quantkit's": (replace(GAP, name="kl_mean"), "'kl_mean' is one of quantkit's"),
    "a key of a row": (replace(GAP, name="file_bytes"), "'file_bytes' is one of quantkit's"),
    "a key like a task's": (replace(GAP, name="gap/mean"), "isn't a letter and up to 63"),
    "per what": (replace(GAP, per="sentence"), "its per is 'sentence'; it must be one of 'token', 'window'"),
    "a direction in other words": (replace(GAP, direction="up"), "its direction is 'up'"),
    "a long title": (replace(GAP, title="the mean change of probability"), "at most 24 printable characters"),
    "a score that isn't callable": (replace(GAP, score=0.5), "its score is a float, which can't be called"),
    "raises": (replace(GAP, score=lambda r, c, t: r[t]["x"]), r"window 'ordinary': \w+Error"),
    "a mean, not scores": (replace(GAP, score=lambda *a: gap(*a).mean()),
                           r"score returns \[\]; per token it must return \[40\]"),
    "a number, not a tensor": (replace(GAP, score=lambda *a: float(gap(*a).mean()), per="window"),
                               "score returns a float, not a tensor"),
    "scores, not one of the window": (replace(GAP, per="window"), r"per window it must return \[\]"),
    "one statistic without its axis": (replace(RUN, score=gap), r"per run it must return \[40, K\]"),
    "a statistic a token": (replace(RUN, score=lambda *a: gap(*a).diag()), "the number of statistics"),
    "complex": (replace(GAP, score=lambda *a: gap(*a) * 1j), "torch.complex128, no real numbers"),
    "NaN of excluded tokens": (replace(GAP, score=product_with_zero),
                               "window 'excluded tokens': score returns NaN"),
    "an infinite statistic": (replace(RUN, score=lambda r, c, t: (-c).amax(-1, keepdim=True),
                                      of_mean=lambda mean: mean[..., 0]), "returns an infinite statistic"),
    "writes to an argument": (replace(GAP, score=in_place), "score writes to candidate"),
    "random numbers": (replace(GAP, score=draws), "used the global random generator"),
    "counts its calls": (replace(GAP, score=keeps_count()), "another result the second time"),
    "looks at the neighbors": (replace(GAP, score=lambda *a: gap(*a) / gap(*a).abs().amax().clamp(min=1e-9)),
                               "depends on the other tokens of its part"),
    "measures nothing": (replace(GAP, score=lambda r, c, t: torch.zeros(len(t))), "the same score for every"),
    "float32 only": (replace(GAP, score=lambda r, c, t: gap(r, c, t) + (r.dtype == torch.float64)),
                     "float64 log-probabilities give another score"),
    "loses resamples": (replace(GAP, of_mean=lambda mean: mean.mean()), r"of_mean makes float64 \[\] of"),
    "one number from all means": (replace(GAP, of_mean=lambda mean: mean / np.abs(mean).max()),
                                  "depends on the other means"),
    "better when less": (replace(GAP, of_mean=lambda mean: -mean), "of_mean decreases"),
    "keeps the statistics": (replace(RUN, of_mean=lambda mean: mean), "of_mean makes float64"),
    "the square root of rounding": (replace(RUN, of_mean=lambda mean: np.sqrt(-1.0 - mean[..., 0])),
                                    "of_mean returns NaN"),
    "changes the means": (replace(GAP, of_mean=doubles),
                          "of_mean writes to its argument"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_metric_is_caught(name: str) -> None:
    metric, said = BROKEN[name]
    with pytest.raises(PluginError) as caught:
        check_metric(metric)
    assert re.search(said, caught.value.what), caught.value.what
    assert caught.value.why


@pytest.mark.parametrize("metric", [GOOD, GAP, RUN, replace(GAP, of_mean=np.exp), KL,
                                    replace(GAP, per="window", score=lambda *a: gap(*a).amax())])
def test_a_sound_one_passes(metric: Metric) -> None:
    check_metric(metric)


@pytest.mark.parametrize("name", sorted(registry("metrics")))
def test_registered_metrics(name: str) -> None:
    check_metric(registry("metrics").get(name))
