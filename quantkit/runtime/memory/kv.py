"""Predicts the memory of a cache by simulating its bookkeeping for one sequence in one head, without data.

There is no formula: a :class:`~quantkit.kv.cache.KVCache` takes and gives back pages as it would for a model,
on torch's ``meta`` device, where tensors have shapes and no memory. Keys and attention that a policy asks for
are zeros: they decide *which* positions stay; how many depends on lengths alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.kv.base import PAGE, KVPolicy, Phase, is_ours
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.decoded import LIMIT
from quantkit.kv.page_pool import most_pages
from quantkit.kv.reread import OVERLAP
from quantkit.kv.sequence import LayerState
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.runtime.memory.machine import memory_limit
from quantkit.support.errors import UsageError
from quantkit.support.units import human_bytes

LOOKAHEAD = 128
"""Tokens for which a decoding sequence may be given pages at a time."""
PREFIX_SHARE = 16
"""By default prefixes take at most this part of the process's memory where the cache grows."""
MAX_PREFIX_BYTES = 4 << 30
"""And at most this number of bytes."""


@dataclass(frozen=True)
class DraftMemory:
    """What drafts take on a GPU beside weights.

    Attributes:
        step_bytes: bytes while they are made.
        bytes_per_token: bytes of each token in a KV cache of their own.
    """

    step_bytes: int = 0
    bytes_per_token: int = 0

    def left_for_cache(self, memory: int, bytes_per_token: int) -> int:
        """Bytes of ``memory`` for a model's KV cache, of which a token takes ``bytes_per_token``."""
        return max(0, memory - self.step_bytes) * bytes_per_token // (bytes_per_token + self.bytes_per_token)


NO_DRAFTS = DraftMemory()


@dataclass(frozen=True)
class PeakUsage:
    """The most that one head of one layer holds of one sequence, over some steps.

    Attributes:
        codes, residual: pages of codes, and pages of unencoded vectors.
        bytes: the most that both take at one time.
        tracked: bytes of what a policy tracks.
    """

    codes: int = 0
    residual: int = 0
    bytes: int = 0
    slots: int = 0
    tracked: int = 0

    def __or__(self, other: PeakUsage) -> PeakUsage:
        return PeakUsage(max(self.codes, other.codes), max(self.residual, other.residual),
                         max(self.bytes, other.bytes), max(self.slots, other.slots),
                         max(self.tracked, other.tracked))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that take the same memory.

    Attributes:
        window: tokens that the model itself looks at there; ``None``: all.
        model_window: whether that window is what they hold, whatever the policy.
        page_bytes: the sizes of a page of codes and of a page of the residual.
        filling: while a prompt as long as the whole sequence is read.
        decoding: from the end of the prompt on.
    """

    layers: int
    window: int | None
    model_window: bool
    page_bytes: tuple[int, int]
    filling: PeakUsage
    decoding: PeakUsage

    @property
    def peak(self) -> PeakUsage:
        """At any time."""
        return self.filling | self.decoding

    def pages(self, count: int, prompts: int = 1) -> tuple[int, int]:
        """Pages of codes and of the residual that ``count`` sequences have in a head, at most.

        Args:
            prompts: how many of them may be reading their prompts; the others decode. A step's tokens wait in
                the residual together, however many prompts they are of, but for pages that they begin.
        """
        if not count:
            return 0, 0
        prompts = min(prompts, count)
        return ((count - prompts) * self.decoding.codes + prompts * self.peak.codes,
                (count - 1) * self.decoding.residual + self.peak.residual
                + (prompts - 1) * (self.peak.residual > 0))


@dataclass(frozen=True)
class Footprint:
    """The memory of a KV setting for one model at one length.

    Attributes:
        heads: the number of KV heads.
        groups: the layers; first those that the policy manages, then those with a window of the model's own.
        residual_slots: slots of a head that are never read as codes, at least: the newest, and the sinks.
        acting_bytes: the estimated memory of a policy that needs attention while it acts on one layer.
        decoded_page_bytes: the size of a page of codes that is kept decoded; 0: kernels read codes.
    """

    heads: int
    groups: tuple[LayerGroup, ...]
    residual_slots: int
    acting_bytes: int
    decoded_page_bytes: int = 0

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def slots(self) -> int:
        """Tokens of one sequence that a head holds while it decodes, at most."""
        return max(group.decoding.slots for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of an encoded token in all layers and heads."""
        return self.heads * sum(group.layers * group.page_bytes[0] for group in self.groups) // PAGE

    @property
    def residual_bytes_per_token(self) -> int:
        """Bytes of an unencoded token in all layers and heads."""
        return self.heads * sum(group.layers * group.page_bytes[1] for group in self.groups) // PAGE

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of one sequence while it decodes, at most."""
        return self.heads * sum(group.layers * group.decoding.bytes for group in self.groups)

    def used_bytes(self, count: int) -> int:
        """``KVCache.used_bytes`` of ``count`` sequences, at most: one may be reading its prompt, all others
        decode."""
        peak = self.heads * sum(group.layers * group.peak.bytes for group in self.groups)
        return (count - 1) * self.sequence_bytes + peak if count else 0

    def pages(self, count: int) -> int:
        """Pages of ``count`` sequences in all layers, at most."""
        return self.heads * sum(group.layers * sum(group.pages(count)) for group in self.groups)

    def allocated_bytes(self, count: int) -> int:
        """``KVCache.allocated_bytes``, at most: blocks of pages grow by more than is asked of them."""
        total = 0
        for group in self.groups if count else ():
            sizes = zip(group.pages(count), group.page_bytes)
            total += group.layers * sum(most_pages(self.heads * n) * size for n, size in sizes)
        return total + self._decoded_bytes(count) + self.tracked_bytes(count)

    def _decoded_bytes(self, count: int) -> int:
        """Decoded pages of ``count`` sequences, at most: what is kept, and the memory of one layer."""
        layers = [(group.layers, most_pages(self.heads * group.pages(count)[0]) * self.decoded_page_bytes)
                  for group in self.groups]
        return min(LIMIT, sum(number * size for number, size in layers)) + max(size for _, size in layers)

    def tracked_bytes(self, count: int) -> int:
        """What policies track of ``count`` sequences, at most."""
        return self.heads * sum(group.layers * ((count - 1) * group.decoding.tracked + group.peak.tracked)
                                for group in self.groups if count)

    def moving_bytes(self, count: int) -> int:
        """What exists twice while a layer's block grows or shrinks."""
        return self.heads * max(sum(n * size for n, size in zip(group.pages(count), group.page_bytes))
                                for group in self.groups)


