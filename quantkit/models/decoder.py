"""A decoder layer and the causal language model made of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.models.interfaces import KVCacheProtocol, LanguageModel
from quantkit.models.layers import MLP, Attention, MixtureOfExperts, RMSNorm, check_shape, embedded, linear
from quantkit.models.linear import Linear, Weights
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.rows import by_sequence, softcapped


class DecoderLayer:
    """One layer, usable alone: ``DecoderLayer(config, index, weights)``.

    Raises:
        SourceError: a tensor is missing or of another shape than the config says.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        name = f"model.layers.{index}"
        self._config = config

        def norm(position: str) -> RMSNorm:
            return RMSNorm(f"{name}.{position}_layernorm", config.hidden_size, config, weights)

        self.before_attention = norm("input")
        self.self_attn = Attention(config, index, weights)
        self.after_attention = norm("post_attention") if config.sandwich_norms else _as_it_is
        self.before_mlp = norm("pre_feedforward" if config.sandwich_norms else "post_attention")
        routed = config.experts is not None and config.experts.layers[index]
        make = MixtureOfExperts if routed else MLP.of_layer
        self.mlp: MLP | MixtureOfExperts = make(config, index, weights)
        self.after_mlp = norm("post_feedforward") if config.sandwich_norms else _as_it_is

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, cache: KVCacheProtocol | None = None,
                 context: ForwardContext | None = None) -> torch.Tensor:
        """``x [B, T, hidden]`` at ``positions`` int64 ``[B, T]`` (−1: padding) → ``[B, T, hidden]``.

        ``context`` spares layers of one forward pass from working out the same twice.
        """
        if context is None:
            context = ForwardContext(self._config, positions, x.dtype, cache)
        x = self.add_attention(x, self.self_attn(self.before_attention(x), context, cache))
        return self.add_mlp(x, self.mlp(self.before_mlp(x)))

    def add_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """``x [B, T, hidden]`` with what attention gave."""
        return x + self.after_attention(attended)

    def add_mlp(self, x: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """``x [B, T, hidden]`` with what the MLP, or the experts, gave."""
        return x + self.after_mlp(computed)

    def linears(self) -> dict[str, Linear]:
        """The layer's Linears by full name, in the model's order."""
        return {linear.name: linear for linear in (*self.self_attn.linears(), *self.mlp.linears())}


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class CausalLM:
    """Embedding, decoder layers, final norm and head: ``CausalLM(config, weights)``.

    Attributes:
        dtype: the dtype of plain weights, hidden states and logits.
        embedding: ``[vocab, hidden]``, plain, quantized, or packed as a Linear is: where it is also the head,
            the two are one.
        decode_rows, runs_ahead, supports_mixed_batches, supports_batched_prefill, supports_drafts,
            decode_matches_prefill: as :class:`~quantkit.models.interfaces.LanguageModel` says.

    Raises:
        SourceError: a tensor is missing or of another shape than the config says.
    """

    decode_rows = DECODE_ROWS
    runs_ahead = False
    supports_mixed_batches = supports_batched_prefill = supports_drafts = False
    decode_matches_prefill = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype, self.device = weights.dtype, weights.device
        self.embedding: LinearWeight = weights.table(EMBEDDING, config.tie_word_embeddings)
        check_shape(f"{EMBEDDING}.weight", self.embedding, (config.vocab_size, config.hidden_size))
        self.layers = [DecoderLayer(config, i, weights) for i in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config, weights)
        self.head = Linear(HEAD, self.embedding) if config.tie_word_embeddings else linear(
            weights, HEAD, (config.vocab_size, config.hidden_size), False)

    def check_cache(self, cache: Any) -> None:
        """See :class:`~quantkit.models.interfaces.LanguageModel`: operations run with every cache."""

    def warm_up(self, cache: KVCacheProtocol, sequences: int, tokens: int, rows: int = 1,
                taps: tuple[int, ...] = ()) -> Iterable[None]:
        """Nothing takes longer the first time."""
        return ()

    def prepare(self, cache: Any) -> None:
        """See :class:`~quantkit.models.interfaces.LanguageModel`: operations need nothing."""

    def chunk_invariant(self, cache: Any) -> bool:
        """It isn't: a library's product and attention round differently for another number of tokens."""
        return False

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[B, T]`` → ``[B, T, hidden]``."""
        return embedded(self.config, ids, self.embedding, self.dtype)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
               cache: KVCacheProtocol | None = None) -> torch.Tensor:
        """What the last layer leaves, ``[B, T, hidden]``; arguments and errors as for the whole."""
        if positions is None:
            positions = (torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) if cache is None
                         else cache.next_positions(ids.shape[1]))
        if cache is not None:
            cache.begin(cache.counts(ids.shape, positions))
        x = self.embed(ids)
        context = ForwardContext(self.config, positions, x.dtype, cache)
        for layer in self.layers:
            x = layer(x, positions, cache, context)
        if cache is not None:
            cache.end()
        return x

    def forward(self, tokens: Sequence[Sequence[int]], batch: Any, wanted: Sequence[int]) -> torch.Tensor:
        return wanted_rows(self, tokens, batch, wanted)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's ``[..., hidden]`` → ``[..., vocab]``: final norm and head."""
        y = self.head(self.norm(x))
        if self.config.logit_softcap is None:
            return y
        return torch.cat([softcapped(sequence, self.config.logit_softcap) for sequence in by_sequence(y)])

    def head_alone(self) -> CausalLM:
        alone = copy.copy(self)
        alone.layers, alone.embedding = [], self.head.weight
        return alone

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 cache: KVCacheProtocol | None = None, last: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model.

        Args:
            ids: int64 ``[B, T]``; any valid id at padding.
            positions: int64 ``[B, T]``, −1: padding. By default those that follow what the cache holds.
            cache: keys and values of earlier steps; this step's are added.
            last: int64 ``[B]``, index into T: only that position's logits.

        Returns:
            ``[B, T, vocab]``, or ``[B, vocab]`` with ``last``, in the model's dtype.
        """
        x = self.hidden(ids, positions, cache)
        if last is not None:
            x = x[torch.arange(x.shape[0], device=x.device), last]
        return self.logits(x)

    def linears(self) -> dict[str, Linear]:
        """Every Linear by full name, as :func:`~quantkit.models.architecture.linear_slots` orders them."""
        linears = {name: linear for layer in self.layers for name, linear in layer.linears().items()}
        return linears if self.config.tie_word_embeddings else linears | {HEAD: self.head}


class PaddedRows(NamedTuple):
    """Rows of different lengths as one rectangle: ids int64 ``[B, T]``, positions int64 ``[B, T]`` (−1:
    padding), and the index of each row's last token, int64 ``[B]``."""

    ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor


def padded_rows(tokens: Sequence[Sequence[int]], cache: KVCacheProtocol, device: torch.device) -> PaddedRows:
    """Pad rows at their ends.

    Args:
        tokens: ids of each row; none is empty.
        cache: says at which position each row goes on.
        device: the device of the model's inputs.
    """
    longest = max(map(len, tokens))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=device)
    lengths = torch.tensor([len(row) for row in tokens], device=device)
    inside = torch.arange(longest, device=device) < lengths[:, None]
    return PaddedRows(ids, cache.next_positions(longest).masked_fill(~inside, -1), lengths - 1)


def wanted_rows(model: LanguageModel, tokens: Sequence[Sequence[int]], batch: KVCacheProtocol,
                wanted: Sequence[int]) -> torch.Tensor:
    """:meth:`~quantkit.models.interfaces.LanguageModel.forward` of a model that takes rectangles."""
    padded = padded_rows(tokens, batch, model.device)
    if max(wanted) < 2:
        return model(padded.ids, padded.positions, batch, padded.last)[
            torch.tensor(wanted, device=model.device) > 0].float()
    logits = model(padded.ids, padded.positions, batch)
    return torch.cat([logits[row, len(ids) - count:len(ids)]
                      for row, (ids, count) in enumerate(zip(tokens, wanted))]).float()
