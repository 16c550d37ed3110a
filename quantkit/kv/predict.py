"""What a cache will hold, before there is one: its own bookkeeping, of a sequence in one head, without data.

No formula: a :class:`~quantkit.kv.cache.KVCache` takes and gives back pages as it would for a model, on
torch's ``meta`` device, where tensors have shapes and no memory. Where a policy asks for keys or attention,
these are zeros: a policy of ours decides *which* positions stay by them, and by lengths alone how many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.kv.base import PAGE, KVPolicy, Phase
from quantkit.kv.cache import KVCache
from quantkit.kv.held import HeldLayer
from quantkit.kv.pages import most_pages
from quantkit.kv.replay import LEAD
from quantkit.models.config import ModelConfig
from quantkit.spec import KVSpec


@dataclass(frozen=True)
class Most:
    """The most that one head of one layer holds of one sequence, over some steps.

    Attributes:
        codes, waiting: pages of codes, and of vectors that wait.
        bytes: of all, at any one time.
        slots: tokens.
        watched: bytes of what a policy watches.
    """

    codes: int = 0
    waiting: int = 0
    bytes: int = 0
    slots: int = 0
    watched: int = 0

    def __or__(self, other: Most) -> Most:
        return Most(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclass(frozen=True)
class Footprint:
    """What a KV setting takes of one model at one length.

    A model's own sliding windows change nothing here: the cache keeps what is behind them, too.

    Attributes:
        layers, heads: of the model; key heads.
        bytes_per_token, waiting_bytes_per_token: as :class:`KVCache` has them: of a coded token in all layers
            and heads, and of one whose vectors wait.
        waits: slots of a head that are never read as codes, at least: the newest, and the first.
        page_bytes: of a page of codes, and of vectors that wait.
        filling: while a prompt as long as the whole sequence comes in.
        decoding: from the end of the prompt on.
        acting_bytes: what a policy that asks where queries look holds while it acts on one layer, estimated.
    """

    layers: int
    heads: int
    bytes_per_token: int
    waiting_bytes_per_token: int
    waits: int
    page_bytes: tuple[int, int]
    filling: Most
    decoding: Most
    acting_bytes: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one sequence while it decodes, at most."""
        return self.layers * self.heads * self.decoding.bytes

    def used_bytes(self, count: int) -> int:
        """``KVCache.used_bytes`` of so many sequences, at most: one may be filling, all others decode."""
        one = self.filling | self.decoding
        return self.layers * self.heads * ((count - 1) * self.decoding.bytes + one.bytes) if count else 0

    def pages(self, count: int) -> tuple[int, int]:
        """Pages of codes and of vectors that wait which so many sequences have in a layer, at most."""
        if not count:
            return 0, 0
        one, others = self.filling | self.decoding, self.decoding
        return (self.heads * ((count - 1) * others.codes + one.codes),
                self.heads * ((count - 1) * others.waiting + one.waiting))

    def allocated_bytes(self, count: int) -> int:
        """``KVCache.allocated_bytes``, at most: blocks of pages grow by more than is asked of them."""
        pages = sum(most_pages(n) * size for n, size in zip(self.pages(count), self.page_bytes))
        one = self.filling | self.decoding
        watched = (count - 1) * self.decoding.watched + one.watched if count else 0
        return self.layers * (pages + self.heads * watched)

    def moving_bytes(self, count: int) -> int:
        """What is there twice while a layer's block grows or shrinks."""
        return sum(n * size for n, size in zip(self.pages(count), self.page_bytes))


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
    # one key head of one layer, with the queries that share it: all are alike
    small = dataclasses.replace(config, num_layers=1, num_heads=config.num_heads // config.num_kv_heads,
                                num_kv_heads=1, sliding_windows=(None,))
    whole = KVCache(config, spec, dtype, "meta")
    store = whole.stores[0]
    waits = 0 if store.waiting is None else whole.codings.recent + whole.codings.first
    sizes = store.pages.page_bytes, 0 if store.waiting is None else store.waiting.page_bytes
    if "budget" in spec.options:  # bytes are of the whole model
        budget = whole.policy.model_dump()["budget"]
        spec = spec.model_copy(update={"options": {**spec.options, "budget": budget}})
    cache = KVCache(small, spec, dtype, "meta" if whole.policy.keeps_all else "cpu")
    nothing = torch.zeros(small.num_heads, 1, config.head_dim, dtype=dtype)
    filling, _ = _run(cache, context, 0, chunk, nothing)
    _, decoding = _run(cache, prompt, context - prompt, chunk, nothing)
    if not whole.policy.alike:  # the mean is the same, but each head rounds up to pages by itself
        filling, decoding = (dataclasses.replace(most, codes=most.codes + 1, bytes=most.bytes + sizes[0])
                             for most in (filling, decoding))
    return Footprint(config.num_layers, config.num_kv_heads, whole.bytes_per_token,
                     whole.waiting_bytes_per_token, waits, sizes, filling, decoding,
                     _acting(whole, (filling | decoding).slots))


