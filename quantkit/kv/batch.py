"""Sequences of a cache as the rows of one step of the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.kv.base import Phase
from quantkit.kv.cache import KVCache
from quantkit.kv.reread import CHUNK, reread
from quantkit.kv.sequence import LayerState
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.ops.rope import apply_rope

if TYPE_CHECKING:
    from quantkit.models.interfaces import LanguageModel

LARGEST = 2.0**100
"""Where vectors are rotated, larger numbers are taken for this one: their sums stay finite."""


class Batch:
    """Sequences of a cache as the rows of one step; see
    :class:`~quantkit.models.interfaces.KVCacheProtocol`.

    Args:
        cache: holds the sequences.
        numbers: the rows' sequences in this order, each once.
        phase: which part of a request the step is, see :data:`~quantkit.kv.base.Phase`; of each row where
            they differ. Policies may act after it.
        token_budget: leave what policies do after the step to the caller, who finds it in :attr:`deferred`;
            where that takes tokens through the model, at most ``token_budget()`` at once. By default policies
            act before the model returns.
        tentative: rows that decode, some of whose tokens may be taken back: nothing is given back and no
            policy acts before :meth:`accept`.

    Attributes:
        phases: of the rows.
        deferred: with a ``token_budget``, what policies have left to do after the step, if anything. Each
            item that is taken from it does a part of the work and is the number of tokens that went through
            the model for it.
        taps: layers whose inputs the step shall hand out; the number of layers stands for what the last one
            leaves. A model that can't leaves ``hidden`` empty.
        hidden: by row, the hidden states of its tokens, in parts: float32 ``[n, taps, hidden]``.
    """

    def __init__(self, cache: KVCache, numbers: Sequence[int], phase: Phase | Sequence[Phase] = "prefill",
                 token_budget: Callable[[], int] | None = None, tentative: Sequence[int] = ()) -> None:
        self.cache, self.numbers = cache, numbers
        self._tentative = set(tentative)
        self.phases: list[Phase] = [phase] * len(numbers) if isinstance(phase, str) else list(phase)
        self.deferred: Generator[int, None, None] | None = None
        self.taps: tuple[int, ...] = ()
        self.hidden: dict[int, list[torch.Tensor]] = {}
        self._token_budget, self._to_drop = token_budget, list[tuple[int, LayerState]]()
        self.sequences = [cache.sequence(number) for number in numbers]
        self._counts: list[int] | None = None
        self._starts = [sequence.layers[-1].seen for sequence in self.sequences]
        self._step_cache: dict[object, object] = {}
        for sequence, kind in zip(self.sequences, self.phases, strict=True):
            cache.track_queries(sequence, cache.policy.tracks_queries(kind))

    @property
    def block(self) -> int | None:
        """Positions per block if queries are tracked. No step may take more tokens of a sequence than the
        rest of a block: more queries aren't kept until they are accumulated, and those of a block are
        accumulated together, however the prompt was cut."""
        policy = self.cache.policy
        tracks = policy.tracks and any(map(policy.tracks_queries, set(self.phases)))
        return policy.query_window if tracks else None

    @property
    def starts(self) -> Sequence[int]:
        """Tokens that each sequence had before this step."""
        return self._starts

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """The positions int64 ``[B, count]`` that follow what each sequence had."""
        starts = torch.tensor(self._starts, dtype=torch.int64, device=self.cache.device)[:, None]
        return starts if count == 1 else starts + torch.arange(count, device=self.cache.device)

    def max_lengths(self) -> torch.Tensor:
        """The final length that each sequence was announced with, int64 ``[B]``."""
        return torch.tensor([sequence.max_length for sequence in self.sequences], dtype=torch.int64)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext,
               window: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate, store and attend; then policies may act.

        Raises:
            ValueError: the batch differs, or positions aren't those that follow.
        """
        if self._counts is None:
            self._counts = self.counts((q.shape[0], q.shape[2]), context.positions)
        cache, counts, positions = self.cache, self._counts, context.positions
        layer_cache, codecs = cache.layers[layer], cache.codecs
        states = [sequence.layers[layer] for sequence in self.sequences]
        cos, sin = context.rope_tables(window)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if codecs.keys.hadamard:
            q, k = apply_hadamard(q), rotated_for_codec(k)
        if codecs.values.hadamard:
            v = rotated_for_codec(v)
        # a sequence at a time: codecs sum up, and torch's sums may depend on what else is in a tensor
        for row, (state, count) in enumerate(zip(states, counts)):
            layer_cache.write(state, k[row, :, :count], v[row, :, :count], positions[row, :count])
        out = layer_cache.attend(states, counts, q, positions, window, self._step_cache, sinks)
        if codecs.values.hadamard:
            out = undo_hadamard(out)
        for row, (state, count, phase) in enumerate(zip(states, counts, self.phases)):
            cache.free_encoded_residual(layer, state)
            self.end_layer(layer, state, q[row, :, :count], count, phase)
        return out

    def end_layer(self, layer: int, state: LayerState, queries: torch.Tensor | None, count: int,
                  phase: Phase) -> None:
        """Note that a layer has had a step of ``count`` tokens, and let its policy act, now or later.
        Arguments as for :meth:`quantkit.kv.layer.LayerCache.end_step`."""
        if self.cache.layers[layer].end_step(state, queries, count, phase):
            if self._token_budget is None:
                self.cache.drop(layer, state)
            else:
                self._to_drop.append((layer, state))

    def settle(self, row: int, count: int) -> None:
        """Note that ``count`` tokens of a row went through all layers."""
        if row in self._tentative:
            self.sequences[row].advance(count)
        else:
            self.cache.advance(self.sequences[row], count)

    def accept(self, row: int, kept: int) -> None:
        """Keep the first ``kept`` tokens that a tentative row got, and take the others back: the sequence is
        as if no more than these had come."""
        self._tentative.remove(row)
        sequence = self.sequences[row]
        sequence.advance(self._starts[row] + kept - int(sequence.seen[-1]))
        self.cache.advance(sequence, 0)
        self._act(row, kept)

    def finish(self, counts: Sequence[int]) -> None:
        """Let policies act on sequences that got ``counts`` tokens in all layers."""
        for row, count in enumerate(counts):
            if row not in self._tentative:
                self._act(row, count)

    def _act(self, row: int, count: int) -> None:
        """Let policies act on a row's sequence, which got ``count`` tokens."""
        if not self.cache.keeps_all:
            for index, state in enumerate(self.sequences[row].layers):
                self.end_layer(index, state, None, count, self.phases[row])

    def release_queries(self) -> None:
        """Forget queries, and what was accumulated over them, that no policy will ask for."""
        policy = self.cache.policy
        if policy.tracks_queries("prefill") and not policy.tracks_queries("decode"):
            for sequence, phase in zip(self.sequences, self.phases):
                if phase == "prefill_end":
                    sequence.track(None)

    def done(self, model: LanguageModel, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        tokens: list[list[int]] = [[] for _ in self.phases]
        if self.cache.policy.reread_prompt and any(phase.startswith("prefill") for phase in self.phases):
            counts = [ids.shape[1]] * len(ids) if positions is None else (positions >= 0).sum(1).tolist()
            tokens = [ids[row, :count].tolist() for row, count in enumerate(counts)]
        self.end_step(model, tokens)

    def end_step(self, model: LanguageModel, tokens: Sequence[Sequence[int]]) -> None:
        """The same with the step's tokens of each row, which only a policy that rereads prompts needs."""
        rereads = bool(self.cache.policy.reread_prompt)
        if rereads:
            for sequence, ids, phase in zip(self.sequences, tokens, self.phases, strict=True):
                if phase.startswith("prefill"):
                    sequence.tokens += ids
        if self._token_budget is not None and (self._to_drop or (rereads and "prefill_end" in self.phases)):
            self.deferred = self._remaining_work(model)
        else:
            for _ in self._remaining_work(model):
                pass

    def _remaining_work(self, model: LanguageModel) -> Generator[int, None, None]:
        """Do what is left; yields the tokens that went through the model, 0 where a policy dropped
        something."""
        cache = self.cache
        for index, state in self._to_drop:
            cache.drop(index, state)
            yield 0
        self.release_queries()
        if (size := cache.policy.reread_prompt) is None:
            return
        for number, sequence, phase in zip(self.numbers, self.sequences, self.phases):
            if phase != "prefill_end":
                continue
            tokens, sequence.tokens = sequence.tokens, []
            yield from reread(cache, number, lambda fork: Batch(cache, [fork], "reread"), model, tokens, size,
                              self._token_budget or (lambda: CHUNK))
            for index, state in enumerate(sequence.layers if tokens else ()):
                if cache.layers[index].policy.reread_prompt:
                    cache.drop(index, state)
                    state.attention_received = None
                    yield 0

    def counts(self, shape: Sequence[int], positions: torch.Tensor | None) -> list[int]:
        """Tokens of each row.

        Args:
            shape: B, T.
            positions: int64 ``[B, T]``, −1: padding. ``None``: the positions that follow, without padding.

        Raises:
            ValueError: the positions aren't those that follow.
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


def rotated_for_codec(x: torch.Tensor) -> torch.Tensor:
    """Keys or values as a codec with :attr:`~quantkit.kv.base.SideCodec.hadamard` gets them."""
    return apply_hadamard(x.float().clamp(-LARGEST, LARGEST)).to(x.dtype)
