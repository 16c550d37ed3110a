"""The KV cache of one layer: what is written, what attention reads, what policies see and what is dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.kv.attend import PagedAttention
from quantkit.kv.attention_scores import AttentionScores
from quantkit.kv.base import PAGE, KVCodecs, KVPolicy, Phase, PolicyView
from quantkit.kv.checked import checked_slots
from quantkit.kv.geometry import LayerGeometry
from quantkit.kv.sequence import LayerState
from quantkit.kv.store import PageStore


class LayerCache:
    """Keys and values of one layer, for all sequences.

    Args:
        geometry: of the layer.
        codecs: of keys and values.
        policy: decides which positions stay.
        store: the layer's pages.
        rank: index among the layers that the policy manages, and their number.

    Attributes:
        geometry, codecs, policy, store: as given.
    """

    def __init__(self, geometry: LayerGeometry, codecs: KVCodecs, policy: KVPolicy, store: PageStore,
                 rank: tuple[int, int]) -> None:
        self.geometry, self.codecs, self.policy, self.store = geometry, codecs, policy, store
        self._rank = rank
        self._attention = PagedAttention(store, codecs, geometry, policy)
        self._scores = AttentionScores(store, codecs, geometry, policy)

    # -- memory

    def reserve(self, state: LayerState, count: int) -> None:
        """Take pages for ``count`` more tokens."""
        self.store.reserve(state, count)

    def settle(self, state: LayerState) -> bool:
        """Give back residual pages whose vectors have been encoded; returns whether there were any."""
        return self.store.settle(state)

    def release(self, state: LayerState) -> None:
        """Give back all pages of a sequence."""
        self.store.release(state)

    # -- a step

    def write(self, state: LayerState, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Store a step's tokens.

        Args:
            state: the sequence.
            k, v: ``[Hkv, n, D]``, rotated as the codecs want them.
            positions: int64 ``[n]``.
        """
        count, heads = k.shape[1], k.shape[0]
        keys, values = (x.reshape(-1, x.shape[-1]) for x in (k, v))
        slots = self.store.allocate(state, count)
        self.store.write(slots, keys, values, positions.expand(heads, -1).flatten())
        self.store.close(state)

    def attend(self, states: Sequence[LayerState], counts: Sequence[int], q: torch.Tensor,
               positions: torch.Tensor, window: int | None, step_cache: dict[object, object],
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`~quantkit.kv.attend.PagedAttention`."""
        self._scores.sinks = sinks
        return self._attention(states, counts, q, positions, window, step_cache, sinks)

    def end_step(self, state: LayerState, count: int, phase: Phase) -> bool:
        """Note that a step of ``count`` tokens is done; returns whether the policy is to act now."""
        policy = self.policy
        if not count:
            return False
        acts = policy.acts_after(phase)
        if phase == "prefill_end":
            state.prompt = state.seen
        elif phase == "decode" and policy.decode_interval is not None:
            before, state.steps = state.steps, state.steps + count
            acts = state.steps // policy.decode_interval > before // policy.decode_interval
        return acts and not policy.reread_prompt

    # -- scoring

    def record_queries(self, state: LayerState, queries: torch.Tensor) -> None:
        """Keep a step's queries ``[H, n, D]``, rotated; its tokens are in the pages."""
        self._scores.record_queries(state, queries)

    def make_room_for_queries(self, state: LayerState, count: int) -> None:
        """Accumulate kept queries that those of the next ``count`` tokens will replace."""
        self._scores.make_room(state, state.seen, count)

    def accumulate(self, state: LayerState) -> None:
        """Accumulate all queries that are kept."""
        self._scores.accumulate(state, state.seen)

    def view(self, state: LayerState) -> PolicyView:
        """What the policy sees of a sequence."""
        scores, store = self._scores, self.store
        return PolicyView(*self._rank, tuple(state.lengths.tolist()), state.seen, state.prompt,
                          lambda: store.positions(state), lambda: store.read(state, "k"),
                          lambda: store.read(state, "v"), lambda: scores.window_attention(state),
                          lambda: scores.attention_received(state),
                          lambda steps: scores.future_queries(state, steps))

    # -- dropping

    def drop(self, state: LayerState) -> bool:
        """Let the policy choose what stays and give back the other pages; returns whether it dropped
        anything.

        Raises:
            PluginError: what the policy returned isn't what it promises.
        """
        kept = self.policy.keep(self.view(state))
        if kept is None:
            return False
        slots = checked_slots(self.policy, kept, state.lengths.tolist())
        # what queries don't see may stay stored if everything behind it would have to be encoded again
        if self.policy.visible is not None and self.store.residual is not None:
            self.store.thin(state, slots, self.policy.release_granularity // PAGE)
        else:
            self.store.keep(state, slots)
        return True
