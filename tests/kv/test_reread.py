"""A prompt that comes again: what is looked at, and that nothing else of the sequence changes."""

from __future__ import annotations

import pytest
import torch

from quantkit.evaluation.quality.feed import prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.reread import finish_prompt
from quantkit.kv.spec import parse_kv
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.rope import apply_rope
from quantkit.runtime.loader import load
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(tiny_model(tmp_path_factory.mktemp("reread") / "m", head_dim=32)), dtype="float32")


def ids(count, seed=0):
    return torch.randint(4, 250, (1, count), generator=torch.Generator().manual_seed(seed))


def run(model, kv, tokens, cuts, dtype=torch.float32, config=None):
    cache = KVCache(config or model.config, parse_kv(kv), dtype)
    number, start = cache.add(), 0
    for count in cuts:
        start += count
        phase = "prefill" if start < tokens.shape[1] else "prefill_end"
        batch = Batch(cache, [number], phase, defers=True)
        out = model(tokens[:, start - count:start], batch.next_positions(count), batch)
    for _ in finish_prompt(model, batch, tokens[0].tolist()):
        pass
    return cache, number, out


class Watcher:
    """A cache that keeps all of a text's attention; ``attend`` as in a model without a cache."""

    def __init__(self, config):
        self.config, self.weights, self.seen, self.keys, self.values = config, {}, 0, {}, {}

    def attend(self, layer, q, k, v, context: ForwardContext, window, sinks=None):
        cos, sin = context.rope_tables(window)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        scores = q[0].double() @ k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0).mT
        scores = scores / q.shape[-1]**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        self.weights[layer] = weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v[0].double().repeat_interleave(q.shape[1] // v.shape[1], 0))[None].to(q.dtype)

    def counts(self, shape, positions):
        return [shape[1]]

    def begin(self, counts):
        pass

    def end(self):
        pass


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [[150], [100, 1, 49]])
@pytest.mark.parametrize("piece", [64, 2048])
def test_what_stays_was_looked_at_most_once(loaded, cuts, piece):
    tokens, count = ids(150), 150
    cache, number, _ = run(loaded.model, f"kvzip(0.4, chunk={piece})", tokens, cuts)
    heads, groups = loaded.config.num_kv_heads, loaded.config.num_heads // loaded.config.num_kv_heads
    peaks = [torch.zeros(heads, count, dtype=torch.float64) for _ in range(loaded.config.num_layers)]
    for begin in range(0, count, piece):
        lead = max(0, begin - 8)
        both = torch.cat((tokens, tokens[:, lead:begin + piece]), 1)
        watcher = Watcher(loaded.config)
        loaded.model(both, torch.arange(both.shape[1])[None], watcher)
        for layer, seen in watcher.weights.items():
            found = seen[:, count:, :count].amax(1).unflatten(0, (heads, groups)).amax(1)
            peaks[layer] = torch.maximum(peaks[layer], found)
    for layer, scores in enumerate(peaks):
        rows = cache.positions(number, layer).tolist()
        kept = [(head, at) for head, row in enumerate(rows) for at in row if at >= 0]
        assert len(kept) == heads * int(count * 0.4)
        assert all((head, at) in kept for head in range(heads) for at in range(4))
        for head, row in enumerate(rows):  # each head's part is the best of its own
            mine = [at for at in row if at >= 4]
            others = [at for at in range(4, count) if at not in mine]
            assert min(scores[head, at] for at in mine) >= max(scores[head, at] for at in others) - 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("kv", ["kvzip(1000)", "kvzip(0.5)", "kvzip(90)+int8", "kvzip(150)+int4"])
def test_the_sequence_goes_on_as_if_nothing_had_come_again(loaded, kv):
    tokens = ids(200, seed=2)
    cache, number, out = run(loaded.model, kv, tokens, [130, 70])
    plain, other, expected = run(loaded.model, "all" + kv[kv.index(")") + 1:], tokens, [130, 70])
    assert torch.equal(out, expected)
    assert cache.seen(number) == 200
    pages = sum(store.pages.used * store.pages.page_bytes
                for store in [layer.store for layer in cache.layers])
    if kv == "kvzip(1000)":
        assert cache.slots(number) == plain.slots(other)
    if "+int4" not in kv:
        assert cache.used_bytes == pages, "a fork is left, or what was looked at"
    batch = Batch(cache, [number], "decode")
    assert torch.isfinite(loaded.model(ids(1), batch.next_positions(), batch)).all()
    cache.free([number])
    assert cache.allocated_bytes == 0


@torch.inference_mode()
def test_several_prompts_in_one_cache(loaded):
    """Each is looked at by itself."""
    tokens = torch.cat((ids(120, seed=3), ids(120, seed=4)))
    cache = KVCache(loaded.config, parse_kv("kvzip(0.5)"), torch.float32)
    rows = [cache.add(), cache.add()]
    for row, some in zip(rows, tokens.tolist()):
        prefill(loaded, cache, row, some)
    for row, some in zip(rows, tokens):
        alone, number, _ = run(loaded.model, "kvzip(0.5)", some[None], [120])
        for layer in range(loaded.config.num_layers):
            assert torch.equal(cache.positions(row, layer), alone.positions(number, layer))


@torch.inference_mode()
def test_by_kernels_too(tmp_path):
    one = load(str(tiny_model(tmp_path / "m", head_dim=32)))
    tokens, found = ids(400, seed=5), []
    for model in (one.model, one.model._model):
        cache, number, _ = run(model, "kvzip(0.3)+int8", tokens, [200, 200], one.dtype, one.config)
        found.append([set(map(tuple, (cache.positions(number, layer) >= 0).nonzero().tolist()))
                      for layer in range(one.config.num_layers)])
    for mine, its in zip(*found):
        assert len(mine & its) > 0.85 * len(mine | its)


@torch.inference_mode()
def test_a_failure_leaves_nothing_behind(loaded, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr("quantkit.kv.attention_scores.AttentionScores.accumulate", fail)
    cache = KVCache(loaded.config, parse_kv("kvzip(0.5)"), torch.float32)
    number = cache.add()
    with pytest.raises(MemoryError):
        prefill(loaded, cache, number, ids(100)[0].tolist())
    cache.free([number])
    assert cache.used_bytes == cache.allocated_bytes == 0


@torch.inference_mode()
def test_it_comes_again_within_the_models_context(loaded):
    """512 positions: a prompt of 400 is fed in pieces of 104, one of 450 is refused."""
    cache, number, _ = run(loaded.model, "kvzip(0.5)", ids(400), [400])
    assert sum(cache.slots(number)[0]) == 2 * 200
    with pytest.raises(UsageError, match="too long for 'kvzip'"):
        run(loaded.model, "kvzip(0.5)", ids(450), [450])
