"""KVzip's scores: feed the prompt again and record the attention that each of its positions receives.

After https://arxiv.org/abs/2505.23416. There the model is told to repeat the text. Here a section of the text
is fed behind the whole of it, which makes the model look up the rest by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.models.interfaces import LanguageModel

AT_ONCE = 512
"""Tokens that go through the model at once."""
MIN_SECTION = 64
"""Shorter sections score too little."""
OVERLAP = 8
"""Each section begins with this many tokens of the one before, so that its first tokens are looked up too."""


def finish_prompt(model: LanguageModel, batch: Batch, prompt: Sequence[int],
                  token_budget: Callable[[], int] = lambda: AT_ONCE) -> Generator[int, None, None]:
    """Let KV policies act that a prompt's last step deferred, after the prompt was read again for those that
    ask for it.

    Args:
        model: the model that ran the step.
        batch: the step's one row, with its policies deferred.
        prompt: token ids of the whole prompt.
        token_budget: returns how many tokens may go through the model at once; asked every time.

    Yields:
        After each part of the work, the number of tokens that went through the model for it. Other steps may
        come between.

    Raises:
        UsageError: the model's context has no room to read the prompt again.
    """
    cache, number = batch.cache, batch.numbers[0]
    for _ in batch.policy_actions():
        yield 0
    if cache.policy.reread_prompt is None:
        return
    yield from reread(cache, number, model, prompt, cache.policy.reread_prompt, token_budget)
    for index, state in enumerate(cache.sequence(number).layers):
        if cache.layers[index].policy.reread_prompt:
            cache.drop(index, state)
            state.attention_received = None
            yield 0


def reread(cache: KVCache, number: int, model: LanguageModel, tokens: Sequence[int], size: int,
           token_budget: Callable[[], int]) -> Generator[int, None, None]:
    """Leave in a sequence's ``attention_received`` the largest attention that each slot gets from its own
    text.

    Args:
        cache: holds the sequence.
        model: the model that filled the cache.
        size: tokens of a section, at most; each is fed to a fork of its own.
        token_budget: asked every time for the number of tokens that go through the model at once.

    Yields:
        The number of tokens that just went through the model; other steps may come between.

    Raises:
        UsageError: the model's context has no room for a section behind the prompt.
    """
    sequence = cache.sequence(number)
    ends = [int(state.lengths.max()) for state in sequence.layers]
    # behind the prompt, where the model still knows positions
    size = min(size, cache.config.max_position_embeddings - cache.seen(number) - OVERLAP)
    if size < min(MIN_SECTION, len(tokens)):
        raise UsageError(f"a prompt of {cache.seen(number)} tokens is too long for {cache.policy.name!r}",
                         why=f"it comes again behind itself, and the model's context has "
                             f"{cache.config.max_position_embeddings}", next="use --kv 'expected(0.5)'")
    for begin in range(0, len(tokens), size):
        fork = cache.fork(number)
        try:
            section = tokens[max(0, begin - OVERLAP):begin + size]
            received = yield from _attention_from(cache, fork, model, section, token_budget)
        finally:
            cache.free([fork])
        for state, largest, end in zip(sequence.layers, received, ends):
            if largest is None:
                continue
            largest = largest[:, :end].clone()
            before = state.attention_received
            state.attention_received = largest if before is None else torch.maximum(before, largest)


def _attention_from(cache: KVCache, fork: int, model: LanguageModel, tokens: Sequence[int],
                    token_budget: Callable[[], int]) -> Generator[int, None, list[torch.Tensor | None]]:
    """Feed ``tokens``; returns float32 ``[Hkv, S]`` for each layer that the policy manages."""
    start, diffusion = 0, cache.config.diffusion
    while start < len(tokens):
        count = token_budget()
        if diffusion is not None:  # a block that is cut isn't seen whole by its first tokens
            seen, size = cache.seen(fork), diffusion.block_size
            count = max(seen // size + 1, (seen + count) // size) * size - seen
        part = tokens[start:start + count]
        ids = torch.tensor([part], device=cache.device)
        batch = Batch(cache, [fork], "reread")
        model.hidden(ids, batch.next_positions(len(part)), batch)
        start += len(part)
        yield len(part)
    received: list[torch.Tensor | None] = []
    for layer, state in zip(cache.layers, cache.sequence(fork).layers):
        layer.scores.accumulate(state, state.seen)
        received.append(state.attention_received)
    return received
