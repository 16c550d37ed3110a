"""Attention over pages inside a model: a policy that masks equals a mask, a codec costs what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.rope import apply_rope
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

LENGTH = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("read"), "qwen3", dtype="float32"))).model


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """Its own layers see 40 positions."""
    return load(str(tiny_model(tmp_path_factory.mktemp("sliding"), "mistral", dtype="float32", head_dim=32,
                               sliding_window=40))).model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, 300, (1, LENGTH), generator=torch.Generator().manual_seed(0))


class Masked:
    """Nothing is compressed or dropped: every query's softmax over all keys, most of them masked."""

    def __init__(self, limit, sinks):
        self._limit, self._sinks = limit, sinks

    def counts(self, shape, positions):
        return [shape[1]]

    def begin(self, counts):
        pass

    def end(self):
        pass

    def attend(self, layer, q, k, v, context, window, sinks=None):
        q, k = (apply_rope(x, *context.rope_tables(None)) for x in (q, k))
        at = context.positions[0]
        key, query = at[None], at[:, None]
        sees = (key <= query) & ((key > query - self._limit) | (key < self._sinks))
        if window is not None:
            sees &= key > query - window
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)


def run(model, ids, kv, cuts, prompt):
    """Logits ``[T, vocab]`` of the tokens fed in pieces that end at ``cuts``; decoding from ``prompt`` on."""
    cache = KVCache(model.config, parse_kv(kv), model.dtype)
    number, outs, start = cache.add(), [], 0
    for stop in sorted({*cuts, prompt, ids.shape[1]}):
        phase = "prefill" if stop < prompt else "prefill_end" if stop == prompt else "decode"
        batch = Batch(cache, [number], phase)
        with torch.inference_mode():
            outs.append(model(ids[:, start:stop], batch.next_positions(stop - start), batch)[0])
        start = stop
    return torch.cat(outs), cache


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.sampled_from([1, 2, 17, 64, 200]), sinks=st.sampled_from([0, 1, 5]),
       cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12), prompt=st.integers(1, LENGTH),
       own=st.booleans())
def test_a_window_is_a_mask_however_the_text_is_cut(model, sliding, ids, limit, sinks, cuts, prompt, own):
    one = sliding if own else model
    want = one(ids, torch.arange(LENGTH)[None], Masked(limit, sinks))[0]
    got, _ = run(one, ids, f"window({limit}, sinks={sinks})", cuts, prompt)
    assert torch.allclose(got, want, atol=2e-4, rtol=1e-4)


def test_a_window_is_a_mask_token_by_token(model, ids):
    want = model(ids, torch.arange(LENGTH)[None], Masked(20, 3))[0]
    got, cache = run(model, ids, "window(20, sinks=3)", range(1, LENGTH), 10)
    assert torch.allclose(got, want, atol=2e-4, rtol=1e-4)
    assert max(cache.slots(0)[0]) < 23 + 64


@pytest.mark.parametrize("prompt", [1, 100])
def test_keeping_all_is_the_model_itself(model, sliding, ids, prompt):
    for one in (model, sliding):
        got, _ = run(one, ids, "none", range(prompt, LENGTH), prompt)
        assert torch.allclose(got, one(ids)[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kv", ["int8", "int4(residual_length=0, sinks=0)",
                                "rotation(3, residual_length=20, sinks=0)", "bf16", "window(40)+int8"])
def test_decoding_step_by_step_reads_what_one_forced_piece_reads(model, ids, kv):
    steps, _ = run(model, ids, kv, range(100, LENGTH), 100)
    forced, _ = run(model, ids, kv, [], 100)
    plain, _ = run(model, ids, kv.rpartition("+")[0] or "none", [], 100)
    # a number on the edge between two codes may fall to either side; so means, not maxima
    apart, cost = (steps - forced).abs().mean(), (forced - plain).abs().mean()
    assert apart < (cost / 2 if kv == "bf16" else cost / 20), (apart, cost)


def test_the_cost_of_a_codec_falls_with_its_bits(model, ids):
    plain = model(ids)[0].log_softmax(-1)
    cost = [float((plain.exp() * (plain - run(model, ids, kv, [], 100)[0].log_softmax(-1))).sum(-1).mean())
            for kv in ("none", "int8", "int4(residual_length=0, sinks=0)",
                       "int2(residual_length=0, sinks=0)")]
    assert abs(cost[0]) < 1e-6 < cost[1] < 0.02 and 2 * cost[1] < cost[2] < cost[3] / 5 < 1


def test_heads_that_keep_different_positions_in_a_model_with_a_window(sliding, ids):
    """What a head kept and the model's own window are counted for each head by itself."""
    kv = "snapkv(25, window=4, kernel=1)"
    cache = KVCache(sliding.config, parse_kv(kv), sliding.dtype)
    number = cache.add()
    for start, stop, phase in ((0, 60, "prefill_end"), (60, 61, "decode"), (61, 75, "decode")):
        batch = Batch(cache, [number], phase)
        positions = batch.next_positions(stop - start)
        held = [cache.positions(number, layer).clone() for layer in range(2)]
        context = ForwardContext(sliding.config, positions, torch.float32)
        batch.begin([stop - start])
        for layer in range(2):
            random = torch.Generator().manual_seed(1000 * layer + start)
            q, k, v = (torch.randn(1, h, stop - start, 32, generator=random) for h in (4, 2, 2))
            own = cache._sequences[number].layers[layer]
            old = [cache.layers[layer].store.read(own, side) for side in "kv"] if start else []
            out = batch.attend(layer, q, k, v, context, 40)
            if phase != "decode":
                continue
            q, k = (apply_rope(x, *context.rope_tables(None)) for x in (q, k))
            for head in range(4):
                keys, values = (torch.cat((o[head // 2], n[0, head // 2])) for o, n in zip(old, (k, v)))
                key = torch.cat((held[layer][head // 2].long(), positions[0]))
                sees = (key <= positions[0][:, None]) & (key > positions[0][:, None] - 40)
                scores = (q[0, head] @ keys.T / 32**0.5).masked_fill(~sees, -torch.inf)
                assert torch.allclose(out[0, head], scores.softmax(-1) @ values, atol=1e-5), (layer, head)
        batch.end()
    assert not torch.equal(*cache.positions(number, 0)), "all heads kept the same: this test shows nothing"
