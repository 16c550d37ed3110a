"""Attention weights: against float64, with and without what a decode step left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.triton.attention_weights import attention_weights
from quantkit_kernels.triton.cache import SequenceTables, StepTokens
from quantkit_kernels.triton.decode_attention import PIECE, SplitResults, decode_attention

# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=10, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


def expected(cache, q, peaks=False, **how):
    """By torch in q's precision, exactly, and how much a relative error of a score's terms makes: the
    magnitudes of those, q's and k's products over √D, add up to about 5."""
    found = []
    for kind in (q.dtype, torch.float64):
        out = torch.zeros(len(q), cache.lengths.shape[1], cache.step.longest, dtype=torch.float64)
        for token in range(len(q)):
            for h in range(out.shape[1]):
                weights, _ = cache.weights(q.cpu().to(kind), token, h, scale=q.shape[-1]**-0.5, **how)
                if weights is not None:
                    weights = weights.double()
                    out[token, h, :weights.shape[1]] = weights.amax(0) if peaks else weights.mean(0)
        found.append(out.to(q.device))
    return found[0].float(), found[1], 5 * found[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("peaks", [False, True])
@pytest.mark.parametrize(("keys", "values", "residual_length", "first"), [
    ("plain", "plain", None, 0), ("int8", "fp8", None, 0), ("channel4", "token4", 10, 64),
    ("hadamard3", "hadamard3", 0, 0)])
def test_against_float64(on, randn, obeys_the_rule, paged_cache, peaks, keys, values, residual_length, first):
    cache = paged_cache.PagedCache([[170, 2], [150, 140]], [2, 3], 32, on, keys, values, residual_length,
                                   first)
    q = randn(5, 6, 32, seed=5, on=on)
    got = attention_weights(q, cache.pages, cache.tables, cache.step, cache.layer, scale=32**-0.5,
                            peaks=peaks)
    obeys_the_rule(got, *expected(cache, q, peaks))


@pytest.mark.sampled(2)
@given(lengths=st.lists(st.tuples(st.integers(3, 250), st.integers(3, 250)), min_size=1, max_size=2),
       coding=st.sampled_from([("plain", "plain", None), ("int8", "fp8", None), ("channel4", "token4", 10)]),
       d=st.sampled_from([32, 64, 96]), group=st.integers(1, 4), seed=st.integers(0, 99))
@DRAWN
def test_sequences_of_any_length(on, randn, obeys_the_rule, paged_cache, lengths, coding, d, group, seed):
    keys, values, residual_length = coding
    counts = [3] * len(lengths)
    lengths = [[*one] for one in lengths]
    cache = paged_cache.PagedCache(lengths, counts, d, on, keys, values, residual_length, seed=seed)
    q = randn(sum(counts), 2 * group, d, seed=seed, on=on)
    got = attention_weights(q, cache.pages, cache.tables, cache.step, cache.layer, scale=d**-0.5)
    obeys_the_rule(got, *expected(cache, q))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placed", [False, True])
def test_windows(on, randn, obeys_the_rule, paged_cache, placed):
    cache = paged_cache.PagedCache([[190, 190]], [3], 32, on, "channel4", "token4", 30, 64, placed)
    q, how = randn(3, 4, 32, seed=5, on=on), {"window": 100, "limit": 30, "sinks": 4, "softcap": 5.0}
    got = attention_weights(q, cache.pages, cache.tables, cache.step, cache.layer, scale=32**-0.5, **how)
    obeys_the_rule(got, *expected(cache, q, **how))


def test_what_a_decode_step_left(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[PIECE * 64 + 9, 90]], [1], 32, on)
    q = randn(1, 4, 32, seed=5, on=on)
    given = (q, cache.pages, cache.tables, cache.step, cache.layer)
    splits = SplitResults.of(q, 2, cache.step.longest)
    decode_attention(*given, scale=0.1, splits=splits)
    got = attention_weights(*given, scale=0.1, splits=splits)
    assert torch.equal(got, attention_weights(*given, scale=0.1))
    assert (got.sum(-1) - 1).abs().max() < 1e-3 and (got[0, 1, 90:] == 0).all()


def test_queries_of_an_earlier_step(on, randn, paged_cache):
    """Their places are before that of the next token."""
    cache = paged_cache.PagedCache([[90, 90]], [4], 32, on)
    q, tables = randn(4, 4, 32, seed=5, on=on), cache.tables
    how = {"scale": 0.1, "window": 50}
    want = attention_weights(q, cache.pages, tables, cache.step, cache.layer, **how)
    after = SequenceTables(tables.pages, tables.lengths + 4, tables.seen + 4)
    step = StepTokens(cache.step.rows - torch.tensor([0, 4], dtype=torch.int32, device=on[0]), 90)
    assert torch.equal(attention_weights(q, cache.pages, after, step, cache.layer, **how), want)


def test_nobody_gets_zeros(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[9, 9]], [1], 32, on)
    step = StepTokens(torch.tensor([[-1, 0]], dtype=torch.int32, device=on[0]), 9)
    got = attention_weights(randn(1, 4, 32, on=on), cache.pages, cache.tables, step, cache.layer, scale=1.0)
    assert got.shape == (1, 2, 9) and (got == 0).all()
