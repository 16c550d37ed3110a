"""Sequences of a cache as the rows of one step of the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.kv import attention_scores
from quantkit.kv.attend import StepRows, attend
from quantkit.kv.base import Phase
from quantkit.kv.reread import CHUNK, reread
from quantkit.kv.sequence import LayerState
from quantkit.models.layers import ForwardContext
from quantkit.ops import hadamard
from quantkit.ops.rope import apply_rope

if TYPE_CHECKING:
    from quantkit.kv.cache import KVCache
    from quantkit.models.decoder import LanguageModel

FARTHEST = 2.0**100
"""What is farther from 0 is taken for that where vectors are rotated: their sums are finite."""


class Batch:
    """Sequences of a cache as the rows of one step; see
    :class:`~quantkit.models.decoder.KVCacheProtocol`.

    Args:
        cache, numbers, phase: as for :meth:`KVCache.batch`.
        portion: see there.

    Attributes:
        rest: with a ``portion``, what policies have left to do after the step, if anything: each item that is
            taken from it does some of that, and says how many tokens went through the model for it.
    """

    def __init__(self, cache: KVCache, numbers: Sequence[int], phase: Phase,
                 portion: Callable[[], int] | None = None) -> None:
        self.cache, self.phase, self.numbers = cache, phase, numbers
        self.rest: Generator[int, None, None] | None = None
        self._portion, self._left = portion, list[tuple[int, LayerState]]()
        self.sequences = rows = [cache.sequence(number) for number in numbers]
        self._counts: list[int] | None = None
        self._starts = [sequence.layers[-1].seen for sequence in rows]
        self._shared: dict[object, object] = {}
        for sequence in rows:
            attention_scores.start_tracking(cache, sequence, phase)

    @property
    def most(self) -> int | None:
        """So many tokens of a sequence at once, and none of two blocks of as many: more queries aren't kept
        until the policy has seen them, and it sees the same ones together however the prompt was cut."""
        policy = self.cache.policy
        return policy.queries if policy.tracks and policy.listens(self.phase) else None

    @property
    def starts(self) -> Sequence[int]:
        """Tokens that each sequence had before this step."""
        return self._starts

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """Positions int64 ``[B, count]`` that follow what each sequence had."""
        starts = torch.tensor(self._starts, dtype=torch.int64, device=self.cache.device)[:, None]
        return starts if count == 1 else starts + torch.arange(count, device=self.cache.device)

    def max_lengths(self) -> torch.Tensor:
        """How many tokens each sequence was announced to have in the end, int64 ``[B]``."""
        return torch.tensor([one.max_length for one in self.sequences], dtype=torch.int64)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext,
               window: int | None) -> torch.Tensor:
        """Rotate, store, attend, and let the policy act.

        Raises:
            ValueError: the batch differs, or positions aren't those that follow.
        """
        if self._counts is None:
            self._counts = self.counts((q.shape[0], q.shape[2]), context.positions)
        cache = self.cache
        rows = StepRows([sequence.layers[layer] for sequence in self.sequences], self._counts)
        cos, sin = context.rope_tables(window)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if cache.codings.keys.hadamard:
            q, k = hadamard.apply_hadamard(q), _hadamard(k)
        if cache.codings.values.hadamard:
            v = _hadamard(v)
        self._store(layer, rows, k, v, context.positions)
        out = attend(cache, layer, rows, q, context.positions, window, self._shared)
        if cache.codings.values.hadamard:
            out = hadamard.undo_hadamard(out)
        for row, (held, count) in enumerate(rows):
            cache.settle_layer(layer, held)
            self._end(layer, held, q[row, :, :count], count)
        return out

    def _store(self, layer: int, rows: StepRows, k: torch.Tensor, v: torch.Tensor,
               positions: torch.Tensor) -> None:
        """Write ``k, v [B, Hkv, T, D]`` as they are to be stored; padding is left out. A sequence at a time:
        codecs sum up, and torch's sums may depend on what else is in a tensor."""
        store = self.cache.stores[layer]
        for row, (held, count) in enumerate(rows):
            keys, values = (x[row, :, :count].reshape(-1, x.shape[-1]) for x in (k, v))
            places = positions[row, :count].expand(self.cache.heads, -1).flatten()
            store.write(store.allocate(held, count), keys, values, places)
            store.close(held)

    def _end(self, layer: int, held: LayerState, q: torch.Tensor | None, count: int) -> None:
        policy = self.cache.policies[layer]
        if not count:
            return
        if q is not None and policy.listens(self.phase):
            attention_scores.record_queries(self.cache, layer, held, q)
        acts = policy.acts(self.phase)
        if self.phase == "prefill_end":
            held.prompt = held.seen
        elif self.phase == "decode" and policy.every is not None:
            before, held.steps = held.steps, held.steps + count
            acts = held.steps // policy.every > before // policy.every
        if acts and not policy.reread_prompt:
            if self._portion is None:
                self.cache.act(layer, held)
            else:
                self._left.append((layer, held))

    def finish(self, counts: Sequence[int]) -> None:
        """Let the policy act on sequences that got so many tokens, in all layers."""
        if self.cache.keeps_all:
            return
        for held, count in zip(self.sequences, counts, strict=True):
            for index, layer in enumerate(held.layers):
                self._end(index, layer, None, count)

    def release(self) -> None:
        """Queries, and sums over them, that no policy will ask for give their memory back."""
        policy = self.cache.policy
        if self.phase == "prefill_end" and policy.listens("prefill") and not policy.listens("decode"):
            for held in self.sequences:
                held.start_tracking(None)

    def done(self, model: LanguageModel, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """See :class:`~quantkit.models.decoder.KVCacheProtocol`."""
        if self.cache.policy.reread_prompt and self.phase.startswith("prefill"):
            counts = [ids.shape[1]] * len(ids) if positions is None else (positions >= 0).sum(1).tolist()
            for row, (held, count) in enumerate(zip(self.sequences, counts)):
                held.tokens += ids[row, :count].tolist()
        replays = self.cache.policy.reread_prompt and self.phase == "prefill_end"
        if self._portion is not None and (self._left or replays):
            self.rest = self._rest(model)
        else:
            for _ in self._rest(model):
                pass

    def _rest(self, model: LanguageModel) -> Generator[int, None, None]:
        """What is left to do; yields the tokens that went through the model, 0 where a policy acted."""
        for index, layer in self._left:
            self.cache.act(index, layer)
            yield 0
        self.release()
        if (size := self.cache.policy.reread_prompt) is None or self.phase != "prefill_end":
            return
        for number, held in zip(self.numbers, self.sequences):
            tokens, held.tokens = held.tokens, []
            yield from reread(self.cache, number, model, tokens, size, self._portion or (lambda: CHUNK))
            for index, layer in enumerate(held.layers if tokens else ()):
                if self.cache.policies[index].reread_prompt:
                    self.cache.act(index, layer)
                    layer.sums = None
                    yield 0

    def counts(self, shape: Sequence[int], positions: torch.Tensor | None) -> list[int]:
        """Tokens of each row.

        Args:
            shape: B, T.
            positions: int64 ``[B, T]``, −1: padding; ``None``: those that follow, everywhere.

        Raises:
            ValueError: they aren't those that follow.
        """
        if shape[0] != len(self.sequences):
            raise ValueError(f"{shape[0]} rows for {len(self.sequences)} sequences")
        if positions is None:
            return [shape[1]] * shape[0]
        valid = positions >= 0
        counts: list[int] = valid.sum(1).tolist()
        expected = self.next_positions(positions.shape[1])
        inside = torch.arange(positions.shape[1], device=positions.device) < valid.sum(1, keepdim=True)
        if bool((torch.where(inside, expected, -1) != positions).any()):
            raise ValueError("positions must follow what a sequence holds; padding (−1) stands after them")
        return counts


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    return hadamard.apply_hadamard(x.float().clamp(-FARTHEST, FARTHEST)).to(x.dtype)
