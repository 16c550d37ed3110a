"""Tokens chosen on the device: of exactly those candidates that the host's sampler leaves, as often."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.runtime.sampler import Sampling, filter_tokens
from quantkit_kernels.triton import argmax as parts
from quantkit_kernels.triton import bounds, sampling
from quantkit_kernels.triton.argmax import argmax
from quantkit_kernels.triton.sampling import choose

# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=12, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])
SETTINGS = [(0.7, 0, 0.9, 0.0), (1.0, 20, 1.0, 0.0), (1.3, 40, 0.8, 0.05), (5.0, 300, 0.999, 0.0),
            (2.0, 10**9, 0.3, 1.0), (0.2, 0, 1.0, 0.1)]


@pytest.fixture(autouse=True)
def _parts(on, monkeypatch):
    """Rows of some parts, though they are short."""
    if on[0].type == "cpu":
        monkeypatch.setattr(parts, "PART", 512)
        monkeypatch.setattr(bounds, "CHUNK", 256)
    with warnings.catch_warnings():  # the interpreter's log(0), as of a row without min-p
        warnings.filterwarnings("ignore", "divide by zero", RuntimeWarning)
        yield


def columns(rows, device):
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.tensor(column, dtype=kind, device=device)
            for column, kind in zip(zip(*rows), kinds, strict=True)]


@pytest.fixture
def kept(monkeypatch):
    """``kept(logits, rows)``: which tokens may be drawn by the bounds that were searched, decided in torch as
    draw_kernel decides; and the ids that were drawn."""
    found = []
    searched = sampling.bounds

    def recorded(*given):
        found[:] = [one.clone() for one in searched(*given)]
        return found

    monkeypatch.setattr(sampling, "bounds", recorded)

    def check(logits, rows):
        temperature, top_k, top_p, min_p = columns(rows, logits.device)
        seeds = torch.arange(len(rows), device=logits.device)
        ids, finite = choose(logits, temperature, seeds, seeds, top_k, top_p, min_p)
        assert finite.all()
        bound, total = found
        score = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature[:, None]
        above, tie = score > bound[:, None], score == bound[:, None]
        most = ((total - (score.exp() * above).sum(-1)) / bound.exp()).ceil().clamp(min=1)
        rank = tie.cumsum(-1) - tie.int()
        return (above | (tie & (rank < most[:, None]))) & (score >= min_p.log()[:, None]), ids

    return check


def expected(logits, rows):
    return torch.stack([torch.isfinite(filter_tokens(row.float().cpu(), Sampling(
        temperature=t, top_k=k, top_p=p, min_p=m))) for row, (t, k, p, m) in zip(logits, rows, strict=True)])


def test_argmax(on, randn):
    logits = randn(5, 1300, on=on) * 0 - 1
    logits[0, 700] = logits[0, 1299] = 2
    logits[1, 1299] = -0.5
    logits[3, 600], logits[4, 3] = float("nan"), -float("inf")
    ids, finite = argmax(logits)
    assert ids.tolist() == [700, 1299, 0, 0, 0] and ids.dtype == torch.int64
    assert finite.tolist() == [1, 1, 1, 0, 0] and finite.dtype == torch.int32


def test_the_candidates_are_those_of_the_host(on, randn, kept):
    logits = 4 * randn(len(SETTINGS), 600, on=on)
    if on[1] == torch.float16:  # many equals
        logits = logits.to(torch.bfloat16).to(on[1])
    found, ids = kept(logits, SETTINGS)
    differ = int((found.cpu() != expected(logits, SETTINGS)).sum())
    assert differ <= 2 * (on[0].type == "cuda")  # sums are rounded otherwise there
    assert found.gather(1, ids[:, None]).all()


@pytest.mark.sampled(2)
@given(vocab=st.integers(2, 1500), seed=st.integers(0, 99), rows=st.lists(st.tuples(
    st.floats(0.1, 5), st.integers(0, 60), st.floats(0.05, 1), st.floats(0, 0.5)), min_size=1, max_size=4))
@DRAWN
def test_any_vocabulary_and_settings(on, randn, kept, vocab, seed, rows):
    logits = 4 * randn(len(rows), vocab, seed=seed, on=on)
    found, ids = kept(logits, rows)
    assert int((found.cpu() != expected(logits, rows)).sum()) <= 2  # a sum within rounding of its bound
    assert found.gather(1, ids[:, None]).all()


def test_of_equals_on_the_bound_the_first(on, kept):
    logits = torch.zeros(3, 600, dtype=on[1], device=on[0])
    logits[1, 520:] = 1
    logits[2, ::2] = -0.0
    found, ids = kept(logits, [(1.0, 0, 0.25, 0.0), (1.0, 7, 0.5, 0.0), (1.0, 0, 0.01, 0.0)])
    assert found[0].nonzero()[:, 0].tolist() == list(range(150))
    assert found[1].nonzero()[:, 0].tolist() == list(range(520, 560))
    assert found[2].nonzero()[:, 0].tolist() == list(range(6))
    assert found.gather(1, ids[:, None]).all()


def test_tokens_come_as_often_as_they_should(on):
    """Chi-square, 7 degrees of freedom: above 29.9 once in 10,000 times; the seeds are fixed."""
    if on[1] == torch.float16:
        pytest.skip("the dtype plays no part in the draw")
    draws = 160
    logits = torch.full((1, 500), -9.0, dtype=on[1], device=on[0])
    likely = torch.arange(5, 500, 70, device=on[0])
    logits[0, likely] = torch.linspace(0, 2, len(likely), device=on[0]).to(on[1])
    temperature, min_p = torch.tensor([[0.8], [0.01]], device=on[0]).expand(2, draws).unbind()
    ids, _ = choose(logits.expand(draws, -1), temperature.contiguous(), torch.arange(draws, device=on[0]),
                    torch.full((draws,), 17, device=on[0]), min_p=min_p.contiguous())
    counts = (ids[:, None] == likely).sum(0)
    assert counts.sum() == draws
    wanted = draws * (logits[0, likely].float() / 0.8).softmax(0)
    assert ((counts - wanted) ** 2 / wanted).sum() < 29.9


def test_a_row_depends_on_its_own_logits_seed_and_step_alone(on, randn):
    """And what isn't finite is said; ids are ids in any case."""
    logits = randn(1, 600, on=on).repeat(5, 1)
    temperature, _, top_p, _ = columns([(1.0, 0, 0.95, 0.0)] * 5, on[0])
    seeds = torch.tensor([3, 4, 3, 3, 3], device=on[0]) + 2**40
    steps = torch.tensor([0, 0, 1, 0, 0], device=on[0])
    logits[3, 3], logits[4] = float("inf"), float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ids, finite = choose(logits, temperature, seeds, steps, top_p=top_p)
    assert len(set(ids[:3].tolist())) == 3
    assert finite.tolist() == [1, 1, 1, 0, 0] and (ids >= 0).all() and (ids < 600).all()
    alone, _ = choose(logits[1:2], temperature[1:2], seeds[1:2], steps[1:2], top_p=top_p[1:2])
    assert alone == ids[1]
    other, _ = choose(logits[:1], temperature[:1], seeds[:1] - 2**40, steps[:1], top_p=top_p[:1])
    assert other != ids[0]


