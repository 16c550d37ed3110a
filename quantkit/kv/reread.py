"""A prompt fed again behind itself: what is looked up to write it once more is what it consists of.

The idea is KVzip's, https://arxiv.org/abs/2505.23416: there the model is told to repeat the text; here the
text itself is what tells it to, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch

from quantkit.errors import UsageError
from quantkit.kv import attention_scores

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.models.decoder import KVCacheProtocol, LanguageModel

CHUNK = 512
"""Tokens that go through the model at once."""
LEAST = 64
"""Shorter pieces are as good as nothing."""
LEAD = 8
"""A piece begins with so many tokens of the one before, so that its first ones are found, too."""


def reread(cache: KVCache, number: int, model: LanguageModel, tokens: list[int], size: int,
           portion: Callable[[], int]) -> Generator[int, None, None]:
    """Leave in a sequence's ``sums`` the largest attention that each slot gets while its text comes again.

    Args:
        cache: holds it.
        number: of the sequence.
        model: that filled it.
        tokens: the prompt.
        size: tokens of a piece, at most; each is fed to a fork of its own.
        portion: how many tokens go through the model at once; asked every time.

    Yields:
        Tokens that just went through the model; other steps may come between.

    Raises:
        UsageError: the model's context has no room for a piece behind the prompt.
    """
    sequence = cache.sequence(number)
    ends = [int(layer.lengths.max()) for layer in sequence.layers]
    # behind the prompt, where the model still knows positions
    size = min(size, cache.config.max_position_embeddings - cache.seen(number) - LEAD)
    if size < min(LEAST, len(tokens)):
        raise UsageError(f"a prompt of {cache.seen(number)} tokens is too long for {cache.policy.name!r}",
                         why=f"it comes again behind itself, and the model's context has "
                             f"{cache.config.max_position_embeddings}", next="use --kv 'expected(0.5)'")
    for begin in range(0, len(tokens), size):
        fork = cache.fork(number)
        try:
            found = yield from _looked_at(cache, fork, model, tokens[max(0, begin - LEAD):begin + size],
                                          portion)
        finally:
            cache.free([fork])
        for layer, peaks, end in zip(sequence.layers, found, ends):
            if peaks is None:
                continue
            peaks = peaks[:, :end].clone()
            layer.sums = peaks if layer.sums is None else torch.maximum(layer.sums, peaks)


def _looked_at(cache: KVCache, fork: int, model: LanguageModel, tokens: list[int],
               portion: Callable[[], int]) -> Generator[int, None, list[torch.Tensor | None]]:
    """Feed these; returns of each layer that the policy is for float32 ``[Hkv, S]``."""
    start = 0
    while start < len(tokens):
        some = tokens[start:start + portion()]
        ids = torch.tensor([some], device=cache.device)
        batch: KVCacheProtocol = cache.batch([fork], "reread")
        model.hidden(ids, batch.next_positions(len(some)), batch)
        start += len(some)
        yield len(some)
    found: list[torch.Tensor | None] = []
    for index, layer in enumerate(cache.sequence(fork).layers):
        attention_scores.accumulate(cache, index, layer, layer.seen)
        found.append(layer.sums)
    return found
