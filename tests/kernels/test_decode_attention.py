"""Decode attention: every coding against float64 over scattered pages; a sequence alone or among others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit_kernels.triton import decode_attention as module
from quantkit_kernels.triton.arrivals import counters
from quantkit_kernels.triton.cache import StepTokens
from quantkit_kernels.triton.decode_attention import FEW, PIECE, SplitResults, decode_attention

WAITING = [("channel4", "token4"), ("channel3", "token3"), ("channel2", "token2"), ("hadamard4", "hadamard4"),
           ("hadamard3", "hadamard3"), ("hadamard2", "hadamard2"), ("int8", "token4")]


def attend(cache, q, **how):
    return decode_attention(q, cache.pages, cache.tables, cache.step, cache.layer, scale=q.shape[-1]**-0.5,
                            **how)


def check(cache, q, obeys_the_rule, **how):
    got = attend(cache, q, **how)
    plain, exact = cache.expected(q, scale=q.shape[-1]**-0.5, **how)
    # a score is a sum of terms whose magnitudes add up to about 5, and so far it moves a number of size 1
    obeys_the_rule(got, plain, exact, 5 * torch.ones_like(exact))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("keys", "values"), [("plain", "plain"), ("int8", "int8"), ("fp8", "fp8"),
                                              ("int8", "token4"), ("fp8", "plain"), ("int8", "hadamard4")])
@pytest.mark.parametrize(("group", "d"), [(4, 64), (3, 96), (16, 32)])
def test_codes_of_single_tokens(on, randn, obeys_the_rule, paged_cache, keys, values, group, d):
    cache = paged_cache.PagedCache([[1, 130], [65, 64]], [1, 1], d, on, keys, values)
    check(cache, randn(2, 2 * group, d, seed=5, on=on), obeys_the_rule)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("d", [20, 128])
@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_other_head_dimensions(on, randn, obeys_the_rule, paged_cache, kind, d):
    cache = paged_cache.PagedCache([[3, 70]], [1], d, on, kind, kind)
    check(cache, randn(1, 16, d, seed=5, on=on), obeys_the_rule)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values"), WAITING)
@pytest.mark.parametrize(("residual_length", "first", "d"), [(0, 0, 64), (20, 64, 32)])
def test_vectors_that_wait(on, randn, obeys_the_rule, paged_cache, keys, values, residual_length, first, d):
    cache = paged_cache.PagedCache([[200, 63], [64, 150]], [1, 1], d, on, keys, values, residual_length,
                                   first)
    check(cache, randn(2, 4, d, seed=5, on=on), obeys_the_rule)


@pytest.mark.parametrize(("keys", "values"), [("channel4", "token4"), ("hadamard2", "hadamard3")])
def test_heads_that_no_power_of_two_divides(on, randn, obeys_the_rule, paged_cache, keys, values):
    cache = paged_cache.PagedCache([[140, 70]], [1], 96, on, keys, values, 5, 0)
    check(cache, randn(1, 6, 96, seed=5, on=on), obeys_the_rule)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("keys", "values", "residual_length"),
                         [("int8", "int8", None), ("channel4", "token4", 30)])
@pytest.mark.parametrize(("window", "limit", "sinks"), [(1, None, 0), (None, 40, 70),
                                                        (100, 30, 4), (2**33, 2**33, 2**33)])
def test_windows(on, randn, obeys_the_rule, paged_cache, placed, keys, values, residual_length, window, limit,
                 sinks):
    cache = paged_cache.PagedCache([[65, 65], [190, 190]], [1, 1], 32, on, keys, values, residual_length,
                                   0 if residual_length is None else 64, placed)
    check(cache, randn(2, 4, 32, seed=5, on=on), obeys_the_rule, window=window, limit=limit, sinks=sinks)


def test_a_window_reads_no_page_that_it_does_not_see(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[PIECE * 64 + 200] * 2], [1], 32, on)
    q = randn(1, 4, 32, seed=5, on=on)
    want = attend(cache, q, limit=70, sinks=3)
    table = cache.tables.pages[0, cache.layer].clone()
    cache.tables.pages[0, cache.layer, :, PIECE:PIECE + 2] = 2**30  # a read of it would fail, or be noticed
    assert torch.equal(attend(cache, q, limit=70, sinks=3), want)
    cache.tables.pages[0, cache.layer] = table


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8"])
def test_large_and_small_numbers(on, randn, obeys_the_rule, paged_cache, kind):
    """Scores that overflow without the maximum taken out; weights that vanish in float16 times a scale."""
    # a nearly equal pair of large scores decides each head's error: many heads, or it is luck
    cache = paged_cache.PagedCache([[100, 70]] * 4, [1] * 4, 64, on, kind, kind, value_size=2.0**-12)
    check(cache, randn(4, 32, 64, seed=5, on=on) * 10, obeys_the_rule)


@pytest.mark.parametrize("lengths", [[5, 3], [300, 70]])
def test_scores_of_no_key(on, randn, obeys_the_rule, paged_cache, lengths):
    """In one split and in several; below the keys' scores and above them."""
    cache = paged_cache.PagedCache([lengths], [1], 64, on, "int8", "int8")
    sinks = torch.tensor([-9.0, 0.0, 3.0, 40.0], device=on[0])
    check(cache, randn(1, 4, 64, seed=5, on=on), obeys_the_rule, sink_scores=sinks)


