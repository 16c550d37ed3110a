"""KVzip's scores: feed the prompt again and record the attention that each of its positions receives.

After https://arxiv.org/abs/2505.23416. There the model is told to repeat the text. Here a chunk of the text
is fed behind the whole of it, which makes the model look up the rest by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch

from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.models.interfaces import KVCacheProtocol, LanguageModel

CHUNK = 512
"""Tokens that go through the model at once."""
MIN_CHUNK = 64
"""Shorter chunks score too little."""
OVERLAP = 8
"""Each chunk begins with this many tokens of the one before, so that its first tokens are looked up too."""


def reread(cache: KVCache, number: int, batch_of: Callable[[int], KVCacheProtocol], model: LanguageModel,
           tokens: list[int], size: int, token_budget: Callable[[], int]) -> Generator[int, None, None]:
    """Leave in a sequence's ``attention_received`` the largest attention that each slot gets from its own
    text.

    Args:
        cache: holds the sequence.
        number: id of the sequence.
        batch_of: a fork's id → it as the one row of a step of the phase ``reread``.
        model: the model that filled the cache.
        tokens: the prompt's token ids.
        size: tokens of a chunk, at most; each is fed to a fork of its own.
        token_budget: asked every time for the number of tokens that go through the model at once.

    Yields:
        The number of tokens that just went through the model; other steps may come between.

    Raises:
        UsageError: the model's context has no room for a chunk behind the prompt.
    """
    sequence = cache.sequence(number)
    ends = [int(state.lengths.max()) for state in sequence.layers]
    # behind the prompt, where the model still knows positions
    size = min(size, cache.config.max_position_embeddings - cache.seen(number) - OVERLAP)
    if size < min(MIN_CHUNK, len(tokens)):
        raise UsageError(f"a prompt of {cache.seen(number)} tokens is too long for {cache.policy.name!r}",
                         why=f"it comes again behind itself, and the model's context has "
                             f"{cache.config.max_position_embeddings}", next="use --kv 'expected(0.5)'")
    for begin in range(0, len(tokens), size):
        fork = cache.fork(number)
        try:
            chunk = tokens[max(0, begin - OVERLAP):begin + size]
            received = yield from _attention_from(cache, fork, batch_of, model, chunk, token_budget)
        finally:
            cache.free([fork])
        for state, largest, end in zip(sequence.layers, received, ends):
            if largest is None:
                continue
            largest = largest[:, :end].clone()
            before = state.attention_received
            state.attention_received = largest if before is None else torch.maximum(before, largest)


def _attention_from(cache: KVCache, fork: int, batch_of: Callable[[int], KVCacheProtocol],
                    model: LanguageModel, tokens: list[int], token_budget: Callable[[], int],
                    ) -> Generator[int, None, list[torch.Tensor | None]]:
    """Feed ``tokens``; returns float32 ``[Hkv, S]`` for each layer that the policy manages."""
    start = 0
    while start < len(tokens):
        chunk = tokens[start:start + token_budget()]
        ids = torch.tensor([chunk], device=cache.device)
        batch = batch_of(fork)
        model.hidden(ids, batch.next_positions(len(chunk)), batch)
        start += len(chunk)
        yield len(chunk)
    received: list[torch.Tensor | None] = []
    for layer, state in zip(cache.layers, cache.sequence(fork).layers):
        layer.scores.accumulate(state, state.seen)
        received.append(state.attention_received)
    return received
