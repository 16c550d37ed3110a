"""Prefill attention: against float64, and the same bits however a prompt is cut."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.cache import SequenceTables, StepTokens
from quantkit_kernels.triton.prefill_attention import ROWS, prefill_attention, tiles_of, tokens


def tiles(cache, group):
    found = tiles_of(range(len(cache.counts)), cache.counts, group)
    return torch.tensor(found, dtype=torch.int32).view(-1, 3).to(cache.on[0])


def attend(cache, q, **how):
    group = q.shape[1] // cache.lengths.shape[1]
    return prefill_attention(q, cache.pages, cache.tables, cache.step, cache.layer, tiles(cache, group),
                             scale=q.shape[-1]**-0.5, **how)


CASES = [("plain", "plain", None, 0), ("int8", "int8", None, 0), ("fp8", "token4", None, 0),
         ("channel4", "token4", 10, 0), ("hadamard4", "hadamard4", 0, 64), ("channel3", "token2", 64, 0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values", "residual_length", "first"), CASES)
@pytest.mark.parametrize(("group", "d"), [(4, 32), (3, 96)])
def test_against_float64(on, randn, obeys_the_rule, paged_cache, keys, values, residual_length, first, group,
                         d):
    cache = paged_cache.PagedCache([[170, 150], [9, 40]], [100, 9], d, on, keys, values, residual_length,
                                   first)
    q = randn(109, 2 * group, d, seed=5, on=on)
    plain, exact = cache.expected(q, scale=d**-0.5)
    # a score is a sum of terms whose magnitudes add up to about 5, and so far it moves a number of size 1
    obeys_the_rule(attend(cache, q), plain, exact, 5 * torch.ones_like(exact))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("keys", "values", "residual_length"),
                         [("int8", "int8", None), ("channel4", "token4", 30)])
@pytest.mark.parametrize(("window", "limit", "sinks"), [(20, None, 0), (None, 40, 70), (100, 30, 4)])
def test_windows(on, randn, obeys_the_rule, paged_cache, placed, keys, values, residual_length, window, limit,
                 sinks):
    cache = paged_cache.PagedCache([[190, 190]], [70], 32, on, keys, values, residual_length,
                                   0 if residual_length is None else 64, placed)
    q = randn(70, 4, 32, seed=5, on=on)
    how = {"window": window, "limit": limit, "sinks": sinks}
    obeys_the_rule(attend(cache, q, **how), *cache.expected(q, scale=32**-0.5, **how))


def test_scores_of_no_key(on, randn, obeys_the_rule, paged_cache):
    cache = paged_cache.PagedCache([[130, 70]], [30], 32, on, "int8", "int8")
    sinks = torch.tensor([-9.0, 0.0, 3.0, 40.0], device=on[0])
    q = randn(30, 4, 32, seed=5, on=on)
    obeys_the_rule(attend(cache, q, sink_scores=sinks),
                   *cache.expected(q, scale=32**-0.5, sink_scores=sinks))


def test_scores_are_capped(on, randn, obeys_the_rule, paged_cache):
    cache = paged_cache.PagedCache([[90, 70]], [30], 32, on)
    q = randn(30, 4, 32, seed=5, on=on) * 10
    # a capped score is a difference of numbers as large as the cap
    obeys_the_rule(attend(cache, q, softcap=3.0), *cache.expected(q, scale=32**-0.5, softcap=3.0),
                   terms=torch.tensor(3.0 * q.numel()**0.5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values", "residual_length", "first"), CASES[:1] + CASES[3:5])
def test_where_a_prompt_is_cut_makes_no_difference(on, randn, paged_cache, keys, values, residual_length,
                                                   first):
    cache = paged_cache.PagedCache([[150, 140]], [140], 32, on, keys, values, residual_length, first)
    q = randn(140, 4, 32, seed=5, on=on)
    whole = attend(cache, q)
    how = {"scale": 32**-0.5}
    small = [(at, min(7, 140 - at), 0) for at in range(0, 140, 7)]
    cut = prefill_attention(q, cache.pages, cache.tables, cache.step, cache.layer,
                            torch.tensor(small, dtype=torch.int32).to(on[0]), **how)
    assert torch.equal(cut, whole)
    # the rest of the prompt as a step of its own: what the first 45 left is before it
    tables = cache.tables
    later = SequenceTables(tables.pages, tables.lengths + 45, tables.seen + 45, tables.residual,
                           tables.starts, tables.residual_length, tables.first)
    rows = torch.tensor([[0, at] for at in range(95)], dtype=torch.int32).to(on[0])
    rest = prefill_attention(q[45:], cache.pages, later, StepTokens(rows, 150), cache.layer,
                             torch.tensor(tiles_of([0], [95], 2), dtype=torch.int32).to(on[0]), **how)
    assert torch.equal(rest, whole[45:])


def test_nobodys_tiles_get_zeros_and_empty_ones_nothing(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[70, 70]], [3], 32, on)
    q = randn(6, 4, 32, seed=5, on=on)
    step = StepTokens(torch.tensor([[0, 0], [0, 1], [0, 2], [-1, 0], [-1, 0], [-1, 0]], dtype=torch.int32,
                                   device=on[0]), 70)
    out = torch.full_like(q, 7)
    prefill_attention(q, cache.pages, cache.tables, step, cache.layer,
                      torch.tensor([[0, 3, 0], [3, 2, -1], [0, 0, 0]], dtype=torch.int32, device=on[0]),
                      scale=1.0, out=out)
    assert (out[:3] != 7).all() and (out[3:5] == 0).all() and (out[5] == 7).all()


def test_tiles():
    assert tokens(1) == ROWS and tokens(3) == tokens(4) == ROWS // 4
    assert tiles_of([4, 2, 3], [33, 0, 5], 4) == [(0, 32, 4), (32, 1, 4), (33, 5, 3)]


def test_prefill_attention_refuses_arguments_that_do_not_match(randn, paged_cache):
    on = (torch.device("cpu"), torch.float32)
    cache, q = paged_cache.PagedCache([[3, 3]], [1], 32, on), randn(1, 4, 32, on=on)
    rest = (cache.pages, cache.tables, cache.step, cache.layer)
    for bad in (torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="tiles"):
            prefill_attention(q, *rest, bad, scale=1.0)
    with pytest.raises(ValueError, match="don't match"):
        prefill_attention(q[:, :3], *rest, tiles(cache, 2), scale=1.0)
