"""The interfaces of a language model and of a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.models.linear import Linear


class LanguageModel(Protocol):
    """What engines and evaluations call: a :class:`~quantkit.models.decoder.CausalLM`, or a faster program
    that computes the same.

    Attributes:
        dtype, device: of its plain weights.
        decode_rows: sequences that decode side by side without an effect on each other, at most.
        runs_ahead: whether the next step can be launched before the host has read this one's tokens.
        decode_matches_prefill: whether a token gives the same bits decoded as in a prompt's chunk, with
            caches for which the model is :meth:`chunk_invariant`.
        supports_mixed_batches: whether :meth:`forward` takes prompts and decoding sequences together, without
            an effect on each other, with caches for which the model is :meth:`chunk_invariant`.
        supports_batched_prefill: whether it takes several prompts together so.
        supports_drafts: whether several tokens of a sequence that decodes give the bits that they have one at
            a time, with caches for which the model is :meth:`chunk_invariant`.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    decode_rows: int
    runs_ahead: bool
    decode_matches_prefill: bool
    supports_mixed_batches: bool
    supports_batched_prefill: bool
    supports_drafts: bool

    def check_cache(self, cache: Any) -> None:
        """Raises UsageError: the model can't be run with such a KVCache."""

    def prepare(self, cache: Any) -> None:
        """Make ready what steps over such a KVCache need, if anything takes time. May be called while another
        thread runs the model."""

    def warm_up(self, cache: Any, sequences: int, tokens: int, rows: int = 1,
                taps: tuple[int, ...] = ()) -> Iterable[None]:
        """Do what the first steps of up to ``sequences`` sequences of this KVCache, of up to ``tokens``,
        would otherwise do: on the thread that runs the model, before anything is in the cache, a part for
        each item that is taken. ``rows``: tokens of a sequence in a decoding step, at most; ``taps``: those
        of the steps' batches."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 cache: KVCacheProtocol | None = None, last: torch.Tensor | None = None) -> torch.Tensor:
        """See :meth:`~quantkit.models.decoder.CausalLM.__call__`. The result may be a buffer of the
        model, which its next call overwrites."""

    def chunk_invariant(self, cache: Any) -> bool:
        """Whether a prompt in such a KVCache gives the same bits however it is cut into chunks."""

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
               cache: KVCacheProtocol | None = None) -> torch.Tensor:
        """See :meth:`~quantkit.models.decoder.CausalLM.hidden`."""

    def forward(self, tokens: Sequence[Sequence[int]], batch: Any, wanted: Sequence[int]) -> torch.Tensor:
        """Take some tokens of each sequence of a Batch through the model.

        Args:
            tokens: ids, one list a sequence; lengths may differ.
            wanted: for each sequence the number of its last tokens whose logits are needed.

        Returns:
            float32 ``[n, vocab]``, as many rows for each sequence as it wants.
        """

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """What the last layer left ``[..., hidden]``, behind the final norm."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~quantkit.models.decoder.CausalLM.logits`."""

    def head_alone(self) -> LanguageModel:
        """The same final norm and head, which keep no layer in memory: nothing but :meth:`logits` works, with
        the same results."""

    def linears(self) -> dict[str, Linear]:
        """See :meth:`~quantkit.models.decoder.CausalLM.linears`."""


class KVCacheProtocol(Protocol):
    """Where attention keeps the keys and values of earlier positions."""

    def next_positions(self, count: int = 1) -> torch.Tensor:
        """Positions int64 ``[B, count]`` that follow what each sequence holds."""

    def max_lengths(self) -> torch.Tensor:
        """How many tokens each sequence is announced to have in the end, int64 ``[B]``; 0: unknown."""

    def counts(self, shape: Sequence[int], positions: torch.Tensor | None) -> list[int]:
        """Tokens of each row of ids of this ``shape`` (B, T). Raises ValueError: the positions aren't those
        that follow."""

    def begin(self, counts: Sequence[int]) -> None:
        """Begin a step in which the rows get ``counts`` tokens."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext,
               window: int | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Store a step's keys and values of one layer, and attend over all that its queries may see.

        Rotation is left to the cache, so that one kernel can rotate, compress and store.

        Args:
            layer: index of the decoder layer.
            q: ``[B, H, T, D]``, not yet rotated.
            k, v: ``[B, Hkv, T, D]``, not yet rotated.
            context: rotation tables and positions; padding is not kept.
            window: the layer's own sliding window.
            sinks: the argument of :func:`~quantkit.ops.attention.attention`.

        Returns:
            ``[B, H, T, D]`` in q's dtype; finite at padding.
        """

    def end(self) -> None:
        """End a step: it has passed all layers."""
