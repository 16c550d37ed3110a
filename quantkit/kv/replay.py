"""A prompt fed again behind itself: what is looked up to write it once more is what it consists of.

The idea is KVzip's, https://arxiv.org/abs/2505.23416: there the model is told to repeat the text; here the
text itself is what tells it to, piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.kv import watch

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.models.decoder import KVCacheProtocol, LanguageModel

CHUNK = 512
"""Tokens that go through the model at once."""
LEAD = 8
"""A piece begins with so many tokens of the one before, so that its first ones are found, too."""


def replay(cache: KVCache, number: int, model: LanguageModel, tokens: list[int], size: int) -> None:
    """Leave in a sequence's ``sums`` the largest attention that each slot gets while its text comes again.

    Args:
        cache: holds it.
        number: of the sequence.
        model: that filled it.
        tokens: the prompt.
        size: tokens of a piece; each is fed to a fork of its own.
    """
    sequence = cache.sequence(number)
    ends = [int(layer.lengths.max()) for layer in sequence.layers]
    for begin in range(0, len(tokens), size):
        fork = cache.fork(number)
        other = cache.sequence(fork)
        for start in range(max(0, begin - LEAD), min(begin + size, len(tokens)), CHUNK):
            ids = torch.tensor([tokens[start:min(start + CHUNK, begin + size)]], device=cache.device)
            batch: KVCacheProtocol = cache.batch([fork], "replay")
            model(ids, batch.next_positions(ids.shape[1]), batch, torch.zeros(1, dtype=torch.int64))
        for index, (layer, copy, end) in enumerate(zip(sequence.layers, other.layers, ends)):
            watch.absorb(cache, index, copy, copy.seen)
            assert copy.sums is not None
            found = copy.sums[:, :end]
            layer.sums = found.clone() if layer.sums is None else torch.maximum(layer.sums, found)
        cache.free([fork])
