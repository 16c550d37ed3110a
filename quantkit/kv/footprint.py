"""What a cache will hold, before there is one: its own bookkeeping, of a sequence in one head, without data.

No formula: a :class:`~quantkit.kv.cache.KVCache` takes and gives back pages as it would for a model, on
torch's ``meta`` device, where tensors have shapes and no memory. Where a policy asks for keys or attention,
these are zeros: a policy of ours decides *which* positions stay by them, and by lengths alone how many.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.kv.base import PAGE, KVPolicy, Phase
from quantkit.kv.cache import KVCache
from quantkit.kv.page_pool import most_pages
from quantkit.kv.reread import LEAD
from quantkit.kv.sequence import LayerState
from quantkit.models.config import ModelConfig
from quantkit.spec import KVSpec


@dataclass(frozen=True)
class PeakUsage:
    """The most that one head of one layer holds of one sequence, over some steps.

    Attributes:
        codes, residual: pages of codes, and of vectors that wait.
        bytes: of all, at any one time.
        slots: tokens.
        watched: bytes of what a policy watches.
    """

    codes: int = 0
    residual: int = 0
    bytes: int = 0
    slots: int = 0
    watched: int = 0

    def __or__(self, other: PeakUsage) -> PeakUsage:
        return PeakUsage(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass(frozen=True)
class LayerGroup:
    """What layers take that are alike.

    Attributes:
        layers: how many.
        window: how many tokens the model itself looks at there; ``None``: all.
        own: whether that is what they hold, whatever the policy.
        page_bytes: of a page of codes, and of vectors that wait.
        filling: while a prompt as long as the whole sequence comes in.
        decoding: from the end of the prompt on.
    """

    layers: int
    window: int | None
    own: bool
    page_bytes: tuple[int, int]
    filling: PeakUsage
    decoding: PeakUsage

    @property
    def most(self) -> PeakUsage:
        """At any time."""
        return self.filling | self.decoding

    def pages(self, count: int) -> tuple[int, int]:
        """Pages of codes and of vectors that wait which so many sequences have in a head, at most: one may be
        filling, all others decode."""
        if not count:
            return 0, 0
        return ((count - 1) * self.decoding.codes + self.most.codes,
                (count - 1) * self.decoding.residual + self.most.residual)


@dataclass(frozen=True)
class Footprint:
    """What a KV setting takes of one model at one length.

    Attributes:
        heads: key heads.
        kinds: of layers; first those that the policy is for, then those with a window of the model's own.
        residual_slots: slots of a head that are never read as codes, at least: the newest, and the first.
        acting_bytes: what a policy that asks where queries look holds while it acts on one layer, estimated.
    """

    heads: int
    kinds: tuple[LayerGroup, ...]
    residual_slots: int
    acting_bytes: int

    @property
    def layers(self) -> int:
        """Of all kinds."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def slots(self) -> int:
        """Tokens of one sequence that a head holds while it decodes, at most."""
        return max(kind.decoding.slots for kind in self.kinds)

    @property
    def bytes_per_token(self) -> int:
        """Of a coded token in all layers and heads."""
        return self.heads * sum(kind.layers * kind.page_bytes[0] for kind in self.kinds) // PAGE

    @property
    def residual_bytes_per_token(self) -> int:
        """Of one whose vectors wait."""
        return self.heads * sum(kind.layers * kind.page_bytes[1] for kind in self.kinds) // PAGE

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one sequence while it decodes, at most."""
        return self.heads * sum(kind.layers * kind.decoding.bytes for kind in self.kinds)

    def used_bytes(self, count: int) -> int:
        """``KVCache.used_bytes`` of so many sequences, at most: one may be filling, all others decode."""
        one = self.heads * sum(kind.layers * kind.most.bytes for kind in self.kinds)
        return (count - 1) * self.sequence_bytes + one if count else 0

    def pages(self, count: int) -> int:
        """Of so many sequences in all layers, at most."""
        return self.heads * sum(kind.layers * sum(kind.pages(count)) for kind in self.kinds)

    def allocated_bytes(self, count: int) -> int:
        """``KVCache.allocated_bytes``, at most: blocks of pages grow by more than is asked of them."""
        found = 0
        for kind in self.kinds if count else ():
            sizes = zip(kind.pages(count), kind.page_bytes)
            found += kind.layers * sum(most_pages(self.heads * n) * size for n, size in sizes)
        return found + self.watched_bytes(count)

    def watched_bytes(self, count: int) -> int:
        """What policies watch of so many sequences, at most."""
        return self.heads * sum(kind.layers * ((count - 1) * kind.decoding.watched + kind.most.watched)
                                for kind in self.kinds if count)

    def moving_bytes(self, count: int) -> int:
        """What is there twice while a layer's block grows or shrinks."""
        return self.heads * max(sum(n * size for n, size in zip(kind.pages(count), kind.page_bytes))
                                for kind in self.kinds)


