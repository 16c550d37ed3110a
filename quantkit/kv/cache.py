"""The KV cache: a policy × a codec over pages, with a page table for every sequence, layer and KV head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from quantkit.kv.attention_scores import LayerGeometry
from quantkit.kv.base import PAGE, KVPolicy
from quantkit.kv.build import build_kv_codecs, build_policy, by_layer
from quantkit.kv.checked import check_codecs, codec_fault
from quantkit.kv.decoded import DecodedPages
from quantkit.kv.layer import LayerCache
from quantkit.kv.page_pool import MoveCounter, PagePool
from quantkit.kv.sequence import LayerState, QueryWindow, SequenceState
from quantkit.kv.spec import KVSpec
from quantkit.kv.store import PageStore
from quantkit.models.config import ModelConfig
from quantkit.support.errors import PluginError

_numbers = itertools.count()


class KVCache:
    """Keys and values of any number of sequences of any lengths.

    A query reads what is stored, the codes of its own token included. So a result depends neither on other
    sequences nor on how a prompt was cut into chunks.

    Args:
        config: the model's; it gives layers, KV heads and the head dimension.
        spec: policy and codec.
        dtype: in which the model computes keys and values.

    Attributes:
        dtype, device: of keys and values as they are computed; where pages lie.
        layers: the cache of each layer, with the policy of the spec or the window that the model has there.
        decoded: the decoded pages that the CPU program reads where a codec has no kernel.
        keeps_all: whether no layer's policy drops anything.
        bytes_per_token: bytes of codes, scales and positions, in all layers and heads; a page's share where
            64
            tokens are encoded together. Unencoded vectors take :attr:`residual_bytes_per_token`.

    Raises:
        UsageError: the policy's options or the head dimension don't fit.
        PluginError: a plugin's codec doesn't do what it promises.
    """

    def __init__(self, config: ModelConfig, spec: KVSpec | None = None, dtype: torch.dtype = torch.bfloat16,
                 device: torch.device | str = "cpu") -> None:
        self.spec = spec or KVSpec()
        self.codecs = build_kv_codecs(self.spec)
        self.config, self.heads = config, config.num_kv_heads
        check_codecs(self.codecs, self.spec, config.head_dim, dtype)
        self.dtype = dtype
        self.device = torch.device(device)
        self.move_counter = MoveCounter()
        stores = [PageStore(self.codecs, self.heads, config.head_dim, dtype, not policy.keeps_all,
                            self.device, self.move_counter)
                  for policy in self._by_layer(build_policy(self.spec))]
        self.bytes_per_token, self.residual_bytes_per_token = (
            sum(size) * self.heads // PAGE for size in zip(*(store.page_bytes for store in stores)))
        self.number = next(_numbers)
        self._sequences: dict[int, SequenceState] = {}
        self._ids = itertools.count()
        self.policy = build_policy(self.spec, lambda policy: self._decoding_bytes(policy, stores))
        policies = self._by_layer(self.policy)
        self.keeps_all = all(policy.keeps_all for policy in policies)
        self.layers: list[LayerCache] = []
        for index, (policy, store) in enumerate(zip(policies, stores)):
            managed = [layer for layer, other in enumerate(policies) if other is policy]
            geometry = LayerGeometry(config, index, dtype, self.device)
            self.layers.append(LayerCache(geometry, self.codecs, policy, store,
                                          (managed.index(index), len(managed))))
        self.decoded = DecodedPages(self.layers, self.move_counter, config.head_dim)

    def _by_layer(self, policy: KVPolicy) -> list[KVPolicy]:
        return by_layer(policy, self.config, self.codecs.first)

    def _decoding_bytes(self, policy: KVPolicy, stores: list[PageStore]) -> int:
        """Bytes of a sequence while it decodes, with a policy whose budget is in tokens."""
        total, tracks_queries = 0, policy.tracks_queries("decode")
        for layer_policy, store in zip(self._by_layer(policy), stores):
            budget: int = layer_policy.model_dump()["budget"]
            slots, (page_bytes, residual_bytes) = budget + layer_policy.slack, store.page_bytes
            page_bytes += PAGE * 4 if tracks_queries and layer_policy.tracks == "attention_sum" else 0
            if store.residual is not None:
                fixed = self.codecs.first + self.codecs.residual_length
                total += -(-(fixed + PAGE) // PAGE) * residual_bytes
                if layer_policy.visible:  # pages of which a part stays
                    total += (1 + layer_policy.release_granularity // PAGE) * page_bytes
                slots = max(1, slots - fixed)
            # heads that keep more or fewer slots than others round up to pages each by itself
            total += (-(-slots // PAGE) + (0 if layer_policy.uniform_budget else 1)) * page_bytes
        query_bytes = 4 * policy.query_window * self.config.num_heads * self.config.head_dim
        return total * self.heads + (query_bytes * self.config.num_layers if tracks_queries else 0)

    @property
    def has_residual(self) -> bool:
        """Whether the newest vectors stay unencoded in pages of their own."""
        return self.layers[0].store.residual is not None

    @property
    def pools(self) -> list[PagePool]:
        return [pool for layer in self.layers for pool in layer.store.all]

    @property
    def bytes_per_token_16bit(self) -> int:
        """What a token's keys and values take in 16 bits, without a codec."""
        return self.config.num_layers * self.heads * 2 * self.config.head_dim * 2

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages that exist, free and decoded ones included, and of what policies track."""
        pages = sum(pool.allocated_bytes for pool in self.pools)
        return pages + self.decoded.shared_bytes + self._tracked_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that belong to a sequence, and of what policies track."""
        return self._tracked_bytes + sum(pool.used * pool.page_bytes for pool in self.pools)

    @property
    def _tracked_bytes(self) -> int:
        # a list, because another thread may ask
        return sum(sequence.tracked_bytes for sequence in list(self._sequences.values()))

    def add(self, max_length: int = 0) -> int:
        """Begin a sequence; returns its id.

        Args:
            max_length: the largest number of tokens that it will have. Only models with longrope depend on
                it; 0 means few.
        """
        number = next(self._ids)
        self._sequences[number] = SequenceState(len(self.layers), self.heads, max_length, self.codecs.first)
        return number

    def fork(self, number: int, *, shared: bool = True) -> int:
        """Begin a sequence with the contents of another; from then on they are independent.

        Args:
            number: the other sequence.
            shared: both hold the same pages until one writes to them; otherwise the pages are copied now.

        Returns:
            The new sequence's id.

        Raises:
            KeyError: ``number`` is unknown.
        """
        source = self._sequences[number]
        fork = self.add(source.max_length)
        target = self._sequences[fork]
        try:
            for layer, source_state, target_state in zip(self.layers, source.layers, target.layers):
                layer.store.fork(source_state, target_state, shared)
            target.query_window = None if source.query_window is None else source.query_window.copy()
        except BaseException:  # there is no memory for it
            self.free([fork])
            raise
        return fork

    def reusable(self, number: int) -> bool:
        """Whether another text that begins with all tokens of a sequence so far reads what it holds.

        What a policy keeps depends on where the prompt ended, so nothing can be reused after that. A window's
        slots lie elsewhere after it has dropped some, and attention sums them in another order. What a
        model's own windows drop is invisible, and they drop whole splits.

        Raises:
            KeyError: ``number`` is unknown.
        """
        independent = all(layer.policy.keeps_all or layer.policy is not self.policy for layer in self.layers)
        return independent or not any(state.prompt or state.steps
                                      for state in self._sequences[number].layers)

    @property
    def divisible(self) -> bool:
        """Whether a sequence's first pages are what they were when no more tokens had come: nothing is
        dropped, and nothing is encoded later than it is stored."""
        return self.keeps_all and not self.has_residual

    def fork_pages(self, parts: Sequence[tuple[int, int, int]], max_length: int = 0) -> int:
        """Begin a sequence of pages that others hold, shared, in a :attr:`divisible` cache.

        Args:
            parts: a sequence's number with the first of its pages and the one behind its last, one part
                behind the other. Together they are the beginning of a text, or of what follows on one, if
                the new sequence is for holding pages only.
            max_length: the argument of :meth:`add`.

        Raises:
            KeyError: a number is unknown.
        """
        sequences = [self._sequences[part[0]] for part in parts]
        fork = self.add(max_length)
        for index, (layer, copy) in enumerate(zip(self.layers, self._sequences[fork].layers)):
            layer.store.fork_pages([(sequence.layers[index], slice(*part[1:]))
                                    for sequence, part in zip(sequences, parts)], copy)
        return fork

    def truncate(self, number: int, pages: int) -> None:
        """Drop all but the first ``pages`` pages of a sequence, in a :attr:`divisible` cache. Raises
        KeyError."""
        for index, (layer, state) in enumerate(zip(self.layers, self._sequences[number].layers)):
            layer.store.truncate(state, pages)
            self._shrink(index)

    def take_back(self, number: int, count: int) -> None:
        """Forget the last ``count`` tokens of a sequence, in a :attr:`divisible` cache; its pages stay.
        Raises KeyError."""
        self._sequences[number].advance(-count)

    def free(self, ids: Iterable[int]) -> None:
        """End sequences and give back their memory. Raises KeyError for an unknown one."""
        for number in ids:
            for layer, state in zip(self.layers, self._sequences.pop(number).layers):
                layer.store.free(state)
        for index in range(len(self.layers)):
            self._shrink(index)

    def sequence(self, number: int) -> SequenceState:
        """The state of a sequence. Raises KeyError."""
        return self._sequences[number]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def seen(self, number: int) -> int:
        """Tokens that a sequence has had: the position of its next one."""
        return self._sequences[number].layers[-1].seen

    def slots(self, number: int) -> list[tuple[int, ...]]:
        """Slots that each layer's heads hold of a sequence."""
        return [tuple(row) for row in self._sequences[number].lengths.tolist()]

    def codec_fault(self, number: int) -> PluginError | None:
        """Why a plugin's codec is to blame where a sequence's output isn't finite; ``None`` if it isn't."""
        return codec_fault([layer.store for layer in self.layers], self._sequences[number], self.codecs,
                           self.spec)

    def bytes_of(self, number: int) -> int:
        """Bytes of a sequence's pages, those that it shares with others included, and of what is tracked."""
        sequence = self._sequences[number]
        total = sequence.tracked_bytes
        for layer, state in zip(self.layers, sequence.layers):
            for pool, heads in zip(layer.store.all, (state.pages, state.residual)):
                total += sum(map(len, heads)) * pool.page_bytes
        return total

    def step_bytes(self, number: int, index: int | None = None) -> int:
        """Bytes that a decode step reads of a sequence, in all layers or one: codes, and unencoded
        vectors."""
        total, layers = 0, list(zip(self.layers, self._sequences[number].layers))
        for layer, state in layers if index is None else [layers[index]]:
            page_bytes, residual_bytes = layer.store.page_bytes
            for length in state.lengths.tolist():
                codes = length
                if self.has_residual:
                    codes = max(0, min(length, self.codecs.border(length)) - self.codecs.first)
                total += codes * page_bytes + (length - codes) * residual_bytes
        return total // PAGE

    def positions(self, number: int, layer: int) -> torch.Tensor:
        """Original positions int32 ``[Hkv, S]`` of what a layer holds; −1 beyond a head's length."""
        return self.layers[layer].store.positions(self._sequences[number].layers[layer])

    def track_queries(self, sequence: SequenceState, wanted: bool) -> None:
        """Keep a sequence's queries from now on, or forget those that are kept."""
        if wanted != (sequence.query_window is not None):
            config, seen = self.config, sequence.layers[0].seen
            sequence.track(QueryWindow(len(self.layers), self.policy.query_window, config.num_heads,
                                       config.head_dim, seen, self.device) if wanted else None)

    def reserve(self, sequence: SequenceState, count: int) -> None:
        """Before a step in all layers: take pages for ``count`` more tokens, and lay out all tables."""
        if sequence.query_window is not None:
            for layer, state in zip(self.layers, sequence.layers):
                layer.scores.make_room(state, state.seen, count)
        if sequence.table is None or sequence.free_slots < count:
            for layer, state in zip(self.layers, sequence.layers):
                layer.store.reserve(state, count)
            sequence.lay_out(self.codecs.residual_length if self.has_residual else None)

    def advance(self, sequence: SequenceState, count: int) -> None:
        """After a step of ``count`` tokens in all layers: give back pages whose vectors it has encoded."""
        sequence.advance(count)
        if self.has_residual and sequence.has_stale_residual(self.codecs.residual_length):
            for index, state in enumerate(sequence.layers):
                self.free_encoded_residual(index, state)

    def free_encoded_residual(self, index: int, state: LayerState) -> None:
        """What :meth:`advance` frees, in one layer."""
        if self.layers[index].store.free_encoded_residual(state):
            self._shrink(index)

    def drop(self, index: int, state: LayerState) -> None:
        """Let a layer's policy drop what it chooses, and give back the memory."""
        if self.layers[index].drop(state):
            self._shrink(index)

    def _shrink(self, index: int) -> None:
        self.layers[index].store.shrink(
            lambda: (sequence.layers[index] for sequence in self._sequences.values()))