def test_extremes_stay_finite(on):
    """The widest logits at the lowest temperature; rows that are longer than the vocabulary."""
    most = 65504.0 if on[1] == torch.float16 else torch.finfo(on[1]).max
    room = torch.full((2, 700), float("nan"), dtype=on[1], device=on[0])
    logits = room[:, :600]
    logits[:] = -most
    logits[0, 77], logits[1, 599] = most, most
    temperature, top_k, top_p, min_p = columns([(1e-4, 40, 0.999, 0.0), (0.0, 0, 0.5, 0.0)], on[0])
    seeds = torch.tensor([2**63 - 1, 0], device=on[0])
    out = torch.empty(2, dtype=torch.int64, device=on[0])
    with warnings.catch_warnings():  # a difference beyond float32 is minus infinity, on the host too
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)
        ids, finite = choose(logits, temperature, seeds, seeds, top_k, top_p, min_p, out=out)
    assert ids is out and ids.tolist() == [77, 599] and finite.all()


def test_sampling_refuses_wrong_shapes_and_dtypes():
    one = torch.zeros(2)
    for logits in (torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\[B, V\]"):
            argmax(logits)
    with pytest.raises(ValueError, match="out must be"):
        argmax(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="2 rows"):
        choose(torch.zeros(2, 3), torch.zeros(3), one, one)
    assert choose(torch.zeros(0, 3), one[:0], one[:0], one[:0])[0].shape == (0,)
    assert argmax(torch.zeros(0, 3))[1].shape == (0,)