def footprint(config: ModelConfig, spec: KVSpec, dtype: torch.dtype, context: int, prompt: int,
              chunk: int) -> Footprint:
    """What a sequence takes.

    Args:
        config: of the model.
        spec: policy and codec.
        dtype: in which the model computes keys and values.
        context: tokens of a sequence in the end.
        prompt: so many of them are its prompt, as far as that decides what a policy drops.
        chunk: prompt tokens that go through the model at once.

    Raises:
        UsageError: the policy's options or the head dimension don't fit.
    """
    whole = KVCache(config, spec, dtype, "meta")
    residual_slots = (0 if whole.stores[0].residual is None
                      else whole.codings.residual_length + whole.codings.first)
    if "budget" in spec.options:  # bytes are of the whole model
        budget = whole.policy.model_dump()["budget"]
        spec = spec.model_copy(update={"options": {**spec.options, "budget": budget}})
    kinds = []
    owns = [one is not whole.policy for one in whole.policies]
    alike = Counter(zip(owns, config.sliding_windows))
    for (own, window), layers in sorted(alike.items(), key=lambda one: one[0][0]):
        # one key head of one layer, with the queries that share it: all are alike
        small = dataclasses.replace(config, num_heads=config.num_heads // config.num_kv_heads, num_kv_heads=1,
                                    num_layers=2 if own else 1,
                                    sliding_windows=(None, window) if own else (None,))
        policy = whole.policies[config.sliding_windows.index(window)]
        cache = KVCache(small, spec, dtype, "meta" if policy.keeps_all else "cpu")
        nothing = torch.zeros(small.num_heads, 1, config.head_dim, dtype=dtype)
        filling, _ = _run(cache, context, 0, chunk, nothing)
        _, decoding = _run(cache, prompt, context - prompt, chunk, nothing)
        sizes = cache.stores[-1].page_bytes
        if not policy.uniform_budget:  # the mean is the same, but each head rounds up to pages by itself
            filling, decoding = (dataclasses.replace(most, codes=most.codes + 1, bytes=most.bytes + sizes[0])
                                 for most in (filling, decoding))
        kinds.append(LayerGroup(layers, window, own, sizes, filling, decoding))
    slots = max(kind.most.slots for kind in kinds)
    return Footprint(config.num_kv_heads, tuple(kinds), residual_slots, _acting(whole, slots))


def _acting(cache: KVCache, slots: int) -> int:
    """A layer's keys while they are decoded (twice in float32, five times where codes and vectors that wait
    are joined: measured), for expected attention more of the kind; and one key head's weights."""
    policy, config = cache.policy, cache.config
    if not (policy.queries or policy.tracks):
        return 0
    plain = cache.stores[0].pages.parts.keys() <= {"k.values", "v.values", "positions"}
    vectors = 5 if cache.stores[0].residual is not None else 1 if plain else 2
    moments = policy.tracks == "moments"
    looks = 0 if moments else 3 * policy.queries * config.num_heads // config.num_kv_heads
    return 4 * slots * ((vectors + 4 * moments) * config.num_kv_heads * config.head_dim + looks)


