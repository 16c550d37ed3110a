"""Block diffusion: an answer is written a block at a time, each of them in a few steps of the model.

A block begins as masks. A step of the model says for every mask which token stands there and how likely it
is; the likeliest are committed, and the next step sees them (https://arxiv.org/abs/2503.09573, with SDAR's
rule of what is committed, https://arxiv.org/abs/2510.06303). Keys and values of a block that isn't complete
are taken back after each step. Those of a complete one go into the cache with the first step of the next
block: its tokens see the complete block as those of a prompt do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from quantkit.models.config import BlockDiffusion
from quantkit.ops.rows import one_thread
from quantkit.runtime.core import NextLogits, Request, TokenResult
from quantkit.runtime.drafting.base import Drafter
from quantkit.runtime.loader import LoadedModel
from quantkit.support.call_text import made_with, named_options, read_call
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.frozen import Frozen


class Denoising(Frozen):
    """How blocks are written.

    Attributes:
        steps: steps of a block, at most; by default as many as it has tokens.
        confidence: a step also commits all tokens that are likelier than this; 1: no more than it must. By
            default as the family says.
    """

    steps: int | None = Field(default=None, ge=1)
    confidence: float | None = Field(default=None, gt=0, le=1)

    def of(self, diffusion: BlockDiffusion) -> tuple[int, float]:
        """Steps and confidence for a model."""
        size = diffusion.block_size
        steps = size if self.steps is None else min(self.steps, size)
        return steps, diffusion.confidence if self.confidence is None else self.confidence


def parse_denoising(text: str | None) -> Denoising | None:
    """Read ``2``, ``confidence=0.9`` or ``steps=2, confidence=0.9``. Raises UsageError: it can't be read, or
    a number is out of range."""
    if text is None:
        return None
    hint = 'quantkit generate MODEL PROMPT --blocks "steps=2, confidence=0.9"'
    _, written = read_call(f"blocks({text})", hint)
    options: dict[str, object] = dict(named_options(written, "steps", text, hint))
    if isinstance(options.get("confidence"), int):
        options["confidence"] = float(str(options["confidence"]))
    return made_with(Denoising, options, "writing of blocks", "docs/block-diffusion.md", hint)


@dataclass
class _Canvas:
    """The block of a request that is being written.

    Attributes:
        start: position of its first token.
        tokens: its ids; a mask where a token isn't known yet.
        step: steps that it had.
    """

    start: int
    tokens: list[int]
    step: int = 0


class Denoiser:
    """Writes the blocks of an engine's requests.

    Args:
        diffusion: of the model.
        denoising: how they are written.
    """

    def __init__(self, diffusion: BlockDiffusion, denoising: Denoising) -> None:
        self._size, self._mask = diffusion.block_size, diffusion.mask_token
        self._steps, self._confidence = denoising.of(diffusion)
        self._even = diffusion.even
        self._canvases: dict[int, _Canvas] = {}

    @property
    def rows(self) -> int:
        """The last of a request's tokens in a step, of which logits are needed."""
        return self._size

    def propose(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """What goes through the model for each request: the block before if its keys and values aren't in
        the cache yet, and the one that is being written."""
        fed = {}
        for request in requests:
            history = request.kv.history
            canvas = self._canvases.get(request.id)
            if canvas is None:
                start = len(history) // self._size * self._size
                known = history[start:]
                canvas = _Canvas(start, known + [self._mask] * (self._size - len(known)))
                self._canvases[request.id] = canvas
            seen = request.kv.manager.cache.seen(request.kv.sequence)
            fed[request.id] = history[seen:canvas.start] + canvas.tokens
        return fed

    def verify(self, part: NextLogits) -> Iterator[TokenResult]:
        """Commit tokens of each block by the logits of a step. Those of a block that is complete, or whose
        answer ends, are given to the request one by one; whoever takes one gives it to its request first."""
        assert part.drafts is not None and part.batch is not None
        for request, fed, logits, place in zip(part.requests, part.drafts, part.logits.split(self._size),
                                               part.places, strict=True):
            if request.done:
                continue
            try:
                part.batch.accept(place, len(fed) - self._size)
                tokens = self._commit(request, logits)
            except QuantkitError as error:
                yield TokenResult(request, error=request.kv.codec_fault() or error)
                continue
            except Exception as error:  # of its policy
                yield TokenResult(request, error=error)
                continue
            for token in tokens:
                yield TokenResult(request, token)
                if request.done or request.cancelled:
                    break

    def end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._canvases.pop(request.id, None)

    def _commit(self, request: Request, logits: torch.Tensor) -> list[int]:
        """Write to the canvas what is committed now. Returns the tokens that the request gets: all of a
        complete block, or those up to one that ends the answer if all before it are known."""
        canvas = self._canvases[request.id]
        masked = [at for at, token in enumerate(canvas.tokens) if token == self._mask]
        history = request.kv.history[:canvas.start] + [
            token for token in canvas.tokens if token != self._mask] if request.sampler.changes else []
        chances: dict[int, tuple[int, float]] = {}
        with one_thread():
            for at in masked:
                row = logits[at].float().clone()
                row[self._mask] = torch.finfo(torch.float32).min  # it stands for no token
                chances[at] = request.sampler.candidate(row, history)
        count = transfer_count(len(masked), canvas.step, self._steps, self._size, self._even)
        chosen = [at for at in masked if chances[at][1] > self._confidence]
        if len(chosen) < count:
            chosen = sorted(masked, key=lambda at: -chances[at][1])[:count]
        for at in chosen:
            canvas.tokens[at] = chances[at][0]
        canvas.step += 1
        request.result.denoising_steps += 1
        request.result.drafted_tokens += len(masked)
        request.result.accepted_tokens += len(chosen)
        given = canvas.tokens[len(request.kv.history) - canvas.start:]
        known = given[:given.index(self._mask)] if self._mask in given else given
        last = next((at for at, token in enumerate(known) if request.is_last(token, at + 1)), None)
        if last is not None:
            return known[:last + 1]
        if len(known) < len(given):
            return []
        self._canvases[request.id] = _Canvas(canvas.start + self._size, [self._mask] * self._size)
        return known


def transfer_count(masks: int, step: int, steps: int, size: int, even: bool) -> int:
    """Tokens that a step commits at least.

    Args:
        masks: tokens of the block that aren't known.
        step: steps that it had.
        steps: steps that it has, at most.
        size: tokens of the block.
        even: as dLLM shares them out: what is left, by the steps that are left, rounded. Otherwise as SDAR
            does: the same of the whole block in each step, the first ones one more.
    """
    left = steps - step
    if left <= 1:
        return masks
    count = round(masks / left) if even else size // steps + (step < size % steps)
    return max(1, min(count, masks))


def check_blocks(loaded: LoadedModel, drafter: Drafter | None, denoising: Denoising | None) -> None:
    """Raises UsageError: a model that writes blocks can't be run so, or one that doesn't is asked to."""
    name = f"{loaded.uri} writes blocks"
    if loaded.config.diffusion is None:
        if denoising is not None:
            raise UsageError(f"{loaded.uri} writes a token after the other",
                             why="it has no blocks to denoise",
                             next="leave out --blocks")
    elif not loaded.model.supports_mixed_batches:
        raise UsageError(f"{name}, and isn't run here",
                         why=loaded.fallback_reason or "blocks are written on a CPU only",
                         next=f"quantkit generate {loaded.uri} PROMPT --device cpu")
    elif drafter is not None:
        raise UsageError(f"{name}, and takes no drafts", why="all tokens of a block are guessed at once",
                         next="leave out --draft")


def check_block_request(diffusion: BlockDiffusion, prompt: Sequence[int], *, scores: bool, pools: bool,
                        constrained: bool) -> None:
    """Raises UsageError: a request asks for what a model that writes blocks hasn't, or holds a mask."""
    for asked, what, why, cure in (
            (scores, "log-probabilities", "a token's probability depends on what was committed before it",
             "leave out logprobs and echo"),
            (pools, "embeddings", "the model was trained to fill in masks", "ask a model for embeddings"),
            (constrained, "structured answers and no tool calls that must be",
             "tokens aren't chosen in their order",
             'leave out the format, or give "tool_choice": "auto" and tools without "strict"')):
        if asked:
            raise UsageError(f"a model that writes blocks gives no {what}", why=why, next=cure)
    if diffusion.mask_token in prompt:
        raise UsageError(f"token {prompt.index(diffusion.mask_token)} of the prompt is the mask",
                         why="it stands for a token that isn't known yet", next="leave it out")