def _acting(cache: KVCache, slots: int) -> int:
    """A layer's keys while they are decoded (twice in float32, five times where codes and vectors that wait
    are joined: measured), for expected attention more of the kind; and one key head's weights."""
    policy, config = cache.policy, cache.config
    if not (policy.queries or policy.watches):
        return 0
    plain = cache.stores[0].pages.parts.keys() <= {"k.values", "v.values", "positions"}
    vectors = 5 if cache.stores[0].waiting is not None else 1 if plain else 2
    moments = policy.watches == "moments"
    looks = 0 if moments else 3 * policy.queries * config.num_heads // config.num_kv_heads
    return 4 * slots * ((vectors + 4 * moments) * config.num_kv_heads * config.head_dim + looks)


def _run(cache: KVCache, prompt: int, decoded: int, chunk: int, nothing: torch.Tensor) -> tuple[Most, Most]:
    """One sequence from its first token to its last: what it holds in its prompt, and from its end on.
    ``nothing [H, 1, D]`` is every query; of it the first is every key and value."""
    row, store, policy = cache.add(), cache.stores[0], cache.policy
    filling = decoding = Most()
    most = cache.config.max_position_embeddings
    left: list[int] = []
    for count, phase, looked_at in _steps(prompt, decoded, chunk, policy):
        batch = cache.batch([row], phase)
        layer = batch.sequences[0].layers[0]
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
            batch._end(0, layer, nothing.expand(-1, asked, -1), count)
        if policy.replays and phase == "prefill_end":
            layer.sums = torch.zeros(1, int(layer.lengths[0]))
            during |= _replayed(cache, row, min(prompt, policy.replays + LEAD, most - prompt), chunk)
            cache.act(0, layer)
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
            if _repeats(left, policy.every):
                break
    cache.free([row])
    return filling, decoding


def _replayed(cache: KVCache, row: int, count: int, chunk: int) -> Most:
    """While so many tokens come again behind a sequence, at most."""
    fork, most = cache.fork(row), Most()
    for start in range(0, count, chunk):
        layer = cache.batch([fork], "replay").sequences[0].layers[0]
        cache.stores[0].allocate(layer, min(chunk, count - start))
        most |= _now(cache, layer)
        cache.stores[0].close(layer)
        cache.stores[0].settle(layer)
    cache.free([fork])
    return most


def _now(cache: KVCache, layer: HeldLayer) -> Most:
    store = cache.stores[0]
    waiting = 0 if store.waiting is None else store.waiting.used
    pages = store.pages.used * store.pages.page_bytes
    pages += 0 if store.waiting is None else waiting * store.waiting.page_bytes
    return Most(store.pages.used, waiting, cache.used_bytes, int(layer.lengths[0]), cache.used_bytes - pages)


def _repeats(left: Sequence[int], every: int) -> bool:
    """Whether a policy has left as many slots whenever it acted, at every place within a page, twice."""
    acts = 2 * math.lcm(every, PAGE) // every
    return len(left) >= acts and len(set(left[-acts:])) == 1


def _steps(prompt: int, decoded: int, chunk: int, policy: KVPolicy) -> Iterator[tuple[int, Phase, bool]]:
    """The engine's: a prompt by chunks, then a token at a time; and whether anybody looks at what it takes.

    As long as nothing is dropped a sequence holds the most at the end, and repeats itself every page: all
    before is one step.
    """
    start = max(0, (prompt - 1) // chunk - 1) * chunk if policy.on_prefill != "chunk" else 0
    if start:
        yield start, "prefill", False
    for at in range(start, prompt, chunk):
        yield min(chunk, prompt - at), "prefill" if at + chunk < prompt else "prefill_end", True
    start = max(0, decoded - 2 * PAGE) if policy.every is None else 0
    if start:
        yield start, "decode", False
    for _ in range(decoded - start):
        yield 1, "decode", True