def _run(cache: KVCache, prompt: int, decoded: int, chunk: int,
         nothing: torch.Tensor) -> tuple[PeakUsage, PeakUsage]:
    """One sequence from its first token to its last: what the last layer holds in its prompt, and from there
    on. ``nothing [H, 1, D]`` is every query; of it the first is every key and value."""
    index = len(cache.stores) - 1
    row, store, policy = cache.add(), cache.stores[index], cache.policies[index]
    cycle = policy.release_granularity
    filling = decoding = PeakUsage()
    most = cache.config.max_position_embeddings
    left: list[int] = []
    for count, phase, looked_at in _steps(prompt, decoded, chunk, policy, cycle):
        batch = cache.batch([row], phase)
        layer = batch.sequences[0].layers[index]
        at, slots = layer.seen, store.allocate(layer, count)
        during = _now(cache, layer)
        if not policy.keeps_all:  # which goes by positions
            kv = nothing[0].expand(count, -1)
            store.write(slots, kv, kv, torch.arange(at, at + count))
            store.close(layer)
        store.settle(layer)
        if not policy.keeps_all:
            asked = count
            if not looked_at and policy.listens(phase):  # as if all others had been summed up
                asked = min(count, layer.asked.size)
                layer.absorbed = layer.seen - asked
            batch._end(index, layer, nothing.expand(-1, asked, -1), count)
        if (piece := cache.policy.reread_prompt) and phase == "prefill_end":
            layer.sums = torch.zeros(1, int(layer.lengths[0])) if policy.reread_prompt else None
            during |= _replayed(cache, row, min(prompt, piece + LEAD, most - prompt), chunk)
            if policy.reread_prompt:
                cache.act(index, layer)
            layer.sums = None
        if phase == "decode" and looked_at:
            decoding |= during
        elif looked_at:
            filling |= during
        if phase == "prefill_end":  # what the prompt leaves is there while others decode
            batch.release()
            decoding |= _now(cache, layer)
        if phase == "decode" and policy.every and layer.steps % policy.every == 0:
            left.append(int(layer.lengths[0]))
            if _repeats(left, policy.every, cycle):
                break
    cache.free([row])
    return filling, decoding


def _replayed(cache: KVCache, row: int, count: int, chunk: int) -> PeakUsage:
    """While so many tokens come again behind a sequence, at most."""
    fork, most = cache.fork(row), PeakUsage()
    for start in range(0, count, chunk):
        layer, store = cache.batch([fork], "reread").sequences[0].layers[-1], cache.stores[-1]
        store.allocate(layer, min(chunk, count - start))
        most |= _now(cache, layer)
        store.close(layer)
        store.settle(layer)
    cache.free([fork])
    return most


def _now(cache: KVCache, layer: LayerState) -> PeakUsage:
    store, sequences = cache.stores[-1], [cache.sequence(number) for number in cache.numbers]
    used = [pages.used for pages in store.all]
    watched = sum(one.watched_bytes for one in sequences)
    # the queries of all layers are kept, also of those that nobody will ask for
    watched -= sum(one.asked.ring[:-1].nbytes for one in sequences if one.asked is not None)
    pages = sum(n * size for n, size in zip(used, store.page_bytes))
    return PeakUsage(used[0], sum(used[1:]), pages + watched, int(layer.lengths[0]), watched)


def _repeats(left: Sequence[int], every: int, cycle: int) -> bool:
    """Whether what a policy left whenever it acted comes again every so many tokens: twice by now."""
    acts = math.lcm(every, cycle) // every
    return len(left) >= 2 * acts and left[-acts:] == left[-2 * acts:-acts]


def _steps(prompt: int, decoded: int, chunk: int, policy: KVPolicy,
           cycle: int) -> Iterator[tuple[int, Phase, bool]]:
    """The engine's: a prompt by chunks, then a token at a time; and whether anybody looks at what it takes.

    As long as nothing is dropped a sequence holds the most at the end, and repeats itself every page; what a
    window leaves goes by the last position, and comes again every ``cycle`` tokens. All before is one step.
    """
    start = max(0, (prompt - 1) // chunk - math.lcm(chunk, cycle) // chunk) * chunk
    if policy.on_prefill == "chunk" and policy.visible is None:
        start = 0
    if start:
        yield start, "prefill", False
    for at in range(start, prompt, chunk):
        yield min(chunk, prompt - at), "prefill" if at + chunk < prompt else "prefill_end", True
    start = max(0, decoded - 2 * PAGE) if policy.every is None else 0
    if start:
        yield start, "decode", False
    for _ in range(decoded - start):
        yield 1, "decode", True
