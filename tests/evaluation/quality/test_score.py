"""Windows of a text, and models scored on them."""

import copy
import math

import pytest
import torch

from quantkit.evaluation.quality import window_scores
from quantkit.evaluation.quality.score import compare, windows_of
from quantkit.evaluation.text import load_text
from quantkit.ops.cpu_weight import pack_plain
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.loader import load
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.testing import tiny_model

TEXT = "the cat and the other one sat on the mat, in the heat of the sun. " * 400


def test_a_window_begins_as_a_text_does(loaded, monkeypatch):
    first = loaded.tokenizer.encode("any")[0]
    begun = windows_of(loaded, TEXT, 32, 5)
    assert first == loaded.tokenizer.bos_id and begun[:, 0].tolist() == [first] * 5
    monkeypatch.setitem(loaded.tokenizer.__dict__, "first_id", None)
    plain = windows_of(loaded, TEXT, 32, 5)
    assert plain[0, 0] != first and torch.equal(begun[:, 1:], plain[:, 1:])


@pytest.mark.parametrize(("window", "windows"), [(2, 1), (16, 3), (128, 20)])
def test_leaving_out_the_end_of_a_long_text_changes_nothing(loaded, window, windows):
    text = load_text().content
    need = window * windows
    ids = torch.tensor(loaded.tokenizer.encode(text, special=False)[:need]).view(windows, window)
    assert torch.equal(windows_of(loaded, text, window, windows)[:, 1:], ids[:, 1:])


def test_a_text_of_few_tokens_for_its_length(loaded, monkeypatch):
    spaced = "a" + " " * 3000
    text = spaced * 30
    ids = [7] * (len(text) // 1000)
    monkeypatch.setattr(loaded.tokenizer, "encode", lambda t, special: ids[:len(t) // 1000])
    assert windows_of(loaded, text, 30, 3).shape == (3, 30)


def test_a_text_that_is_too_short_says_what_would_do(loaded):
    with pytest.raises(UsageError) as caught:
        windows_of(loaded, TEXT[:1000], 64, 1000)
    many = int(caught.value.next.split()[-1])
    assert windows_of(loaded, TEXT[:1000], 64, many).shape[0] == many
    with pytest.raises(UsageError):
        windows_of(loaded, TEXT[:1000], 64, many + 1)
    with pytest.raises(UsageError, match="smaller --window"):
        windows_of(loaded, "short", 64, 1)


def test_a_window_longer_than_the_context(loaded):
    assert windows_of(loaded, TEXT, 512, 1).shape == (1, 512)
    with pytest.raises(UsageError, match="context") as caught:
        windows_of(loaded, TEXT, 513, 1)
    assert "512" in caught.value.why


@pytest.fixture
def plain(loaded):
    """The same in float32, whose weights a test can change."""
    return load(loaded.uri, dtype="float32")


def perturbed(loaded, by):
    other = copy.copy(loaded)
    other.model = CpuModel(copy.deepcopy(loaded.model._model))
    random = torch.Generator().manual_seed(0)
    for linear in other.model.linears().values():
        noise = torch.randn(linear.shape, generator=random) * by
        linear.weight = pack_plain(linear(torch.eye(linear.shape[1])).T * (1 + noise))
    return other


def test_the_reference_against_itself_and_more_damage_is_more_kl(plain):
    tokens = windows_of(plain, TEXT, 32, 3)
    others = [plain, perturbed(plain, 0.05), perturbed(plain, 0.5)]
    same, slight, heavy = compare([plain, *others], tokens)[1:]
    assert same["kl_mean"].value == 0 and same["top1"].value == 1
    assert 0 < slight["kl_mean"].value < heavy["kl_mean"].value
    assert slight["top1"].value > heavy["top1"].value


def test_perplexity_and_kl_equal_a_direct_computation(plain):
    other = perturbed(plain, 0.3)
    tokens = windows_of(plain, TEXT, 150, 2)  # more positions than are scored at once
    found = compare([plain, other], tokens)
    logs = [[one.model(window[None])[0, :-1].double().log_softmax(-1) for window in tokens]
            for one in (plain, other)]
    nll = torch.stack([-q.gather(-1, w[1:, None]).mean() for q, w in zip(logs[1], tokens)]).mean()
    assert found[1]["perplexity"].value == pytest.approx(math.exp(nll), rel=1e-5)
    kl = torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(*logs)]).mean().item()
    assert found[1]["kl_mean"].value == pytest.approx(kl, rel=1e-4)
    top1 = torch.stack([(p.argmax(-1) == q.argmax(-1)).double().mean() for p, q in zip(*logs)]).mean().item()
    assert found[1]["top1"].value == pytest.approx(top1)


def test_progress_counts_every_window_of_every_model(loaded):
    events = []
    compare([loaded, loaded], windows_of(loaded, TEXT, 8, 3), events.append)
    assert [event.done for event in events] == list(range(7)) and {event.total for event in events} == {6}


def test_different_vocabularies(loaded, tmp_path):
    other = load(str(tiny_model(tmp_path / "other", vocab_size=320)))
    with pytest.raises(UsageError, match="vocabular"):
        compare([loaded, other], windows_of(loaded, TEXT, 8, 1))


def test_the_reference_runs_once_a_window(plain, monkeypatch):
    other, calls = perturbed(plain, 0.3), []
    run = type(plain.model).hidden
    monkeypatch.setattr(type(plain.model), "hidden",
                        lambda self, *a, **k: calls.append(self) or run(self, *a, **k))
    compare([plain, other], windows_of(plain, TEXT, 20, 3))
    assert [self is plain.model for self in calls] == [True, False] * 3


@pytest.mark.parametrize("rows", [1, 7, 19, 1000])
def test_how_many_positions_are_scored_at_once_changes_nothing(plain, monkeypatch, rows):
    models, tokens = [plain, perturbed(plain, 0.3)], windows_of(plain, TEXT, 20, 2)
    usual = compare(models, tokens)
    monkeypatch.setattr(window_scores, "LOGITS", rows * plain.config.vocab_size)
    for one, found in zip(usual, compare(models, tokens)):
        for name in one:
            assert found[name].value == pytest.approx(one[name].value, rel=1e-5, abs=1e-7)


def test_windows_start_afresh(plain):
    """A window's numbers don't depend on the one before it."""
    models, tokens = [plain, perturbed(plain, 0.3)], windows_of(plain, TEXT, 20, 2)
    alone = [compare(models, window[None])[1]["kl_mean"].value for window in tokens]
    assert compare(models, tokens)[1]["kl_mean"].value == pytest.approx(sum(alone) / 2, rel=1e-6)


def test_of_a_long_text_only_a_beginning_is_tokenized(loaded, monkeypatch):
    lengths, real = [], loaded.tokenizer.encode
    monkeypatch.setattr(loaded.tokenizer, "encode",
                        lambda text, special: lengths.append(len(text)) or real(text, special=special))
    windows_of(loaded, TEXT * 20, 16, 4)
    assert max(lengths) < len(TEXT * 20) / 10


def test_an_infinite_logit_is_an_error_too(loaded, monkeypatch):
    run = type(loaded.model).logits

    def broken(self, x):
        logits = run(self, x).clone()
        logits[3, 5] = torch.inf
        return logits

    monkeypatch.setattr(type(loaded.model), "logits", broken)
    with pytest.raises(QuantkitError, match="not finite") as caught:
        compare([loaded], windows_of(loaded, TEXT, 8, 1))
    assert "window 0" in caught.value.why and "bfloat16" in caught.value.why
