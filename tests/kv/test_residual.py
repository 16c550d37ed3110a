"""Codecs that encode 64 tokens at a time, against lists of vectors: what each query reads, to the slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.kv.page_pool import PAGE
from quantkit.models.forward_context import ForwardContext
from quantkit.ops import hadamard
from quantkit.ops.rope import apply_rope

CODECS = ("int4", "int3(residual_length=0, sinks=0)", "int2(residual_length=100, sinks=70)",
          "int8(residual_length=64)", "int8/int4", "rotation", "rotation(2.5, residual_length=10)",
          "int4(residual_length=5)/rotation(2, sinks=0)", "fp8(sinks=1)")


class Lists:
    """One layer of one sequence. Of each head: vectors as they were computed, and as codes give them back."""

    def __init__(self, cache):
        self.codecs = cache.codecs
        self.sides = {"k": self.codecs.keys, "v": self.codecs.values}
        self.plain = {side: [torch.zeros(0, 32) for _ in range(2)] for side in "kv"}
        self.coded = {side: [torch.zeros(0, 32) for _ in range(2)] for side in "kv"}
        self.positions = [torch.zeros(0, dtype=torch.int64) for _ in range(2)]
        self.seen = 0

    def border(self, length):
        return max(self.codecs.first, (length - self.codecs.residual_length) // PAGE * PAGE)

    def close(self):
        """What is old enough becomes codes, once."""
        for side, coding in self.sides.items():
            for head, plain in enumerate(self.plain[side]):
                coded = self.coded[side][head]
                while len(coded) + PAGE <= min(self.border(len(plain)), len(plain)):
                    page = plain[len(coded):len(coded) + PAGE]
                    coded = torch.cat((coded, coding.decode(coding.encode(page))))
                self.coded[side][head] = coded

    def read(self, side, head, length):
        """What a query that sees so many slots reads."""
        first, border = self.codecs.first, self.border(length)
        plain, coded = self.plain[side][head], self.coded[side][head]
        return torch.cat((plain[:min(first, length)], coded[first:border], plain[border:length]))

    def feed(self, q, k, v, window):
        """Rotated ``[H, n, D]``, one query at a time."""
        turned = {"k": k, "v": v}
        for side, coding in self.sides.items():
            turned[side] = hadamard.apply_hadamard(turned[side]) if coding.hadamard else turned[side]
        q = hadamard.apply_hadamard(q) if self.sides["k"].hadamard else q
        outs = []
        for i in range(q.shape[1]):
            for head in range(2):
                for side in "kv":
                    self.plain[side][head] = torch.cat((self.plain[side][head], turned[side][head, i:i + 1]))
                self.positions[head] = torch.cat((self.positions[head], torch.tensor([self.seen])))
            self.close()
            out = []
            for head in range(4):
                length = len(self.plain["k"][head // 2])
                keys, values = (self.read(side, head // 2, length).double() for side in "kv")
                sees = torch.ones(length, dtype=torch.bool)
                if window is not None:
                    limit, sinks = window
                    at = self.positions[head // 2]
                    sees = (at > self.seen - limit) | (at < sinks)
                scores = (keys @ q[head, i].double() / 32**0.5).masked_fill(~sees, -torch.inf)
                out.append(scores.softmax(-1) @ values)
            outs.append(torch.stack(out))
            self.seen += 1
        out = torch.stack(outs, 1)
        return hadamard.undo_hadamard(out) if self.sides["v"].hadamard else out

    def keep(self, kept, whole):
        """Only these positions stay, by head. Codes of pages before the first that is missing stay, and where
        what is missing are whole pages, all codes."""
        for head, places in enumerate(kept):
            slots = torch.tensor([self.positions[head].tolist().index(int(p)) for p in places])
            if len(slots) == len(self.positions[head]):
                continue
            other = (slots != torch.arange(len(slots))).nonzero()
            same = (int(other[0]) if len(other) else len(slots)) // PAGE * PAGE
            if whole:
                gone = PAGE - torch.bincount(slots // PAGE, minlength=len(self.positions[head]) // PAGE)
                assert set(gone[:int(slots[-1]) // PAGE].tolist()) <= {0, PAGE}
                for side in "kv":
                    self.plain[side][head] = self.plain[side][head][slots]
                    coded = self.coded[side][head]
                    self.coded[side][head] = coded[slots[slots < len(coded)]]
                self.positions[head] = self.positions[head][slots]
                continue
            for side in "kv":
                length = len(self.plain[side][head])
                now, coded = self.read(side, head, length), self.coded[side][head]
                self.plain[side][head] = now[slots].to(self.plain[side][head].dtype)
                self.coded[side][head] = coded[:min(same, self.border(len(slots)))]
            self.positions[head] = self.positions[head][slots]
        self.close()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("codec", CODECS)
def test_each_query_reads_codes_and_vectors_as_the_rule_says(feeder, codec):
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(["all", "window(70, sinks=3)", "snapkv(0.6, window=4)", "snapkv(150, window=4)",
                            "tova(90, interval=20)"]), st.integers(0, 99), st.data())
    def holds(policy, seed, data):
        one = feeder(f"{policy}+{codec}", seed=seed)
        number, window = one.cache.add(), (70, 3) if policy.startswith("window") else None
        lists = [Lists(one.cache) for _ in range(one.layers)]
        steps = [(data.draw(st.integers(1, 150)), "prefill") for _ in range(data.draw(st.integers(0, 2)))]
        steps += [(data.draw(st.integers(1, 150)), "prefill_end")]
        steps += [(data.draw(st.integers(1, 20)), "decode") for _ in range(data.draw(st.integers(0, 5)))]
        for count, phase in steps:
            for layer, (q, k, v, positions, out) in enumerate(one.feed([number], [count], phase)):
                context = ForwardContext(one.config, positions, q.dtype)
                q, k = (apply_rope(x, *context.rope_tables(None)) for x in (q, k))
                want = lists[layer].feed(q[0], k[0], v[0], window)
                assert torch.allclose(out[0].double(), want.double(), atol=3e-5), (layer, phase)
                lists[layer].keep([row[row >= 0] for row in one.cache.positions(number, layer)],
                                  window is not None)
            check_pages(one.cache, number)
        one.cache.free([number])
        assert one.cache.allocated_bytes == one.cache.used_bytes == 0

    holds()


def check_pages(cache, number):
    """As many as the rule says, and no more memory than a quarter beside them."""
    first = cache.codecs.first
    for layer, store in enumerate(layer.store for layer in cache.layers):
        lengths = cache.slots(number)[layer]
        borders = [cache.codecs.border(length) for length in lengths]
        assert store.pages.used == sum((border - first) // PAGE for border in borders)
        assert store.residual.used == sum(-(-(length - border + first) // PAGE) if length > first
                                          else -(-length // PAGE) for length, border in zip(lengths, borders))
        for pages in store.all:
            spare = pages.allocated_bytes - pages.used * pages.page_bytes
            assert 4 * spare <= pages.allocated_bytes


@pytest.mark.sampled(8)
@pytest.mark.parametrize("codec", CODECS)
def test_under_a_window_chunks_make_no_difference_and_old_pages_are_given_back(feeder, codec):
    """In one piece, in pieces and token by token: the same results, from pages whose number doesn't grow."""
    results, drawn = [], None
    for cut in ([600], [100, 300, 1, 199], [1] * 600):
        one = feeder(f"window(70, sinks=3)+{codec}")
        drawn = drawn or [one.draw(1, 600) for _ in range(one.layers)]
        number, outs, start = one.cache.add(), [], 0
        for count in cut:
            part = [[x[:, :, start:start + count] for x in layer] for layer in drawn]
            phase = "decode" if count == 1 else "prefill"
            outs.append(torch.stack([out for *_, out in one.feed([number], [count], phase, drawn=part)]))
            start += count
        results.append(torch.cat(outs, 3))
        waits = one.cache.codecs.residual_length + one.cache.codecs.first
        assert one.cache.slots(number)[0][0] <= 70 + waits + 4 * PAGE, "far more than a window is held"
    for other in results[1:]:
        assert torch.allclose(results[0], other, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_a_fork_goes_its_own_way(feeder, codec):
    one = feeder(codec)
    first = one.cache.add()
    one.feed([first], [200], "prefill_end")
    before = [[one.cache.layers[i].store.read(one.cache._sequences[first].layers[i], side).clone()
               for side in "kv"]
              for i in range(one.layers)]
    second = one.cache.fork(first)
    one.feed([second], [100], "decode")
    for i, sides in enumerate(before):
        for side, was in zip("kv", sides):
            assert torch.equal(one.cache.layers[i].store.read(one.cache._sequences[first].layers[i], side),
                               was)
    one.cache.free([first])
    one.feed([second], [100], "decode")
    assert one.cache.seen(second) == 400
    one.cache.free([second])
    assert one.cache.allocated_bytes == 0


def test_bytes_are_those_of_codes_and_of_what_waits(feeder):
    """int4: 4 bits, and of 32 numbers a scale and a low of 16 bits each: 5 bits a number."""
    one = feeder("int4", dtype=torch.bfloat16)
    number = one.cache.add()
    one.feed([number], [64 * 40], "prefill_end")
    slots, cache = one.layers * one.kv_heads, one.cache
    assert one.cache.bytes_per_token == slots * 2 * 32 * 5 // 8
    assert one.cache.residual_bytes_per_token == slots * 2 * 32 * 2
    assert cache.step_bytes(number) == 64 * (38 * cache.bytes_per_token + 2 * cache.residual_bytes_per_token)
    assert cache.used_bytes == 64 * (38 * cache.bytes_per_token + 2 * cache.residual_bytes_per_token)
