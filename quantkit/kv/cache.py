"""The KV cache: a policy × a codec over pages, a page table for every sequence, layer and key head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from quantkit.errors import UsageError
from quantkit.kv import attention_scores
from quantkit.kv.base import PAGE, KVPolicy, Layout, Phase
from quantkit.kv.batch import Batch
from quantkit.kv.build import build_kv_codecs, build_policy, by_layer
from quantkit.kv.page_pool import MoveCounter, PagePool
from quantkit.kv.sequence import LayerState, SequenceState
from quantkit.kv.store import Store
from quantkit.models.config import ModelConfig
from quantkit.spec import KVSpec

_numbers = itertools.count()


class KVCache:
    """Keys and values of any number of sequences of any lengths.

    What a query reads is what is stored: its own token's codes too. So a result doesn't depend on what other
    sequences are there, nor on how a prompt was cut into chunks.

    Args:
        config: gives layers, key heads and head dimension.
        spec: policy and codec.
        dtype: in which the model computes keys and values.
        device: where pages lie.

    Attributes:
        dtype, device: of keys and values as they are computed; where pages lie.
        policy: the one that was asked for.
        policies: of each layer: that one, or the window that the model itself has there.
        keeps_all: whether none of them drops anything.
        stores: the layers' pages.
        bytes_per_token: of codes, scales and positions, in all layers and heads; a page's share where its
            tokens are encoded together. Vectors that wait take :attr:`residual_bytes_per_token`.

    Raises:
        UsageError: the policy's options or the head dimension don't fit.
    """

    def __init__(self, config: ModelConfig, spec: KVSpec | None = None, dtype: torch.dtype = torch.bfloat16,
                 device: torch.device | str = "cpu") -> None:
        self.spec = spec or KVSpec()
        self.codings = build_kv_codecs(self.spec)
        self.heads, self._layers = config.num_kv_heads, config.num_layers
        self.config, self.scale, self.softcap = config, config.attention_scale, config.attention_softcap
        self.dtype, self.device, self.moves = dtype, torch.device(device), MoveCounter()
        self.stores = [Store(self.codings, self.heads, config.head_dim, dtype, not one.keeps_all, self.device,
                             self.moves) for one in self._by_layer(build_policy(self.spec))]
        self.bytes_per_token, self.residual_bytes_per_token = (
            sum(size) * self.heads // PAGE for size in zip(*(store.page_bytes for store in self.stores)))
        self.number = next(_numbers)
        self._sequences: dict[int, SequenceState] = {}
        self._ids = itertools.count()
        self.policy = build_policy(self.spec, self._takes)
        self.policies = self._by_layer(self.policy)
        self.keeps_all = all(one.keeps_all for one in self.policies)

    def _by_layer(self, policy: KVPolicy) -> list[KVPolicy]:
        return by_layer(policy, self.config, self.codings.first)

    def _takes(self, policy: KVPolicy) -> int:
        """Bytes of a sequence while it decodes, with a policy whose budget is tokens."""
        found, asked = 0, policy.listens("decode")
        for one, store in zip(self._by_layer(policy), self.stores):
            budget: int = one.model_dump()["budget"]
            slots, (page, waits) = budget + one.slack, store.page_bytes
            page += PAGE * 4 if asked and one.tracks == "sums" else 0
            if store.residual is not None:  # before a page is encoded, its vectors wait
                fixed = self.codings.first + self.codings.residual_length
                found += -(-(fixed + PAGE) // PAGE) * waits
                if one.visible:  # pages of which a part stays
                    found += (1 + one.release_granularity // PAGE) * page
                slots = max(1, slots - fixed)
            # heads that keep more or fewer than others round up to pages each by itself
            found += (-(-slots // PAGE) + (0 if one.uniform_budget else 1)) * page
        queries = policy.queries * self.config.num_heads * self.config.head_dim * 4 if asked else 0
        return found * self.heads + queries * self._layers

    @property
    def pages(self) -> list[PagePool]:
        """Of codes, by layer."""
        return [store.pages for store in self.stores]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages that exist, free ones included, and of what the policy watches."""
        return self._watched_bytes + sum(
            pages.allocated_bytes for store in self.stores for pages in store.all)

    @property
    def used_bytes(self) -> int:
        """The same of pages that belong to a sequence."""
        return self._watched_bytes + sum(
            pages.used * pages.page_bytes for store in self.stores for pages in store.all)

    @property
    def _watched_bytes(self) -> int:
        # another thread may ask
        return sum(sequence.watched_bytes for sequence in list(self._sequences.values()))

    def add(self, max_length: int = 0) -> int:
        """Begin a sequence; returns its id.

        Args:
            max_length: how many tokens it will have in the end at most. Only a model whose rotation depends
                on that (longrope) asks; 0 means few.
        """
        number = next(self._ids)
        self._sequences[number] = SequenceState(self._layers, self.heads, max_length, self.codings.first)
        return number

    def fork(self, number: int, *, shared: bool = True) -> int:
        """Begin a sequence that holds what another does; from then on each goes its own way.

        Args:
            number: of the other.
            shared: both hold the same pages, until one writes to them; else these are copied now.

        Returns:
            The new one's id.

        Raises:
            KeyError: ``number`` is unknown.
        """
        old = self._sequences[number]
        copy = self.add(old.max_length)
        own = self._sequences[copy]
        for store, held, mine in zip(self.stores, old.layers, own.layers):
            store.fork(held, mine, shared)
        own.tokens = list(old.tokens)
        own.asked = None if old.asked is None else old.asked.copy()
        return copy

    def prefix(self, number: int) -> int:
        """:meth:`fork` for another text that begins with all that a sequence had so far.

        It then reads what it would if it had been fed that beginning itself. What a window leaves behind is
        hidden from what follows whatever that is; with other policies that drop, what stays depends on where
        the prompt ended, so that nothing is shared from there on.

        Raises:
            KeyError: ``number`` is unknown.
            UsageError: the prompt has ended, and the policy is such a one.
        """
        held = self._sequences[number]
        whole = all(one.keeps_all or one.visible is not None for one in self.policies)
        if not whole and any(layer.prompt or layer.steps for layer in held.layers):
            raise UsageError(f"what the KV policy {self.policy.name!r} left of a text can't begin another",
                             why="what it keeps depends on where the first one's prompt ended",
                             next="fork it before its prompt's end")
        return self.fork(number)

    def free(self, ids: Iterable[int]) -> None:
        """End sequences and give back their memory. Raises KeyError for an unknown one."""
        for number in ids:
            for store, held in zip(self.stores, self._sequences.pop(number).layers):
                store.release(held)
        for layer in range(self._layers):
            self._shrink(layer)

    def batch(self, ids: Sequence[int], phase: Phase = "prefill",
              portion: Callable[[], int] | None = None) -> Batch:
        """These sequences as rows of one step of the model, in this order.

        Args:
            ids: of :meth:`add`, each once.
            phase: which part of a request the step is, see :data:`~quantkit.kv.base.Phase`; policies may act
                after it.
            portion: leave what policies do then to the caller, who finds it in :attr:`Batch.rest`; where that
                takes tokens through the model, so many at once. By default it is done when the model returns.
        """
        return Batch(self, ids, phase, portion)

    def sequence(self, number: int) -> SequenceState:
        """What is known of a sequence. Raises KeyError."""
        return self._sequences[number]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Ids of all sequences."""
        return tuple(self._sequences)

    def seen(self, number: int) -> int:
        """Tokens that a sequence had: the position of its next one."""
        return self._sequences[number].layers[-1].seen

    def held(self, number: int) -> list[tuple[int, ...]]:
        """Slots that each layer's heads hold of a sequence."""
        return [tuple(row) for row in self._sequences[number].lengths.tolist()]

    def bytes_of(self, number: int) -> int:
        """Bytes of a sequence's pages, those that it shares with others included, and of what is watched."""
        held = self._sequences[number]
        found = held.watched_bytes
        for store, layer in zip(self.stores, held.layers):
            for pages, own in zip(store.all, (layer.pages, layer.residual)):
                found += sum(map(len, own)) * pages.page_bytes
        return found

    def step_bytes(self, number: int) -> int:
        """Bytes that a decode step reads of a sequence: codes, and vectors that wait."""
        found = 0
        for store, layer in zip(self.stores, self._sequences[number].layers):
            for length in layer.lengths.tolist():
                codes = length if store.residual is None else max(
                    0, min(length, self.codings.border(length)) - self.codings.first)
                found += codes * store.pages.page_bytes
                found += 0 if store.residual is None else (length - codes) * store.residual.page_bytes
        return found // PAGE

    def positions(self, number: int, layer: int) -> torch.Tensor:
        """Original positions int32 ``[Hkv, S]`` of what a layer holds; −1 beyond a head's length."""
        return self.stores[layer].positions(self._sequences[number].layers[layer])

    def reserve(self, held: SequenceState, count: int) -> None:
        """Before a step in all layers: pages for so many more tokens, laid out as a table of all."""
        if held.asked is not None:
            for index, layer in enumerate(held.layers):
                attention_scores.make_room(self, index, layer, layer.seen, count)
        if held.table is None or held.room < count:
            for store, layer in zip(self.stores, held.layers):
                store.reserve(layer, count)
            held.lay_out(None if self.stores[0].residual is None else self.codings.residual_length)

    def settle(self, held: SequenceState, count: int) -> None:
        """After a step of so many tokens in all layers: give back pages whose vectors it has encoded."""
        held.advance(count)
        if self.stores[0].residual is not None and held.behind(self.codings.residual_length):
            for layer, one in enumerate(held.layers):
                self.settle_layer(layer, one)

    def settle_layer(self, layer: int, held: LayerState) -> None:
        """The same, of one layer."""
        if self.stores[layer].settle(held):
            self._shrink(layer)

    def act(self, layer: int, held: LayerState) -> None:
        """Let the policy drop what it will, and give back the pages."""
        store, policy = self.stores[layer], self.policies[layer]
        kept = policy.keep(attention_scores.policy_view(self, layer, held))
        if kept is not None:
            # what queries don't see anyway may stay, if all behind it had to be encoded again
            if policy.visible is not None and store.residual is not None:
                store.thin(held, list(kept), policy.release_granularity // PAGE)
            else:
                store.keep(held, list(kept))
            self._shrink(layer)

    def _shrink(self, layer: int) -> None:
        self.stores[layer].shrink([sequence.layers[layer] for sequence in self._sequences.values()])


__all__ = ["Batch", "KVCache", "LayerState", "Layout"]
