"""The cache against a plain one: lists of vectors, attention written out, policies by their definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.kv.batch import Batch
from quantkit.kv.build import build_kv_codecs
from quantkit.kv.cache import KVCache
from quantkit.kv.page_pool import PAGE
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.rope import apply_rope
from quantkit.support.errors import UsageError

POLICIES = ("all", "window(8)", "window(5, sinks=0)", "window(1, sinks=0)", "window(70, sinks=3)",
            "snapkv(0.5, window=6)", "snapkv(10, window=4, kernel=3)", "snapkv(3, window=8)",
            "tova(9, interval=5)", "tova(2, interval=1)", "tova(66, interval=7)")
CODECS = ("none", "bf16", "int8", "fp8")


class Plain:
    """One sequence in one layer; every vector went through the codec by itself. float64."""

    def __init__(self, spec):
        self.spec, self.codec = spec, build_kv_codecs(spec).keys
        self.positions = torch.zeros(2, 0, dtype=torch.int64)
        self.k = self.v = torch.zeros(2, 0, 32, dtype=torch.float64)
        self.queries = torch.zeros(4, 0, 32, dtype=torch.float64)
        self.seen = self.steps = 0

    def stored(self, x):
        return torch.stack([torch.stack([self.codec.decode(self.codec.encode(token)) for token in head])
                            for head in x]).double()

    def feed(self, q, k, v, window):
        """Rotated ``[H, n, D]`` → ``[H, n, D]``."""
        count = q.shape[1]
        new = torch.arange(self.seen, self.seen + count)
        self.positions = torch.cat((self.positions, new.expand(2, -1)), 1)
        self.k, self.v = torch.cat((self.k, self.stored(k)), 1), torch.cat((self.v, self.stored(v)), 1)
        self.queries = torch.cat((self.queries, q.double()), 1)
        self.seen += count
        weights = self.weights(q.double(), new, window)
        if self.spec.policy == "window":
            weights = self.weights(q.double(), new, window, self.spec.options["budget"],
                                   self.spec.options.get("sinks", 4))
        return torch.einsum("hqs,hsd->hqd", weights, self.v.repeat_interleave(2, 0))

    def weights(self, q, at, window=None, limit=None, sinks=0):
        """``[H, n, S]``."""
        scores = torch.einsum("hqd,hsd->hqs", q, self.k.repeat_interleave(2, 0)) / 32**0.5
        key, query = self.positions.repeat_interleave(2, 0)[:, None], at[None, :, None]
        sees = key <= query
        if window is not None:
            sees = sees & (key > query - window)
        if limit is not None:
            sees = sees & ((key > query - limit) | (key < sinks))
        return scores.masked_fill(~sees, -torch.inf).softmax(-1)

    def end(self, phase, count, chosen):
        """The policy acts. ``chosen``: positions that the cache kept, followed where scores are as good
        as equal and only then."""
        options = {"window": {"sinks": 4}, "snapkv": {"window": 32, "kernel": 5}, "tova": {"interval": 32},
                   "all": {}}[self.spec.policy] | self.spec.options
        before, self.steps = self.steps, self.steps + (count if phase == "decode" else 0)
        total = self.positions.shape[1]
        if self.spec.policy == "window":
            if phase != "decode" or self.steps // 64 > before // 64:
                stays = (self.positions < options["sinks"]) | (self.positions > self.seen - options["budget"])
                self.keep([row.nonzero()[:, 0] for row in stays])
        elif self.spec.policy == "snapkv" and phase == "prefill_end":
            budget = options["budget"]
            kept = max(1, int(total * budget)) if budget < 1 else int(budget)
            if kept >= total:
                return
            residual_length = min(options["window"], kept)
            asked = self.queries[:, -options["window"]:]
            full = self.weights(asked, torch.arange(self.seen - asked.shape[1], self.seen))
            earlier = full.mean(1).view(2, 2, total).mean(1)[:, :total - residual_length]
            half = options["kernel"] // 2
            padded = F.pad(earlier, (half, half))
            scores = torch.stack([padded[:, i:i + options["kernel"]].sum(1) / options["kernel"]
                                  for i in range(total - residual_length)], 1)
            self.choose(scores, kept, residual_length, chosen)
        elif self.spec.policy == "tova" and (phase == "prefill_end" or (
                phase == "decode" and self.steps // options["interval"] > before // options["interval"])):
            if total <= options["budget"]:
                return
            full = self.weights(self.queries[:, -1:], torch.tensor([self.seen - 1]))
            scores = full[:, 0].mean(0)[:-1].expand(2, -1)
            self.choose(scores, options["budget"], 1, chosen)

    def choose(self, scores, kept, newest, chosen):
        total, rows = self.positions.shape[1], []
        assert chosen.shape == (2, kept)
        for head in range(2):
            place = {int(p): i for i, p in enumerate(self.positions[head])}
            slots = torch.tensor([place[int(p)] for p in chosen[head]])
            assert slots[kept - newest:].tolist() == list(range(total - newest, total)), "the last stay"
            best, picked = scores[head].topk(kept - newest).values, scores[head][slots[:kept - newest]]
            assert torch.allclose(best.sort().values, picked.sort().values, atol=1e-6), "not the best scores"
            rows.append(slots)
        self.keep(rows)

    def keep(self, rows):
        for name in ("positions", "k", "v"):
            setattr(self, name, torch.stack([getattr(self, name)[h, row] for h, row in enumerate(rows)]))


class Pair:
    """A cache and plain ones that are fed the same."""

    def __init__(self, feeder, kv, window=None):
        self.feeder, self.cache, self.window = feeder, feeder.cache, window
        self.plain = {}
        self.coarse = "bf16" in kv

    def add(self):
        number = self.cache.add()
        self.plain[number] = [Plain(self.cache.spec) for _ in range(self.feeder.layers)]
        return number

    def free(self, ids):
        self.cache.free(ids)
        for number in ids:
            del self.plain[number]

    def feed(self, ids, counts, phase):
        done = self.feeder.feed(ids, counts, phase, window=self.window)
        for layer, (q, k, v, positions, out) in enumerate(done):
            context = ForwardContext(self.feeder.config, positions, q.dtype)
            q, k = (apply_rope(x, *context.rope_tables(None)) for x in (q, k))
            assert torch.isfinite(out).all()
            for row, (number, count) in enumerate(zip(ids, counts)):
                one = self.plain[number][layer]
                if count:
                    want = one.feed(*(x[row, :, :count] for x in (q, k, v)), self.window)
                    got = out[row, :, :count].double()
                    assert torch.allclose(got, want, atol=0.05 if self.coarse else 2e-5), (layer, number)
                    one.end(phase, count, self.cache.positions(number, layer))
        self.check()

    def check(self):
        for layer, pages in enumerate(layer.store.pages for layer in self.cache.layers):
            used = 0
            for number, layers in self.plain.items():
                assert torch.equal(self.cache.positions(number, layer).long(), layers[layer].positions)
                held = layers[layer].positions.shape[1]
                assert self.cache.slots(number)[layer] == (held, held)
                assert self.cache.seen(number) == layers[layer].seen
                used += 2 * -(-held // PAGE)
            assert pages.used == used, "pages that nobody needs, or two that share one"
            assert 4 * (pages.allocated_bytes - used * pages.page_bytes) <= pages.allocated_bytes
        assert self.cache.allocated_bytes == sum(
            part.nbytes for pages in self.cache.pools for part in pages.parts.values()) + sum(
            one.tracked_bytes for one in self.cache._sequences.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("codec", CODECS)
def test_sequences_come_and_go_under_any_policy(feeder, codec, window):
    @settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(POLICIES), st.integers(0, 2**16), st.data())
    def holds(policy, seed, data):
        kv = f"{policy}+{codec}"
        pair, phases = Pair(feeder(kv, seed=seed), kv, window), {}
        for _ in range(data.draw(st.integers(1, 12))):
            what = data.draw(st.sampled_from(["add", *["prompt"] * 2, *["decode"] * 3, "free"]))
            if what == "add" or not phases:
                phases[pair.add()] = "prefill"
            elif what == "free":
                gone = data.draw(st.lists(st.sampled_from(sorted(phases)), unique=True, max_size=2))
                pair.free(gone)
                for number in gone:
                    del phases[number]
                pair.check()
            else:
                wanted = [n for n in phases if (phases[n] == "decode") == (what == "decode")]
                if not wanted:
                    continue
                ids = data.draw(st.permutations(wanted))[:3]
                most = 12 if what == "decode" else 150
                counts = [data.draw(st.integers(0 if i else 1, most)) for i in range(len(ids))]
                phase = what
                if what == "prompt":
                    # a prompt that ends without a token doesn't exist
                    end = data.draw(st.booleans()) and all(counts)
                    phase = "prefill_end" if end else "prefill"
                    for number in ids if end else ():
                        phases[number] = "decode"
                pair.feed(ids, counts, phase)
        pair.free(list(phases))
        assert pair.cache.allocated_bytes == pair.cache.used_bytes == 0

    holds()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["window(8)", "snapkv(0.1, window=4)", "tova(8, interval=4)"])
@pytest.mark.parametrize("codec", CODECS)
def test_pages_move_under_other_sequences(feeder, codec, policy, monkeypatch):
    """One long sequence is dropped from below three others, which read the same as before."""
    from quantkit.kv.page_pool import PagePool

    moves, shrink = [], PagePool.shrink
    monkeypatch.setattr(PagePool, "shrink", lambda self: (moves.append(moved := shrink(self)), moved)[1])
    pair = Pair(feeder(f"{policy}+{codec}"), codec)
    first, *others = [pair.add() for _ in range(4)]
    pair.feed([first], [400], "prefill")
    for number in others:
        pair.feed([number], [70], "prefill")
    before = pair.cache.allocated_bytes
    pair.feed([first], [30], "prefill_end")
    pair.feed(others, [3, 2, 1], "prefill_end")
    pair.feed([first, *others], [1, 1, 1, 1], "decode")
    pair.free([first])
    pair.check()
    pair.feed(others, [1, 1, 1], "decode")
    assert any(moves), "no page ever moved: this test shows nothing"
    assert pair.cache.allocated_bytes < before


def test_the_heads_of_snapkv_keep_different_positions(feeder):
    one = feeder("snapkv(20, window=4, kernel=1)")
    number = one.cache.add()
    one.feed([number], [100], "prefill_end")
    for layer in range(one.layers):
        first, second = one.cache.positions(number, layer).tolist()
        assert first != second and first[-4:] == second[-4:] == [96, 97, 98, 99]
        assert first == sorted(set(first))


def test_snapkv_asks_nothing_of_decoding_and_keeps_no_queries_for_it(feeder):
    one = feeder("snapkv(20)")
    number = one.cache.add()
    one.feed([number], [100], "prefill_end")
    one.feed([number], [1], "decode")
    assert one.cache._sequences[number].tracked_bytes == 0
    one.feed([number], [50], "prefill_end")
    assert set(one.cache.slots(number)) == {(20, 20)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [p for p in POLICIES if not p.startswith("snapkv")])
@pytest.mark.parametrize("codec", CODECS)
def test_chunks_make_no_difference_to_what_is_held(feeder, codec, policy):
    """Prompt and answer in one piece, in pieces, and token by token: the same codes, and the same
    results within float32's rounding. (Only a policy that looks acts at the same places: snapkv's and
    tova's actions follow the phases, so those are cut alike.)"""
    kv, results = f"{policy}+{codec}", []
    cuts = ([90, 10], [33, 33, 24, 1, 1, 1, 7], [90] + [1] * 10)
    if policy.startswith("tova"):
        cuts = ([90], [33, 33, 24], [1] * 90)
    drawn = None
    for cut in cuts:
        one = feeder(kv)
        drawn = drawn or [one.draw(1, 100) for _ in range(one.layers)]
        number, outs, start = one.cache.add(), [], 0
        for count in cut:
            stop = start + count
            phase = "prefill" if stop < 90 else "prefill_end" if stop == 90 else "decode"
            part = [[x[:, :, start:stop] for x in layer] for layer in drawn]
            outs.append(torch.stack([out for *_, out in one.feed([number], [count], phase, drawn=part)]))
            start = stop
        results.append((torch.cat(outs, 3), [one.cache.positions(number, i) for i in range(one.layers)],
                        [one.cache.layers[i].store.read(one.cache._sequences[number].layers[i], side)
                         for i in range(one.layers) for side in "kv"]))
    first = results[0]
    for other in results[1:]:
        assert torch.allclose(first[0], other[0], atol=2e-2 if codec == "bf16" else 1e-5)
        for mine, its in zip(first[1] + first[2], other[1] + other[2]):
            assert torch.equal(mine, its)