def footprint(config: ModelConfig, spec: KVSpec, dtype: torch.dtype, context: int, prompt: int,
              chunk: int) -> Footprint:
    """Predict the memory of a sequence.

    Args:
        spec: policy and codec.
        dtype: in which the model computes keys and values.
        context: tokens of a sequence at its end.
        prompt: tokens of its prompt, as far as that decides what a policy drops.
        chunk: prompt tokens that go through the model at once.

    Raises:
        UsageError: the policy's options or the head dimension don't fit.
    """
    cache = KVCache(config, spec, dtype, "meta")
    residual_slots = cache.codecs.residual_length + cache.codecs.first if cache.has_residual else 0
    if "budget" in spec.options:  # a budget in bytes is of the whole model
        budget = cache.policy.model_dump()["budget"]
        spec = spec.model_copy(update={"options": {**spec.options, "budget": budget}})
    groups = []
    model_windows = [layer.policy is not cache.policy for layer in cache.layers]
    counts = Counter(zip(model_windows, config.sliding_windows))
    for (model_window, window), layers in sorted(counts.items(), key=lambda item: item[0][0]):
        # one KV head of one layer, with the queries that share it: all are alike
        small = dataclasses.replace(config, num_heads=config.num_heads // config.num_kv_heads, num_kv_heads=1,
                                    num_layers=2 if model_window else 1,
                                    sliding_windows=(None, window) if model_window else (None,))
        policy = cache.layers[config.sliding_windows.index(window)].policy
        simulated = KVCache(small, spec, dtype, "meta" if policy.keeps_all else "cpu")
        zeros = torch.zeros(small.num_heads, 1, config.head_dim, dtype=dtype)
        filling, _ = _simulate(simulated, context, 0, chunk, zeros)
        _, decoding = _simulate(simulated, prompt, context - prompt, chunk, zeros)
        sizes = simulated.layers[-1].store.page_bytes
        if not policy.uniform_budget:  # the mean is the same, but each head rounds up to pages by itself
            filling, decoding = (dataclasses.replace(usage, codes=usage.codes + 1, bytes=usage.bytes
                                                     + sizes[0])
                                 for usage in (filling, decoding))
        groups.append(LayerGroup(layers, window, model_window, sizes, filling, decoding))
    slots = max(group.peak.slots for group in groups)
    decoded = 0 if all(map(is_ours, (cache.codecs.keys, cache.codecs.values))) else 8 * PAGE * config.head_dim
    return Footprint(config.num_kv_heads, tuple(groups), residual_slots, _acting_bytes(cache, slots), decoded)


