"""The KV cache of one layer: what is written, what attention reads, what policies see and what is dropped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from quantkit.kv.attention_scores import AttentionScores, LayerGeometry
from quantkit.kv.base import PAGE, KVCodecs, KVPolicy, Phase, PolicyView
from quantkit.kv.checked import checked_slots
from quantkit.kv.sequence import LayerState
from quantkit.kv.store import PageStore
from quantkit.ops.attention import Visibility, attention, block_ends


class LayerCache:
    """Keys and values of one layer, for all sequences.

    Args:
        geometry: the shape of attention in the layer.
        codecs: how keys and values are stored.
        policy: decides which positions stay, and which of the stored ones queries see.
        rank: index among the layers that the policy manages, and their number.

    Attributes:
        geometry, codecs, policy, store: the arguments.
        scores: answers what the policy asks about queries.
    """

    def __init__(self, geometry: LayerGeometry, codecs: KVCodecs, policy: KVPolicy, store: PageStore,
                 rank: tuple[int, int]) -> None:
        self.geometry = geometry
        self.codecs = codecs
        self.policy = policy
        self.store = store
        self._rank = rank
        # whether all heads hold the same positions, also those of other layers with the same policy
        self._same_positions = policy.keeps_all or policy.visible is not None
        self.scores = AttentionScores(store, codecs, geometry, policy)

    # -- a step

    def write(self, state: LayerState, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Store a step's tokens.

        Args:
            k, v: ``[Hkv, n, D]``, rotated as the codecs want them.
            positions: the tokens' positions, int64 ``[n]``.
        """
        count, heads = k.shape[1], k.shape[0]
        keys, values = (x.reshape(-1, x.shape[-1]) for x in (k, v))
        slots = self.store.allocate(state, count)
        self.store.write(slots, keys, values, positions.expand(heads, -1).flatten())
        self.store.encode_full_pages(state)

    def attend(self, states: Sequence[LayerState], counts: Sequence[int], q: torch.Tensor,
               positions: torch.Tensor, window: int | None, step_cache: dict[object, object],
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with each row's queries over what its sequence holds, one sequence at a time: a result can't
        depend on other sequences in the batch.

        Args:
            states: the rows' sequences; their pages hold the tokens of this step.
            counts: tokens that each row adds in this step.
            q: ``[B, H, T, D]``, rotated (RoPE).
            positions: int64 ``[B, T]``, −1: padding.
            window: the model's own sliding window.
            step_cache: kept for the step, so that layers can share results.
            sinks: the model's attention sinks, float32 ``[H]``.

        Returns:
            ``[B, H, T, D]`` in q's dtype; zeros at padding.
        """
        self.scores.sinks = sinks
        out, config = torch.zeros_like(q), self.geometry.config
        for row, (state, count) in enumerate(zip(states, counts, strict=True)):
            for begin, end in self._spans(state, count):
                later = count - end  # tokens of this step that these queries don't see
                lengths = state.lengths.tolist()
                borders = [self.codecs.border(length - later) for length in lengths]
                keys, values = (self.store.read(state, side, borders) for side in "kv")
                if keys.dtype != values.dtype:  # of different codecs
                    keys, values = keys.float(), values.float()
                # a copy: the memory's alignment must not depend on which other rows there are
                query, at = q[row, :, begin:end].clone(), positions[row, begin:end]
                if (self._same_positions or window is None) and min(lengths) == max(lengths):
                    visible = self._shared_visibility(row, at, later, state, window, step_cache)
                    result = attention(query[None].to(keys.dtype), keys[None], values[None], visible,
                                       config.attention_scale, config.attention_softcap, sinks)
                    out[row, :, begin:end] = result[0].to(q.dtype)
                else:  # heads that hold different positions are the rows of a batch
                    grouped = query.unflatten(0, (len(lengths), -1)).to(keys.dtype)
                    visible = self._visibility(at.expand(len(lengths), -1), self.store.positions(state),
                                               window)
                    result = attention(grouped, keys[:, None], values[:, None], visible,
                                       config.attention_scale, config.attention_softcap,
                                       None if sinks is None else sinks.view(len(lengths), -1))
                    out[row, :, begin:end] = result.flatten(0, 1).to(q.dtype)
        return out

    def _spans(self, state: LayerState, count: int) -> Iterator[tuple[int, int]]:
        """Cut a step's queries into spans that read the same slots as codes."""
        cuts, diffusion = {0, count}, self.geometry.config.diffusion
        if self.store.residual is not None and diffusion is not None:
            size = diffusion.block_size
            cuts.update(range(size - (state.seen - count) % size, count, size))
        elif self.store.residual is not None:
            for length in set(state.lengths.tolist()):
                # the border moves where the slots that a query sees, without the residual, are full pages
                first = -(length - count + 1 - self.codecs.residual_length) % PAGE
                cuts.update(range(first, count, PAGE))
        yield from itertools.pairwise(sorted(cuts))

    def _shared_visibility(self, row: int, positions: torch.Tensor, later: int, state: LayerState,
                           window: int | None, step_cache: dict[object, object]) -> Visibility:
        """The visibility where all heads hold equally many slots, and the same positions unless the model has
        no window: it is computed once a step."""
        length = int(state.lengths[0])
        key = (row, later, window, id(self.policy), length)
        visibility = step_cache.get(key)
        if not isinstance(visibility, Visibility):
            if self._same_positions:
                stored = self.store.positions(state)[:1].long()
            else:  # dropped or not, all slots before this step's own tokens are earlier than they are
                stored = torch.arange(length, device=positions.device)[None]
                end = length - later
                positions = stored[0, end - positions.shape[0]:end]
            visibility = step_cache[key] = self._visibility(positions[None], stored, window)
        return visibility

    def _visibility(self, queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> Visibility:
        limit, sinks = self.policy.visible or (None, 0)
        diffusion = self.geometry.config.diffusion
        ends = None if diffusion is None else block_ends(queries, diffusion.block_size)
        return Visibility(queries, keys, window, limit, sinks, ends)

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

    # -- dropping

    def view(self, state: LayerState) -> PolicyView:
        scores, store = self.scores, self.store
        return PolicyView(*self._rank, tuple(state.lengths.tolist()), state.seen, state.prompt,
                          lambda: store.positions(state), lambda: store.read(state, "k"),
                          lambda: store.read(state, "v"), lambda: scores.window_attention(state),
                          lambda: scores.attention_received(state),
                          lambda steps: scores.future_queries(state, steps))

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
            self.store.free_unneeded_pages(state, slots, self.policy.release_granularity // PAGE)
        else:
            self.store.keep_slots(state, slots)
        return True