@pytest.mark.parametrize(("keys", "values", "heads", "d"),
                         [("plain", "plain", 6, 20), ("int8", "token4", 18, 64)])
def test_whoever_joins_splits_adds_them_in_the_same_order(on, randn, paged_cache, monkeypatch, keys, values,
                                                          heads, d):
    """The last program of a head, a few of its queries at a time, time after time; or another kernel."""
    cache = paged_cache.PagedCache([[FEW * PIECE * 64 - 2, 70], [9, PIECE * 64 + 3]], [1, 1], d, on, keys,
                                   values)
    q, sinks = randn(2, heads, d, seed=5, on=on), randn(heads, seed=6, on=(on[0], torch.float32))
    for how in ({"limit": 1700}, {"sink_scores": sinks}):
        joined = attend(cache, q, **how)
        with monkeypatch.context() as patch:
            patch.setattr(module, "FEW", 0)
            assert torch.equal(attend(cache, q, **how), joined)
    assert torch.equal(attend(cache, q, **how), joined) and not counters(q.device).any()


def test_scores_are_capped(on, randn, obeys_the_rule, paged_cache):
    cache = paged_cache.PagedCache([[100, 70]], [1], 64, on)
    check(cache, randn(1, 8, 64, seed=5, on=on) * 10, obeys_the_rule, softcap=3.0)


@pytest.mark.parametrize(("keys", "values", "residual_length"),
                         [("plain", "plain", None), ("channel4", "token4", 30)])
def test_several_tokens_of_a_sequence(on, randn, obeys_the_rule, paged_cache, keys, values, residual_length):
    cache = paged_cache.PagedCache([[100, 97]], [5], 32, on, keys, values, residual_length)
    check(cache, randn(5, 4, 32, seed=5, on=on), obeys_the_rule)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("keys", "values", "residual_length"),
                         [("plain", "plain", None), ("channel4", "token4", 30)])
def test_a_sequence_does_not_depend_on_the_others(on, randn, paged_cache, keys, values, residual_length):
    cache = paged_cache.PagedCache([[130, 64], [PIECE * 64 + 70, 300], [5, 9]], [1] * 3, 32, on, keys, values,
                                   residual_length)
    q = randn(3, 8, 32, seed=5, on=on)
    whole = attend(cache, q)
    for row, longest in ((0, 130), (2, 9)):
        alone = decode_attention(q[row:row + 1], cache.pages, cache.tables,
                                 StepTokens(cache.step.rows[row:row + 1], longest), cache.layer,
                                 scale=32**-0.5)
        assert torch.equal(alone[0], whole[row])
    order = torch.tensor([2, 0, 1])
    turned = decode_attention(q[order], cache.pages, cache.tables,
                              replace(cache.step, rows=cache.step.rows[order.to(on[0])]), cache.layer,
                              scale=32**-0.5)
    assert torch.equal(turned, whole[order])


def test_nobodys_tokens_and_empty_heads_get_zeros(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[70, 70], [0, 5]], [1, 1], 32, on)
    step = StepTokens(torch.tensor([[0, 0], [-1, 0], [1, 0]], dtype=torch.int32, device=on[0]), 600)
    q = randn(3, 4, 32, seed=5, on=on)
    out = decode_attention(q, cache.pages, cache.tables, step, cache.layer, scale=1.0)
    assert (out[1] == 0).all() and (out[2, :2] == 0).all() and (out[0] != 0).all() and (out[2, 2:] != 0).all()


def test_tokens_that_are_apart(on, randn, paged_cache):
    cache = paged_cache.PagedCache([[70, 70], [3, 5]], [1, 1], 32, on)
    wide = randn(2, 8, 32, seed=5, on=on)
    out, splits = torch.zeros_like(wide), SplitResults.of(wide[:, :4], 2, cache.step.longest)
    got = attend(cache, wide[:, :4], out=out[:, 2:6], splits=splits)
    assert torch.equal(got, attend(cache, wide[:, :4].contiguous())) and torch.equal(out[:, 2:6], got)
    assert (out[:, :2] == 0).all() and (out[:, 6:] == 0).all() and torch.isfinite(splits.m).all()


def test_decode_attention_refuses_arguments_that_do_not_match(randn, paged_cache):
    on = (torch.device("cpu"), torch.float32)
    cache, q = paged_cache.PagedCache([[3, 3]], [1], 32, on), randn(1, 4, 32, on=on)
    rest = (cache.pages, cache.tables, cache.step, cache.layer)
    for bad in (q[:, :3], q.half(), q.repeat(1, 16, 1), q.repeat(2, 1, 1), q[:, :, :16]):
        with pytest.raises(ValueError, match="don't match"):
            decode_attention(bad, *rest, scale=1.0)
    with pytest.raises(ValueError, match="don't match"):
        decode_attention(q, *rest[:3], 5, scale=1.0)
    with pytest.raises(ValueError, match="out"):
        decode_attention(q, *rest, scale=1.0, out=q[:, :2])
    turned = paged_cache.PagedCache([[3, 3]], [1], 32, on, "int8", "token4").pages
    with pytest.raises(ValueError, match="no kernel reads keys of kind token at 4 bits"):
        decode_attention(q, replace(turned, k=turned.v), *rest[1:], scale=1.0)
    with pytest.raises(ValueError, match="multiple of 4 and at most 256"):
        decode_attention(q[..., :18], *rest, scale=1.0)