def _acting_bytes(cache: KVCache, slots: int) -> int:
    """A layer's keys while they are decoded (twice in float32, five times where codes and unencoded vectors
    are
    joined: measured), four more for expected attention; and one KV head's attention weights."""
    policy = cache.policy
    config = cache.config
    store = cache.layers[0].store
    if not (policy.query_window or policy.tracks):
        return 0
    plain = store.pages.parts.keys() <= {"k.values", "v.values", "positions"}
    vectors = 5 if cache.has_residual else 1 if plain else 2
    moments = policy.tracks == "query_moments"
    weights = 0 if moments else 3 * policy.query_window * config.num_heads // config.num_kv_heads
    return 4 * slots * ((vectors + 4 * moments) * config.num_kv_heads * config.head_dim + weights)


def _simulate(cache: KVCache, prompt: int, decoded: int, chunk: int,
              zeros: torch.Tensor) -> tuple[PeakUsage, PeakUsage]:
    """One sequence from its first token to its last: what the last layer holds during its prompt, and from
    there on. ``zeros [H, 1, D]`` is every query; its first head is every key and value."""
    index = len(cache.layers) - 1
    number, layer = cache.add(), cache.layers[index]
    store, policy = layer.store, layer.policy
    cycle = policy.release_granularity
    filling = decoding = PeakUsage()
    context = cache.config.max_position_embeddings
    kept: list[int] = []
    for count, phase, counted in _steps(prompt, decoded, chunk, policy, cycle):
        batch = Batch(cache, [number], phase, defers=True)
        batch.begin([count])
        state = batch.sequences[0].layers[index]
        position, slots = state.seen, store.allocate(state, count)
        during = _usage(cache, state)
        if not policy.keeps_all:  # then it depends on positions
            kv = zeros[0].expand(count, -1)
            store.write(slots, kv, kv, torch.arange(position, position + count))
            store.encode_full_pages(state)
        store.free_encoded_residual(state)
        if not policy.keeps_all:
            queries = count
            if not counted and policy.tracks_queries(phase):  # as if all others had been accumulated
                queries = min(count, state.query_window.size)
                state.accumulated = state.seen - queries
            if policy.tracks_queries(phase):
                layer.scores.record_queries(state, zeros.expand(-1, queries, -1))
            if layer.end_step(state, count, phase):
                cache.drop(index, state)
        if (size := cache.policy.reread_prompt) and phase == "prefill_end":
            state.attention_received = torch.zeros(1, int(state.lengths[0])) if policy.reread_prompt else None
            during |= _reread_usage(cache, number, min(prompt, size + OVERLAP, context - prompt), chunk)
            if policy.reread_prompt:
                cache.drop(index, state)
            state.attention_received = None
        if phase == "decode" and counted:
            decoding |= during
        elif counted:
            filling |= during
        if phase == "prefill_end":  # what the prompt leaves is there while others decode
            for _ in batch.policy_actions():  # which forgets queries
                pass
            decoding |= _usage(cache, state)
        if phase == "decode" and policy.decode_interval and state.steps % policy.decode_interval == 0:
            kept.append(int(state.lengths[0]))
            if _repeats(kept, policy.decode_interval, cycle):
                break
    cache.free([number])
    return filling, decoding


def _reread_usage(cache: KVCache, number: int, count: int, chunk: int) -> PeakUsage:
    """While ``count`` tokens are fed again behind a sequence, at most."""
    fork, usage = cache.fork(number), PeakUsage()
    store = cache.layers[-1].store
    for start in range(0, count, chunk):
        batch = Batch(cache, [fork], "reread")
        batch.begin([min(chunk, count - start)])
        state = batch.sequences[0].layers[-1]
        store.allocate(state, min(chunk, count - start))
        usage |= _usage(cache, state)
        store.encode_full_pages(state)
        store.free_encoded_residual(state)
    cache.free([fork])
    return usage


def _usage(cache: KVCache, state: LayerState) -> PeakUsage:
    store, sequences = cache.layers[-1].store, [cache.sequence(number) for number in cache.numbers]
    used = [pool.used for pool in store.all]
    tracked = sum(sequence.tracked_bytes for sequence in sequences)
    # the queries of all layers are kept, also of those whose policy won't ask for them
    tracked -= sum(sequence.query_window.ring[:-1].nbytes for sequence in sequences
                   if sequence.query_window is not None)
    pages = sum(n * size for n, size in zip(used, store.page_bytes))
    return PeakUsage(used[0], sum(used[1:]), pages + tracked, int(state.lengths[0]), tracked)


def _repeats(kept: Sequence[int], interval: int, cycle: int) -> bool:
    """Whether the numbers of slots that a policy kept each time repeat themselves: they did so once by
    now."""
    acts = math.lcm(interval, cycle) // interval
    return len(kept) >= 2 * acts and kept[-acts:] == kept[-2 * acts:-acts]


