"""What is scored of a peer that says all, and of one that says less."""

import pytest
import torch

from quantkit.evaluate.metric_table import registered_metrics
from quantkit.evaluate.peers.base import PeerPrediction
from quantkit.evaluate.peers.scores import PeerScores


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 10, 7, generator=generator), torch.randn(2, 10, 7, generator=generator)


TARGETS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2])


def partial(logits, likeliest=True):
    following = logits.log_softmax(-1).gather(-1, TARGETS[:, None])[:, 0]
    return PeerPrediction(following=following, likeliest=logits.argmax(-1) if likeliest else None)


def test_log_probabilities_give_the_perplexity_and_top1_that_logits_give(logits):
    full, less = PeerScores(registered_metrics()), PeerScores(registered_metrics())
    for reference, candidate in zip(*logits):
        full.add(reference, PeerPrediction(candidate), TARGETS)
        less.add(reference, partial(candidate), TARGETS)
    whole, part = full.summary(), less.summary()
    assert set(whole) == {"perplexity", "kl_mean", "top1"} and set(part) == {"perplexity", "top1"}
    for key, interval in part.items():
        assert interval.value == pytest.approx(whole[key].value, rel=1e-6)
        assert less.window_means()[key] == pytest.approx(full.window_means()[key], rel=1e-6)


def test_top1_is_blank_if_it_is_unknown_of_one_window(logits):
    scores = PeerScores(registered_metrics())
    scores.add(logits[0][0], partial(logits[1][0]), TARGETS)
    scores.add(logits[0][1], partial(logits[1][1], likeliest=False), TARGETS)
    assert set(scores.summary()) == set(scores.window_means()) == {"perplexity"}


def test_kl_is_blank_where_the_vocabularies_have_other_sizes(logits):
    scores = PeerScores(registered_metrics())
    wider = torch.cat([logits[0][0], torch.full((10, 1), -9.0)], -1)
    scores.add(logits[0][0], PeerPrediction(wider), TARGETS)
    assert set(scores.summary()) == {"perplexity", "top1"} and scores.summary()["top1"].value == 1


def test_all_texts_together_are_all_windows(logits):
    total, texts = PeerScores(registered_metrics()), []
    for reference, candidate in zip(*logits):
        texts.append(PeerScores(registered_metrics()))
        texts[-1].add(reference, PeerPrediction(candidate), TARGETS)
        total.extend(texts[-1])
    kl = [text.summary()["kl_mean"].value for text in texts]
    assert total.summary()["kl_mean"].value == pytest.approx(sum(kl) / 2)
    assert total.window_means()["kl_mean"] == pytest.approx(kl)


def test_a_text_without_logits_leaves_the_total_without_kl(logits):
    total = PeerScores(registered_metrics())
    for reference, prediction in ((logits[0][0], PeerPrediction(logits[1][0])),
                                  (logits[0][1], partial(logits[1][1]))):
        text = PeerScores(registered_metrics())
        text.add(reference, prediction, TARGETS)
        total.extend(text)
    assert set(total.summary()) == {"perplexity", "top1"}
