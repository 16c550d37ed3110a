"""What policies are told of queries, against its definition, however the text was cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.models.forward_context import ForwardContext
from quantkit.ops import hadamard
from quantkit.ops.rope import apply_rope

CUTS = st.lists(st.integers(1, 150), min_size=1, max_size=4)


LONG = {"model_type": "phi3", "hidden_size": 128, "pad_token_id": 0,
        "original_max_position_embeddings": 64, "max_position_embeddings": 1024, "rope_scaling": {
            "type": "longrope", "short_factor": [1 + 0.1 * i for i in range(16)],
            "long_factor": [2 + 0.5 * i for i in range(16)]}}
YARN = {"max_position_embeddings": 1024, "rope_scaling": {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}


def rotation_of(one, number, positions, dtype=torch.float32):
    """Of a sequence's positions, as long as it was announced to get."""
    held = one.cache._sequences[number].layers[0]
    return ForwardContext(one.config, positions, dtype, held).rope_tables(None)


def fed(one, number, cuts, answers=(), *, last="prefill_end"):
    """Feeds a prompt in these pieces, then an answer: of each layer rotated queries, keys, plain queries.
    ``last``: the phase of the last piece; at a prompt's end what nobody will ask for is forgotten."""
    found = [[torch.zeros(n, 0, one.dim) for n in (4, 2, 4)] for _ in range(one.layers)]
    steps = [(count, "prefill") for count in cuts[:-1]] + [(cuts[-1], last)]
    for count, phase in [*steps, *((count, "decode") for count in answers)]:
        for layer, (q, k, _, positions, _) in enumerate(one.feed([number], [count], phase)):
            cos, sin = rotation_of(one, number, positions, q.dtype)
            new = apply_rope(q, cos, sin)[0], apply_rope(k, cos, sin)[0], q[0]
            found[layer] = [torch.cat((old, x), 1) for old, x in zip(found[layer], new)]
    return found


def views(one, number):
    held = one.cache._sequences[number].layers
    return [one.cache.layers[layer].view(held[layer]) for layer in range(one.layers)]


def attention(q, k, sinks=None):
    """float64 ``[H, T, T]``."""
    scores = q.double() @ k.double().repeat_interleave(2, 0).mT / q.shape[-1]**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    share = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, share), -1).softmax(-1)[..., :-1]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS, answers=st.lists(st.integers(1, 9), max_size=8))
def test_sums_are_of_all_queries(feeder, cuts, answers):
    one = feeder("h2o(100000, interval=7)")
    number = one.cache.add()
    for (q, k, _), held in zip(fed(one, number, cuts, answers), views(one, number)):
        wanted = attention(q, k).sum(1).unflatten(0, (2, 2)).mean(1)
        assert torch.allclose(held.attention_received().double(), wanted, atol=1e-4)
        assert held.prompt == sum(cuts) and held.seen == sum(cuts) + sum(answers)


def test_sums_follow_what_stays(feeder):
    one = feeder("h2o(50, recent=0.4)")
    number = one.cache.add()
    for layer, (q, k, _) in enumerate(fed(one, number, [130, 70])):
        sums = attention(q, k).sum(1).unflatten(0, (2, 2)).mean(1)
        kept = one.cache.positions(number, layer).long()
        for head, row in enumerate(kept):
            assert row[-20:].tolist() == list(range(180, 200))
            assert sorted(sums[head, :180].topk(30).indices.tolist()) == row[:-20].tolist()
        held = one.cache._sequences[number].layers[layer].attention_received
        assert torch.allclose(held.double(), sums.gather(1, kept), atol=1e-4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS, size=st.integers(1, 70))
def test_weights_are_of_the_last_queries(feeder, cuts, size):
    one = feeder(f"snapkv(100000, window={size})")
    number = one.cache.add()
    for (q, k, _), held in zip(fed(one, number, cuts, last="prefill"), views(one, number)):
        wanted = attention(q, k)[:, -size:].mean(1).unflatten(0, (2, 2)).mean(1)
        assert torch.allclose(held.window_attention().double(), wanted, atol=1e-5)