def _steps(prompt: int, decoded: int, chunk: int, policy: KVPolicy,
           cycle: int) -> Iterator[tuple[int, Phase, bool]]:
    """The engine's steps: a prompt by chunks, then a token at a time; and whether their memory counts.

    As long as nothing is dropped, a sequence holds the most at its end, and repeats itself every page. What a
    window keeps depends on the last position and repeats itself every ``cycle`` tokens. All before that is
    one step that doesn't count.
    """
    start = max(0, (prompt - 1) // chunk - math.lcm(chunk, cycle) // chunk) * chunk
    if policy.on_prefill == "chunk" and policy.visible is None:
        start = 0
    if start:
        yield start, "prefill", False
    for begin in range(start, prompt, chunk):
        yield min(chunk, prompt - begin), "prefill" if begin + chunk < prompt else "prefill_end", True
    start = max(0, decoded - 2 * PAGE) if policy.decode_interval is None else 0
    if start:
        yield start, "decode", False
    for _ in range(decoded - start):
        yield 1, "decode", True


def default_prefix_bytes() -> int:
    """Bytes of prefixes that are kept by default, where the cache's size isn't fixed."""
    return min(MAX_PREFIX_BYTES, memory_limit() // PREFIX_SHARE)


def reserved_footprint(cache: KVCache, context: int, chunk: int) -> Footprint:
    """The most that a sequence of up to ``context`` tokens takes, however much of it is the prompt; with
    pages for :data:`LOOKAHEAD` more tokens."""
    interval = cache.policy.decode_interval or 1
    longest = functools.reduce(_larger, (
        footprint(cache.config, cache.spec, cache.dtype, context, prompt, chunk)
        for prompt in {context - 1, max(1, context - interval), context // 2, 1}))
    return dataclasses.replace(longest, groups=tuple(
        _with_lookahead(group, -(-context // PAGE)) for group in longest.groups))


def _with_lookahead(group: LayerGroup, pages: int) -> LayerGroup:
    """With pages for :data:`LOOKAHEAD` more tokens, which a sequence may get before it needs them; never more
    than all ``pages`` of the longest text."""
    def extended(usage: PeakUsage) -> PeakUsage:
        return dataclasses.replace(
            usage, codes=max(usage.codes, min(usage.codes + LOOKAHEAD // PAGE, pages)),
            residual=usage.residual + (LOOKAHEAD // PAGE if usage.residual else 0))

    return dataclasses.replace(group, filling=extended(group.filling), decoding=extended(group.decoding))


def _larger(first: Footprint, second: Footprint) -> Footprint:
    groups = (dataclasses.replace(a, filling=a.filling | b.filling, decoding=a.decoding | b.decoding)
              for a, b in zip(first.groups, second.groups, strict=True))
    return dataclasses.replace(first, groups=tuple(groups))


def available_pages(longest: Footprint, size: int, sequences: int, forks: int, prompts: int) -> list[int]:
    """Pages of codes for a head, by group of layers: all that ``sequences``, ``prompts`` of which are being
    read, and ``forks`` ever take, or as many as the memory has for those layers that grow with the text. What
    a policy tracks comes first."""
    def bytes_of(group: LayerGroup, pages: tuple[int, int]) -> int:
        return longest.heads * group.layers * sum(n * each for n, each in zip(pages, group.page_bytes))

    wanted = [group.pages(sequences + forks, prompts) for group in longest.groups]
    fixed = longest.acting_bytes + longest.tracked_bytes(sequences)
    # states in the middle of a prompt, which keep what is tracked there
    fixed += forks * longest.heads * sum(group.layers * group.filling.tracked for group in longest.groups)
    fixed += sum(bytes_of(group, (codes if group.model_window else 0, residual))
                 for group, (codes, residual) in zip(longest.groups, wanted))
    growing = sum(bytes_of(group, (codes, 0))
                  for group, (codes, _) in zip(longest.groups, wanted) if not group.model_window)
    # the pages of one layer more, decoded: the memory that layers share which don't keep theirs so
    growing += longest.heads * longest.decoded_page_bytes * max(codes for codes, _ in wanted)
    share = min(1.0, (size - fixed) / growing) if growing else 1.0
    available = [codes if group.model_window else int(codes * share)
                 for group, (codes, _) in zip(longest.groups, wanted)]
    if size < fixed or min(available) < 1:
        raise UsageError(f"{human_bytes(max(0, size))} are too few for the KV cache of {sequences} sequences",
                         why=f"{human_bytes(fixed)} are needed before the first long text",
                         next="decode fewer sequences side by side, or give --kv int4")
    return available
