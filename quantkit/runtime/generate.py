"""Prefill and decode for a batch of prompts of different lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from quantkit.errors import UsageError
from quantkit.kv.cache import KVCache
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampler, Sampling
from quantkit.runtime.stop import StopStrings

FinishReason = Literal["stop", "length", "stop_string"]
PREFILL_CHUNK = 512
"""Tokens of each prompt that go through the model at once."""


@dataclass
class Completion:
    """One prompt's continuation.

    Attributes:
        prompt_tokens: length of the prompt.
        token_ids: new ids, with the end-of-sequence one or those that make up the stop string.
        text: their text without special tokens, up to the stop string.
        finish_reason: ``stop`` (the model ended the sequence), ``stop_string``, or ``length``
            (``max_tokens`` are there).
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens of one call: all prompts' prefill, and the decode steps after it."""

    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float


class _Sequence:
    """One member of the batch while it lives."""

    def __init__(self, index: int, prompt: Sequence[int], sampling: Sampling, loaded: LoadedModel) -> None:
        self.index, self.prompt, self.sampling = index, list(prompt), sampling
        self.result = Completion(len(prompt))
        self._sampler, self._stops = Sampler(sampling), StopStrings(sampling.stop)
        self._stream, self._eos = loaded.tokenizer.stream(), loaded.tokenizer.eos_ids
        self.done = False

    @property
    def position(self) -> int:
        """Of the next token to be fed: the last one sampled."""
        return len(self.prompt) + len(self.result.token_ids) - 1

    def step(self, logits: torch.Tensor) -> str:
        """Sample from ``logits [vocab]``; returns the text that may be shown."""
        ids = self.result.token_ids
        token = self._sampler(logits, self.prompt + ids)
        ids.append(token)
        if token in self._eos and not self.sampling.ignore_eos:
            self.done, self.result.finish_reason = True, "stop"
        elif len(ids) >= self.sampling.max_tokens:
            self.done = True
        text = self._stops.push(self._stream.push(token) if self.result.finish_reason != "stop" else "")
        if self.done:
            text += self._stops.push(self._stream.finish())
        if self._stops.found is not None:
            self.done, self.result.finish_reason = True, "stop_string"
        elif self.done:
            text += self._stops.finish()
        self.result.text += text
        return text


@torch.inference_mode()
def generate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling],
             on_text: Callable[[int, str], None] | None = None,
             on_done: Callable[[Timing], None] | None = None) -> list[Completion]:
    """Continue every prompt.

    Args:
        loaded: the model.
        prompts: token ids, one list a prompt; lengths may differ.
        sampling: for all, or one a prompt.
        on_text: called with a prompt's index and a piece of its text as soon as it is certain.
        on_done: called once with what the call took.

    Returns:
        One completion a prompt, in the prompts' order. A sequence's tokens depend on its prompt and
        its sampling only; in a half-precision dtype the last bits of logits, and so a near tie, may
        depend on how many sequences run side by side.

    Raises:
        UsageError: a prompt is empty, has an id out of range, or is too long for the model.
        QuantkitError: the model's output is not finite.
    """
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(settings) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts have {len(settings)} sampling settings")
    for prompt, one in zip(prompts, settings):
        _check(loaded, prompt, one)
    live = [_Sequence(i, p, s, loaded) for i, (p, s) in enumerate(zip(prompts, settings))]
    results = [seq.result for seq in live]
    if not live:
        return results
    longest = max(len(seq.prompt) + seq.sampling.max_tokens for seq in live)
    cache = KVCache(loaded.config, len(live), longest, loaded.dtype, loaded.model.device)
    start = time.perf_counter()
    logits = _prefill(loaded, live, cache)
    middle = time.perf_counter()
    decoded = 0
    while True:
        for seq, row in zip(live, logits):
            text = seq.step(row)
            if text and on_text is not None:
                on_text(seq.index, text)
        keep = [i for i, seq in enumerate(live) if not seq.done]
        if not keep:
            break
        if len(keep) < len(live):
            live = [live[i] for i in keep]
            cache.select(keep)
        ids = torch.tensor([[seq.result.token_ids[-1]] for seq in live], device=loaded.model.device)
        positions = torch.tensor([[seq.position] for seq in live], device=loaded.model.device)
        logits = loaded.model(ids, positions, cache)[:, -1]
        decoded += len(live)
    if on_done is not None:
        on_done(Timing(sum(map(len, prompts)), middle - start, decoded, time.perf_counter() - middle))
    return results


def _prefill(loaded: LoadedModel, live: Sequence[_Sequence], cache: KVCache) -> torch.Tensor:
    """Logits ``[B, vocab]`` after each prompt's last token; prompts are padded on the right."""
    lengths = torch.tensor([len(seq.prompt) for seq in live])
    longest = int(lengths.max())
    ids = torch.zeros(len(live), longest, dtype=torch.int64)
    positions = torch.full_like(ids, -1)
    for row, seq in enumerate(live):
        ids[row, :len(seq.prompt)] = torch.tensor(seq.prompt)
        positions[row, :len(seq.prompt)] = torch.arange(len(seq.prompt))
    ends = lengths - 1
    result: torch.Tensor | None = None
    for begin in range(0, longest, PREFILL_CHUNK):
        part = slice(begin, min(begin + PREFILL_CHUNK, longest))
        last = (ends - begin).clamp(0, part.stop - begin - 1)
        device = loaded.model.device
        logits = loaded.model(ids[:, part].to(device), positions[:, part].to(device), cache,
                              last=last.to(device))
        here = (ends >= part.start) & (ends < part.stop)
        result = logits.clone() if result is None else torch.where(here[:, None].to(device), logits, result)
    assert result is not None
    return result


def _check(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling) -> None:
    limit = loaded.config.max_position_embeddings
    if not prompt:
        raise UsageError("a prompt is empty", why="there is no token to continue from",
                         next="give at least one character")
    if not all(0 <= token < loaded.config.vocab_size for token in prompt):
        raise UsageError("a prompt has a token that the model doesn't know",
                         why=f"ids go from 0 to {loaded.config.vocab_size - 1}")
    if len(prompt) + sampling.max_tokens > limit:
        raise UsageError(f"the prompt has {len(prompt)} tokens and {sampling.max_tokens} are to follow",
                         why=f"the model was made for {limit} in all",
                         next=f"shorten the prompt, or --max-tokens {max(limit - len(prompt), 1)}")
