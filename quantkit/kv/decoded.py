"""What the CPU program reads of a cache whose codec has no kernel: its pages decoded to float32.

The program stores each token's key and value there as they were computed. Between that and attention the
codec encodes them, in Python, and leaves what the codes decode to in their place. Attention therefore reads
what is stored, as with every codec, and decoding isn't repeated in each step.

As many layers as fit into a limit keep their pages decoded. The others share memory for one layer, into which
their pages are decoded in each step. Attention gets the same numbers in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.kv.base import PAGE
from quantkit.kv.layer import LayerCache
from quantkit.kv.page_pool import MoveCounter, slots_of
from quantkit.kv.sequence import LayerState
from quantkit.kv.store import PageStore

LIMIT = 1 << 30
"""Bytes of pages that a cache keeps decoded, at most, where its memory has no limit."""
REGAIN = 0.75
"""A layer's pages are decoded again where all would fill less than this share of the limit."""


class DecodedPages:
    """The decoded pages of a cache on a CPU.

    Args:
        move_counter: counts how often their pages moved.
        dim: the head dimension.
        limit: bytes of pages that are kept decoded, at most.
    """

    def __init__(self, layers: Sequence[LayerCache], move_counter: MoveCounter, dim: int,
                 limit: int = LIMIT) -> None:
        self._layers = layers
        self._move_counter = move_counter
        self._moves = -1
        self._dim = dim
        self._limit = limit
        self._shared = self._memory(0)

    def bound(self, limit: int) -> None:
        """Keep no more than ``limit`` bytes decoded from now on."""
        self._limit, self._moves = max(0, min(self._limit, limit)), -1

    @property
    def shared_bytes(self) -> int:
        """Bytes of the memory that the other layers share."""
        return sum(vectors.nbytes for vectors in self._shared.values())

    def fit(self) -> None:
        """After pages were taken: choose the layers that keep theirs decoded; make room for the others."""
        if self._moves == self._move_counter.count:
            return
        stores = [layer.store for layer in self._layers]
        total = kept = 0
        for store in stores:
            total += store.decoded_bytes
            if total > self._limit * (1.0 if store.has_decoded_pages else REGAIN):
                break
            kept += 1
        for index, store in enumerate(stores):
            if store.has_decoded_pages and index >= kept:
                store.pages.forget_derived()
            elif not store.has_decoded_pages and index < kept:
                store.keep_decoded()
        pages = max((store.pages.total for store in stores[kept:]), default=0)
        if len(self._shared["k"]) != pages:
            self._shared = self._memory(pages)
            self._move_counter.count += 1
        self._moves = self._move_counter.count

    def vectors(self, layer: int) -> dict[str, torch.Tensor]:
        """What the program writes to and reads from, by side: float32 ``[pages, PAGE, D]``."""
        store = self._layers[layer].store
        return {side: store.decoded(side) for side in "kv"} if store.has_decoded_pages else self._shared

    def encode(self, layer: int, states: Sequence[LayerState], counts: Sequence[int]) -> None:
        """Encode the tokens that a layer of a step has just stored, a sequence at a time: what torch computes
        for one may depend on what else is in a tensor.

        Args:
            states: the step's sequences in this layer; their lengths don't count the step's tokens yet.
            counts: tokens that each of them adds.
        """
        store = self._layers[layer].store
        for state, count in zip(states, counts):
            if store.residual is not None:
                store.encode_full_pages(state, count)
            else:
                slots = [slot for pages, length in zip(state.pages, state.lengths.tolist())
                         for slot in slots_of(pages, length, count)]
                store.encode_decoded(slots, self.vectors(layer))
            if not store.has_decoded_pages:
                self._decode(store, state)

    def _decode(self, store: PageStore, state: LayerState) -> None:
        """Decode all pages of a sequence into the memory that layers share."""
        pages = torch.tensor([page for head in state.pages for page in head], dtype=torch.int64)
        for side, vectors in self._shared.items():
            vectors.index_copy_(0, pages, store.decode_pages(side, pages).float())

    def _memory(self, pages: int) -> dict[str, torch.Tensor]:
        return {side: torch.zeros(pages, PAGE, self._dim) for side in "kv"}