def test_positions_must_follow(feeder):
    one = feeder()
    number = one.cache.add()
    one.feed([number], [3])
    for positions, said in (([[0]], "follow"), ([[4]], "follow"), ([[-1, 3]], "padding"),
                            ([[3, -1, 4]], "padding"), ([[3], [3]], "2 rows for 1 sequences")):
        positions = torch.tensor(positions)
        with pytest.raises(ValueError, match=said):
            Batch(one.cache, [number]).counts(positions.shape, positions)
    assert one.cache.seen(number) == 3


def test_a_row_of_padding_adds_nothing(feeder):
    one = feeder("window(4)+int8")
    ids = [one.cache.add(), one.cache.add()]
    one.feed(ids, [3, 0])
    one.feed(ids, [0, 0])
    assert (one.cache.seen(ids[0]), one.cache.seen(ids[1])) == (3, 0)
    assert one.cache.slots(ids[1]) == [(0, 0)] * 2
    done = one.feed(ids, [0, 2])
    assert all(not out[0].any() for *_, out in done)


def test_ids_are_never_used_again(feeder):
    cache = feeder().cache
    first = cache.add()
    cache.free([first])
    assert cache.add() != first
    for call in (lambda: cache.free([first]), lambda: Batch(cache, [first]), lambda: cache.seen(first)):
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize("dim", [6, 16, 80])
def test_head_dimensions_that_do_not_fit_int4_fit_the_others(feeder, dim):
    with pytest.raises(UsageError, match="int4"):
        feeder("int4", dim=dim)
    for kv in ("none", "bf16", "window(5)+int8", "snapkv(4)"):
        one = feeder(kv, dim=dim)
        number = one.cache.add()
        for phase in ("prefill_end", "decode"):
            assert all(torch.isfinite(out).all() for *_, out in one.feed([number], [9], phase))


