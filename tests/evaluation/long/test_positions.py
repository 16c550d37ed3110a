"""By position: the sums of ordinary scoring, cut into buckets."""

import math

import pytest
import torch

from quantkit.evaluation.long.positions import by_position, edges_of
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.score import compare
from quantkit.kv.spec import parse_kv
from quantkit.support.errors import UsageError

SETTINGS = ["none", "int4", "snapkv(0.5, window=8)", "tova(90, interval=7)"]


@pytest.fixture
def windows():
    return torch.randint(4, 300, (2, 700), generator=torch.Generator().manual_seed(1))


def test_buckets_together_are_the_ordinary_score(exact, windows):
    kvs = [parse_kv(kv) for kv in SETTINGS]
    buckets, held = by_position(exact, kvs, windows, 100, edges_of(100, [256, 700, 300]))
    whole = compare([TeacherForcedModel(exact, kv, 100) for kv in kvs], windows, prompt=100)
    for kv, scores, size in zip(SETTINGS, whole, held):
        own = [one for one in buckets if one.kv == str(parse_kv(kv))]
        assert [(one.low, one.high) for one in own] == [(100, 256), (256, 300), (300, 699)]
        for name, of in (("perplexity", math.log), ("kl_mean", float), ("top1", float)):
            # the first prediction comes out of the last prompt token in neither
            total = sum(of(one.values[name].value) * (one.high - one.low) for one in own)
            assert total / 599 == pytest.approx(of(scores[name].value), rel=2e-3, abs=2e-5), (kv, name)
        assert size > 0


def test_the_full_cache_doesn_t_differ_from_itself_and_a_bucket_is_its_own_positions(exact, windows):
    kvs = [parse_kv("none"), parse_kv("int4")]
    all_edges, _ = by_position(exact, kvs, windows[:1], 100, [100, 300, 699])
    for one in all_edges[:2]:
        assert one.values["kl_mean"].value == 0 and one.values["top1"].value == 1
    logits = exact.model(windows[:1])[0].float().log_softmax(-1)
    nll = -logits[:-1].gather(-1, windows[0, 1:, None])[:, 0]
    found = math.log(all_edges[1].values["perplexity"].value)
    assert found == pytest.approx(float(nll[300:699].mean()), rel=1e-3)


def test_edges_lie_behind_the_prompt():
    assert edges_of(512, [4096, 1024, 512, 2048]) == [512, 1024, 2048, 4095]
    with pytest.raises(UsageError, match="nothing to score"):
        edges_of(512, [512, 100])
