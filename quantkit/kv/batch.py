"""Sequences of a cache as the rows of one step of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quantkit.kv.base import Phase
from quantkit.kv.cache import KVCache
from quantkit.kv.sequence import LayerState
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.ops.rope import apply_rope

LARGEST = 2.0**100
"""Where vectors are rotated, larger numbers are taken for this one: their sums stay finite."""


def block_of(cache: KVCache, phases: Sequence[Phase]) -> int | None:
    """Positions per block if a step of these phases tracks queries.

    No step may take more tokens of a sequence than the rest of a block: more queries aren't kept until they
    are accumulated, and those of a block are accumulated together, however the prompt was cut.
    """
    policy = cache.policy
    tracks = policy.tracks and any(map(policy.tracks_queries, set(phases)))
    return policy.query_window if tracks else None


class Batch:
    """Sequences of a cache as the rows of one step; see
    :class:`~quantkit.models.interfaces.KVCacheProtocol`.

    A model calls :meth:`begin` before a step. It then stores keys and values, either by :meth:`attend` or by
    kernels of its own and :meth:`advance`, and calls :meth:`end` once all layers have all tokens.

    Args:
        numbers: the rows' sequences in this order, each once.
        phase: the part of a request that the step is, see :data:`~quantkit.kv.base.Phase`; of each row where
            they differ. Policies may act after it.
        defers: policies don't act in :meth:`end`; the caller takes :meth:`policy_actions` later. A policy
            that rereads prompts needs this at the prompt's end.
        tentative: rows that decode, some of whose tokens may be taken back: nothing is given back and no
            policy acts before :meth:`accept`.

    Attributes:
        phases: each row's phase.
        starts: tokens that each sequence had before this step.
        taps: layers whose inputs the step shall hand out; the number of layers stands for what the last one
            leaves. A model that can't leaves ``hidden`` empty.
        hidden: by row, the hidden states of its tokens, in parts: float32 ``[n, taps, hidden]``.
    """

    def __init__(self, cache: KVCache, numbers: Sequence[int], phase: Phase | Sequence[Phase] = "prefill", *,
                 defers: bool = False, tentative: Sequence[int] = ()) -> None:
        self.cache, self.numbers = cache, numbers
        self.phases: list[Phase] = [phase] * len(numbers) if isinstance(phase, str) else list(phase)
        self.sequences = [cache.sequence(number) for number in numbers]
        self.starts = [sequence.layers[-1].seen for sequence in self.sequences]
        self.taps: tuple[int, ...] = ()
        self.hidden: dict[int, list[torch.Tensor]] = {}
        self._defers, self._tentative = defers, set(tentative)
        self._counts: Sequence[int] = ()
        self._actions: list[tuple[int, LayerState]] = []  # layers whose policies are to act
        self._step_cache: dict[object, object] = {}

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """The positions int64 ``[B, count]`` that follow what each sequence had."""
        starts = torch.tensor(self.starts, dtype=torch.int64, device=self.cache.device)[:, None]
        return starts if count == 1 else starts + torch.arange(count, device=self.cache.device)

    def max_lengths(self) -> torch.Tensor:
        """The final length that each sequence was announced with, int64 ``[B]``."""
        return torch.tensor([sequence.max_length for sequence in self.sequences], dtype=torch.int64)

    def counts(self, shape: Sequence[int], positions: torch.Tensor | None) -> list[int]:
        """Tokens of each row.

        Args:
            shape: the shape ``[B, T]`` of the step's ids.
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

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step in which the rows get ``counts`` tokens.

        Raises:
            ValueError: a prompt ends whose policy rereads it, and policies aren't deferred.
        """
        policy = self.cache.policy
        if policy.reread_prompt and not self._defers and "prefill_end" in self.phases:
            raise ValueError(f"{policy.name} rereads a prompt at its end: the step must defer policies")
        self._counts = counts
        for sequence, phase in zip(self.sequences, self.phases, strict=True):
            self.cache.track_queries(sequence, policy.tracks_queries(phase))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext,
               window: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`~quantkit.models.interfaces.KVCacheProtocol`."""
        cache, positions = self.cache, context.positions
        layer_cache, codecs = cache.layers[layer], cache.codecs
        states = [sequence.layers[layer] for sequence in self.sequences]
        cos, sin = context.rope_tables(window)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if codecs.keys.hadamard:
            q, k = apply_hadamard(q), rotated_for_codec(k)
        if codecs.values.hadamard:
            v = rotated_for_codec(v)
        # a sequence at a time: codecs sum up, and torch's sums may depend on what else is in a tensor
        for row, (state, count) in enumerate(zip(states, self._counts)):
            layer_cache.write(state, k[row, :, :count], v[row, :, :count], positions[row, :count])
        out = layer_cache.attend(states, self._counts, q, positions, window, self._step_cache, sinks)
        if codecs.values.hadamard:
            out = undo_hadamard(out)
        for row, (state, count) in enumerate(zip(states, self._counts)):
            cache.free_encoded_residual(layer, state)
            if count and layer_cache.policy.tracks_queries(self.phases[row]):
                layer_cache.scores.record_queries(state, q[row, :, :count])
        return out

    def advance(self, row: int, count: int) -> None:
        """Note that kernels have stored ``count`` tokens of a row in all layers."""
        if row in self._tentative:
            self.sequences[row].advance(count)
        else:
            self.cache.advance(self.sequences[row], count)

    def end(self) -> None:
        """End a step: all layers have the tokens that :meth:`begin` announced. Policies act now, unless they
        are deferred."""
        for row, count in enumerate(self._counts):
            if row not in self._tentative:
                self._end_row(row, count)
        if not self._defers:
            for _ in self.policy_actions():
                pass

    def accept(self, row: int, kept: int) -> None:
        """Keep the first ``kept`` tokens that a tentative row got, and take the others back: the sequence is
        as if no more than these had come. Its policy acts."""
        self._tentative.remove(row)
        sequence = self.sequences[row]
        sequence.advance(self.starts[row] + kept - int(sequence.seen[-1]))
        self.cache.advance(sequence, 0)
        self._end_row(row, kept)
        for _ in self.policy_actions():
            pass

    @property
    def has_actions(self) -> bool:
        return bool(self._actions)

    def policy_actions(self) -> Iterator[None]:
        """Let policies act that the step's end left to do so, a layer for each item that is taken. Then what
        was tracked is forgotten, if no policy will ask for it."""
        actions, self._actions = self._actions, []
        for index, state in actions:
            self.cache.drop(index, state)
            yield
        policy = self.cache.policy
        if policy.tracks_queries("prefill") and not policy.tracks_queries("decode"):
            for sequence, phase in zip(self.sequences, self.phases):
                if phase == "prefill_end":
                    sequence.track(None)

    def _end_row(self, row: int, count: int) -> None:
        """Count a row's tokens, and note which layers' policies are to act."""
        if not self.cache.keeps_all:
            for index, state in enumerate(self.sequences[row].layers):
                if self.cache.layers[index].end_step(state, count, self.phases[row]):
                    self._actions.append((index, state))


def rotated_for_codec(x: torch.Tensor) -> torch.Tensor:
    """Keys or values as a codec with :attr:`~quantkit.kv.base.SideCodec.hadamard` gets them."""
    return apply_hadamard(x.float().clamp(-LARGEST, LARGEST)).to(x.dtype)
