"""What is scored of a peer that says all, and of one that says less; and the row that it comes to."""


import json

import pytest
import torch

from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.peers.base import PeerPrediction
from quantkit.evaluation.peers.openai_peer import OpenAIPeer
from quantkit.evaluation.peers.process import LlamaPeer, TransformersPeer
from quantkit.evaluation.peers.row import PeerData, peer_row
from quantkit.evaluation.peers.run import parse_peer
from quantkit.evaluation.peers.scores import PeerScores
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.support.errors import UsageError


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 10, 7, generator=generator), torch.randn(2, 10, 7, generator=generator)


TARGETS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2])


def partial(logits, likeliest=True):
    following = logits.log_softmax(-1).gather(-1, TARGETS[:, None])[:, 0]
    return PeerPrediction(following=following, likeliest=logits.argmax(-1) if likeliest else None)


def scored(reference, predictions):
    scores = PeerScores(registered_metrics())
    for logits, prediction in zip(reference, predictions):
        scores.add(logits, prediction, TARGETS)
    return scores


def row_of(**texts):
    """Of texts' scores, as they are after they were kept as JSON and arrays."""
    facts = {"tool": "t 1", "method": "m"}
    data = {"uri": "u", "facts": facts, "times": None,
            "texts": {name: scores.means() for name, scores in texts.items()}}
    return peer_row(MeasurementResult(PeerData.model_validate(json.loads(json.dumps(data)), strict=False), {
        f"{name}/{key}": array for name, scores in texts.items() for key, array in scores.arrays().items()}))


EVERYTHING = {"perplexity", "kl_mean", "top1", "kl_median", "kl_p99", "kl_p999", "flips"}


def test_log_probabilities_give_the_perplexity_and_top1_that_logits_give(logits):
    full = row_of(one=scored(logits[0], map(PeerPrediction, logits[1])))
    less = row_of(one=scored(logits[0], map(partial, logits[1])))
    assert set(full.metrics) == EVERYTHING and set(less.metrics) == {"perplexity", "top1", "flips"}
    for key, interval in less.metrics.items():
        assert interval.value == pytest.approx(full.metrics[key].value, rel=1e-6)
        assert less.window_means["one"][key] == pytest.approx(full.window_means["one"][key], rel=1e-6)


def test_top1_is_blank_if_it_is_unknown_of_one_window(logits):
    row = row_of(one=scored(logits[0], [partial(logits[1][0]), partial(logits[1][1], likeliest=False)]))
    assert set(row.metrics) == set(row.window_means["one"]) == {"perplexity"}


def test_kl_is_blank_where_the_vocabularies_have_other_sizes(logits):
    wider = torch.cat([logits[0][0], torch.full((10, 1), -9.0)], -1)
    row = row_of(one=scored(logits[0], [PeerPrediction(wider)]))
    assert set(row.metrics) == {"perplexity", "top1", "flips"} and row.metrics["top1"].value == 1


def test_all_texts_together_are_all_windows(logits):
    row = row_of(one=scored(logits[0][:1], [PeerPrediction(logits[1][0])]),
                 two=scored(logits[0][1:], [PeerPrediction(logits[1][1])]))
    kl = [row.texts[name]["kl_mean"].value for name in ("one", "two")]
    assert row.metrics["kl_mean"].value == pytest.approx(sum(kl) / 2)
    assert [row.window_means[name]["kl_mean"] for name in ("one", "two")] == [[kl[0]], [kl[1]]]
    assert row.metrics["kl_p99"].value <= max(row.texts[name]["kl_p999"].value for name in row.texts)


def test_a_text_without_logits_leaves_the_total_without_kl(logits):
    row = row_of(one=scored(logits[0][:1], [PeerPrediction(logits[1][0])]),
                 two=scored(logits[0][1:], [partial(logits[1][1])]))
    assert set(row.texts["one"]) == EVERYTHING
    assert set(row.metrics) == {"perplexity", "top1", "flips"}


def test_each_kind_is_read_with_its_options():
    assert parse_peer("transformers(some/folder, quantization=bitsandbytes-nf4)") == TransformersPeer(
        path="some/folder", quantization="bitsandbytes-nf4")
    assert parse_peer("llama.cpp(m.Q8_0.gguf, bin=/opt/llama)") == LlamaPeer(
        file="m.Q8_0.gguf", bin="/opt/llama")
    assert parse_peer("openai(http://127.0.0.1:8000/v1, model=mine)") == OpenAIPeer(
        url="http://127.0.0.1:8000/v1", model="mine")


def test_a_path_with_commas_and_parentheses_stands_in_quotes():
    assert parse_peer('llama.cpp("models (old), v1/m.gguf")').uri == "models (old), v1/m.gguf"


@pytest.mark.parametrize(("text", "words"), [
    ("llamacpp(m.gguf)", "did you mean"), ("transformers", "path"),
    ("transformers(m, quantization=gptq)", "quantization"), ("llama.cpp(m.gguf, ctx=5)", "no option 'ctx'"),
    ("openai(http://a, timeout=-1)", "timeout"), ("transformers(m, device=tpu)", "device"),
    ("transformers(m", "can't be read"), ("x" * 3000, "3000 characters")])
def test_what_is_off_is_said(text, words):
    with pytest.raises(UsageError) as caught:
        parse_peer(text)
    assert words in str(caught.value)
