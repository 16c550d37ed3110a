"""Scores texts with models that write blocks, by a bound of their likelihood.

Such a model says what stands at a mask beside the tokens of its block that are known. If a block's n tokens
are uncovered one by one in an order drawn at random, the mean over orders of what they cost is never less
than the text's negative log-likelihood: the bound that these models are trained by
(https://arxiv.org/abs/2503.09573, its form as an order: https://arxiv.org/abs/2110.02037). A token is
predicted beside k − 1 other masks there, with each k of 1 … n and each choice of the others equally likely.

A random permutation's cycles are like that: the length of the one that a token is in is uniform over 1 … n,
and all choices of its other members are alike. So a step masks one cycle and predicts all of it. Each token
is predicted once, and a block takes 1 + 1/2 + … + 1/n steps on average.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.evaluation.quality.feed import prefill, without_codec_fault
from quantkit.kv.base import PAGE
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.config import BlockDiffusion
from quantkit.models.decoder import padded_rows
from quantkit.runtime.kv_manager import check_blocks_in
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import QuantkitError, UsageError

SIDE_BY_SIDE = 8
"""Windows that go through a model together, at most."""
KV_BYTES = 2**29
"""Keys and values of the texts that go side by side, at most; a single one may take more."""
CHOICE = 1
"""The way in which masks are chosen. Measurements are kept by it: raise it when that changes."""

Order = tuple[tuple[int, ...], ...]
"""A permutation for each block of a text of the tokens that aren't known."""


@dataclass(frozen=True)
class MaskedText:
    """A text whose end is scored.

    Attributes:
        row: the number of a sequence that holds the whole blocks of what is known.
        ids: all of its tokens.
        known: the first of them that aren't scored.
        order: says by its cycles which tokens are masked together.
    """

    row: int
    ids: Sequence[int]
    known: int
    order: Order


def begin_text(loaded: LoadedModel, cache: KVCache, ids: Sequence[int], known: int) -> int:
    """Begin a sequence and read what is known of a text, up to its last whole block.

    Returns:
        The number of the sequence.

    Raises:
        UsageError: the model can't be scored with this KV setting or on this device.
    """
    diffusion = blocks_of(loaded)
    if loaded.model.device.type != "cpu":
        raise UsageError(f"{loaded.uri} writes blocks, and isn't run here",
                         why="blocks are read on a CPU only", next="--device cpu")
    # torch's operators take tokens back too, but for those that they encoded
    check_blocks_in(cache, not cache.has_residual or loaded.model.chunk_invariant(cache))
    row = cache.add(len(ids))
    if read := known // diffusion.block_size * diffusion.block_size:
        prefill(loaded, cache, row, ids[:read], prompt=ids[:known])
    return row


def masked_states(loaded: LoadedModel, cache: KVCache, texts: Sequence[MaskedText]) -> list[torch.Tensor]:
    """What the last layer leaves where tokens were masked, each of them once.

    Every step reads what a step of an answer would: finished blocks from the cache, and its own block.

    Args:
        loaded: a model that writes blocks.
        cache: with the texts' sequences.
        texts: scored side by side.

    Returns:
        For each text ``[n, hidden]``, of its tokens that aren't known.

    Raises:
        UsageError: a text has the mask in it.
        PluginError: a plugin's codec makes them not finite.
    """
    diffusion, device = blocks_of(loaded), loaded.model.device
    for text in texts:
        if diffusion.mask_token in text.ids:
            raise UsageError(f"token {list(text.ids).index(diffusion.mask_token)} of a text is the mask",
                             why="it stands for a token that isn't known yet", next="leave it out")
    steps = [_steps(text, diffusion) for text in texts]
    states = [torch.empty(0)] * len(texts)
    while steps_now := {number: step for number, left in enumerate(steps)
                        if (step := next(left, None)) is not None}:
        batch = Batch(cache, [texts[number].row for number in steps_now], "decode",
                      tentative=range(len(steps_now)))
        padded = padded_rows([step.before + step.canvas for step in steps_now.values()], batch, device)
        hidden = loaded.model.hidden(padded.ids, padded.positions, batch)
        for place, (number, step) in enumerate(steps_now.items()):
            batch.accept(place, len(step.before))
            known = texts[number].known
            if not len(states[number]):
                states[number] = hidden.new_empty(len(texts[number].ids) - known, hidden.shape[-1])
            at = torch.tensor(step.masked, device=hidden.device)
            states[number][at - known] = hidden[place, at - step.start + len(step.before)]
    return [without_codec_fault(rows, cache, text.row) for rows, text in zip(states, texts)]