def test_a_cache_without_a_setting_keeps_everything(feeder):
    one = feeder()
    assert str(KVCache(one.config).spec) == "none" == str(one.cache.spec)
    assert KVCache(one.config).allocated_bytes == 0


def test_values_that_were_dropped_are_not_read(feeder):
    """An enormous value in a position that the window left behind changes nothing."""
    outs = []
    for size in (1.0, 1e6):
        one = feeder("window(4, sinks=1)")
        drawn = [one.draw(1, 30) for _ in range(one.layers)]
        for _, _, v in drawn:
            v[:, :, 1:20] *= size
        number = one.cache.add()
        one.feed([number], [25], drawn=[[x[:, :, :25] for x in layer] for layer in drawn])
        outs.append(torch.stack([out for *_, out in one.feed(
            [number], [5], "decode", drawn=[[x[:, :, 25:] for x in layer] for layer in drawn])]))
    assert torch.equal(*outs)


def test_the_plain_cache_can_tell_a_wrong_one(feeder, monkeypatch):
    """If a policy kept one position too few, these tests would say so."""
    from quantkit.kv.policies.window import WindowPolicy

    keep = WindowPolicy.keep
    monkeypatch.setattr(WindowPolicy, "keep",
                        lambda self, held: kept[:, 1:] if (kept := keep(self, held)) is not None else None)
    pair = Pair(feeder("window(8)"), "none")
    number = pair.add()
    with pytest.raises(AssertionError):
        pair.feed([number], [30], "prefill")


def test_rows_of_a_step_may_stand_in_any_order(feeder):
    """The same three sequences, as rows 0 1 2 and 2 0 1, give the same rows."""
    outs = []
    for order in ([0, 1, 2], [2, 0, 1]):
        one = feeder("int8")
        drawn = [one.draw(3, 20) for _ in range(one.layers)]
        ids = [one.cache.add() for _ in range(3)]
        counts = [20, 7, 13]
        done = one.feed([ids[i] for i in order], [counts[i] for i in order],
                        drawn=[[x[order] for x in layer] for layer in drawn])
        outs.append([[out[order.index(i)] for i in range(3)] for *_, out in done])
    for first, second in zip(*outs):
        for a, b in zip(first, second):
            assert torch.equal(a, b)