@pytest.mark.parametrize("kv", ["h2o(100000, interval=7)", "snapkv(100000, window=9)"])
def test_a_models_sinks_take_their_share_of_the_attention(feeder, kv):
    one = feeder(kv)
    one.sinks, number = torch.tensor([2.0, -1.0, 4.0, 0.5]), one.cache.add()
    for (q, k, _), state in zip(fed(one, number, [70, 30], last="prefill"), views(one, number)):
        weights = attention(q, k, one.sinks)
        if "h2o" in kv:
            wanted, received = weights.sum(1), state.attention_received()
        else:
            wanted, received = weights[:, -9:].mean(1), state.window_attention()
        assert torch.allclose(received.double(), wanted.unflatten(0, (2, 2)).mean(1), atol=1e-4)


@pytest.mark.parametrize("codec", ["none", "rotation(4)"])
@pytest.mark.parametrize("cuts", [[5], [3, 60], [200, 1, 130]])
@pytest.mark.parametrize(("keys", "max_length"), [({}, 0), (YARN, 0), (LONG, 64), (LONG, 500)],
                         ids=["plain", "yarn", "longrope short", "longrope long"])
def test_queries_to_come_are_expected_to_be_like_those_that_came(feeder, codec, cuts, keys, max_length):
    one = feeder(f"expected(100000)+{codec}", **keys)
    number, total = one.cache.add(max_length), sum(cuts)
    assert (one.config.rope.attention_factor != 1) == bool(keys), "or vectors keep their lengths"
    for (_, _, plain), held in zip(fed(one, number, cuts, last="prefill"), views(one, number)):
        mean, covariance = held.future_queries(20)
        some = plain[:, 4:].double() / one.dim**0.5  # without the first, which are like no other
        at = torch.arange(total, total + 20)[None]
        cos, sin = (wave.double() for wave in rotation_of(one, number, at))
        turn = torch.stack([apply_rope(torch.eye(one.dim, dtype=torch.float64)[None, None, [i]].expand(
            1, 1, 20, -1), cos, sin)[0, 0].mean(0) for i in range(one.dim)])  # row i: what e_i becomes
        centered = some - some.mean(1, keepdim=True)
        wanted = some.mean(1) @ turn, turn.mT @ (centered.mT @ centered / some.shape[1]) @ turn
        if codec != "none":
            mixed = hadamard.apply_hadamard(torch.eye(one.dim)).double()
            wanted = wanted[0] @ mixed, mixed.mT @ wanted[1] @ mixed
        assert torch.allclose(mean.double(), wanted[0], atol=1e-5)
        assert torch.allclose(covariance.double(), wanted[1], atol=1e-5)


def test_nothing_is_kept_of_queries_that_nobody_will_ask(feeder):
    for kv, phases in (("all", ()), ("window(8)", ()), ("snapkv(20)", ("prefill",)),
                       ("h2o(20)", ("prefill", "decode")), ("expected(20)", ("prefill",))):
        one = feeder(kv)
        number = one.cache.add()
        for count, phase in ((30, "prefill"), (30, "prefill_end"), (1, "decode")):
            one.feed([number], [count], phase)
            listens = phase in phases or (phase == "prefill_end" and "decode" in phases)
            assert (one.cache._sequences[number].query_window is not None) == listens, (kv, phase)
            assert one.cache._sequences[number].tracked_bytes > 0 or not listens
        assert one.cache._sequences[number].tracked_bytes == 0 or "decode" in phases
        pages = sum(pool.used * pool.page_bytes for pool in one.cache.pools)
        assert one.cache.used_bytes - pages == one.cache._sequences[number].tracked_bytes
        one.cache.free([number])
        assert one.cache.used_bytes == 0