def masked_logits(loaded: LoadedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, vocab]`` of what the last layer leaves at masks, ``[n, hidden]``: no token is the mask."""
    logits = loaded.model.logits(hidden.to(loaded.model.device))
    if loaded.config.diffusion is not None:
        logits[:, loaded.config.diffusion.mask_token] = torch.finfo(logits.dtype).min
    return logits


def blocks_of(loaded: LoadedModel) -> BlockDiffusion:
    """How a model writes blocks. Raises QuantkitError: it writes none."""
    if loaded.config.diffusion is None:
        raise QuantkitError(f"{loaded.uri} writes a token after the other", why="it has no masks")
    return loaded.config.diffusion


def side_by_side(cache: KVCache, tokens: int) -> int:
    """How many texts of this number of tokens go through a model together, if memory for keys and values is
    all that counts."""
    return max(1, KV_BYTES // (cache.bytes_per_token_16bit * (tokens + PAGE)))


def passes_of(diffusion: BlockDiffusion) -> float:
    """How often each token goes through the model, on average."""
    return 1 + sum(1 / count for count in range(1, diffusion.block_size + 1))


def orders_of(loaded: LoadedModel, ids: Sequence[int], known: int, limit: int) -> list[Order]:
    """Orders in which a text's tokens are uncovered: all that there are if they are ``limit`` or fewer, else
    ``limit`` of them, which follow from the tokens alone: every model gets the same."""
    size = blocks_of(loaded).block_size
    counts = [min(start + size, len(ids)) - max(start, known)
              for start in range(known // size * size, len(ids), size)]
    if math.prod(map(math.factorial, counts)) <= limit:
        return list(itertools.product(*(itertools.permutations(range(count)) for count in counts)))
    seed = hashlib.sha256(str(list(ids)).encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    return [tuple(tuple(torch.randperm(count, generator=random).tolist()) for count in counts)
            for _ in range(limit)]


def cycles(permutation: Sequence[int]) -> list[list[int]]:
    """The cycles of a permutation of 0 … n − 1."""
    left, result = dict(enumerate(permutation)), []
    while left:
        cycle, at = [], next(iter(left))
        while at in left:
            cycle.append(at)
            at = left.pop(at)
        result.append(cycle)
    return result


@dataclass(frozen=True)
class _Step:
    """A step of one text: the block before, unless the cache has it, the block from position ``start`` on,
    and the positions that are masked in it."""

    before: list[int]
    canvas: list[int]
    start: int
    masked: list[int]


def _steps(text: MaskedText, diffusion: BlockDiffusion) -> Iterator[_Step]:
    size, ids, before = diffusion.block_size, list(text.ids), list[int]()
    starts = range(text.known // size * size, len(ids), size)
    for start, permutation in zip(starts, text.order, strict=True):
        block, first = ids[start:start + size], max(start, text.known)
        for cycle in cycles(permutation):
            masked = [first + at for at in cycle]
            canvas = [diffusion.mask_token if start + at in masked else token
                      for at, token in enumerate(block)]
            yield _Step(before, canvas + [diffusion.mask_token] * (size - len(block)), start, masked)
            before = []
        before = block
