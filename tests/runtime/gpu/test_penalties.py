"""Biases and penalties where logits are: the host's bits, for any sequences side by side."""

from dataclasses import replace

import pytest
import torch

from quantkit.ops import gpu
from quantkit.runtime.penalties import change_logits, change_logits_there
from quantkit.runtime.sampler import Sampler, Sampling, sample_async, sample_tokens

VOCAB = 60
SETTINGS = [Sampling(repetition_penalty=1.3), Sampling(frequency_penalty=0.7, presence_penalty=-0.4),
            Sampling(logit_bias=((3, 7.5), (59, -100.0))),
            Sampling(repetition_penalty=0.2, frequency_penalty=-1.1, presence_penalty=2.0,
                     logit_bias=((0, 1.0),))]


@pytest.fixture
def simulated(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: kernels are compiled in this process")
    monkeypatch.setattr(gpu, "SIMULATE", True)


def random_logits(seed, rows=4):
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def histories(seed, prompt=9, answer=14):
    drawn = torch.randint(0, VOCAB, (len(SETTINGS), prompt + answer),
                          generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()


def test_the_bits_of_the_host():
    logits, before = random_logits(0), histories(1)
    samplers = [Sampler(sampling, 9) for sampling in SETTINGS]
    there = change_logits_there(logits, samplers, before)
    for row, sampling in enumerate(SETTINGS):
        assert torch.equal(there[row], change_logits(logits[row], before[row], sampling, 9))


def test_what_is_not_finite_stays_so():
    logits = random_logits(0)
    logits[0, 5], logits[1, 7], logits[2, 9] = torch.nan, torch.inf, -torch.inf
    there = change_logits_there(logits, [Sampler(sampling, 9) for sampling in SETTINGS], histories(1))
    assert torch.equal(there.isfinite(), logits.isfinite())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_that_the_host_has_not_seen_count(simulated, temperature):
    """Step by step, nobody tells the device what was chosen; sequences come, go and change places."""
    settings = [*SETTINGS, Sampling()]
    settings = [replace(sampling, temperature=temperature, seed=5) for sampling in settings]
    ahead, known = ([Sampler(sampling, 9) for sampling in settings] for _ in range(2))
    texts = [*histories(1, answer=0), [1, 2]]
    first = [list(text) for text in texts]
    for step, rows in enumerate([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 4, 0], [4, 3, 0], [0, 1, 2, 3], [4]]):
        logits = random_logits(step, len(settings))[rows]
        pending = sample_async(logits, [ahead[row] for row in rows], [first[row] for row in rows]).tokens()
        for row in rows:
            known[row].counts = None  # counted anew, from all that is known
        assert pending == sample_tokens(logits, [known[row] for row in rows], [texts[row] for row in rows])
        for row, token in zip(rows, pending):
            texts[row].append(token)


def test_a_step_without_a_token_counts_none(simulated):
    logits = random_logits(0)
    logits[1] = torch.nan
    samplers = [Sampler(sampling, 9) for sampling in SETTINGS]
    before = histories(1)
    tokens = sample_async(logits, samplers, before).tokens()
    assert [isinstance(token, int) for token in tokens] == [True, False, True, True]
