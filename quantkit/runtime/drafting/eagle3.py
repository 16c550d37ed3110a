"""Drafts by an EAGLE-3 head from its published checkpoint, https://arxiv.org/abs/2503.01840.

The head is a decoder layer over a token's embedding beside what the model computed in three of its layers. It
has an output layer of its own, often over the most frequent part of the vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.models.forward_context import ForwardContext
from quantkit.models.layers import MLP, Attention, RMSNorm, check_shape, embedded, linear
from quantkit.ops.linear_weight import LinearWeight
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.drafting.base import MAX_DRAFT, DraftSource
from quantkit.runtime.drafting.eagle3_config import read_config
from quantkit.runtime.drafting.head import DraftHead, HeadDrafter, HeadSource, cpu_model
from quantkit.runtime.drafting.head_files import HeadFiles, head_source
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel

NEVER = -1e30
"""The logit of tokens that a head doesn't draft: samplers refuse infinite ones."""


class Eagle3Drafter(HeadDrafter):
    """An EAGLE-3 head."""

    name: ClassVar[str] = "eagle3"
    max_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT)

    def start(self, target: LoadedModel) -> DraftSource:
        """See the base class."""
        model = cpu_model(target, self.name)
        with head_source(self.checkpoint) as source:
            head = Eagle3Head(source.config(), HeadFiles(source, _stored_name(source.tensors()), model.dtype),
                              model, self.checkpoint)
        return HeadSource(head, model, self.least_chance)


class Eagle3Head(DraftHead):
    """The network.

    Args:
        hf: its ``config.json``.
        files: its tensors.
        model: that it drafts for.
        uri: what it is called.

    Raises:
        UsageError: it was made for a model of another shape.
        QuantkitError: its files are off.
    """

    def __init__(self, hf: Mapping[str, Any], files: HeadFiles, model: CpuModel, uri: str) -> None:
        stated = read_config(hf, model.config, uri)
        self.config, self.layers, self._normed_residual = stated.layer, stated.layers, stated.normed_residual
        self._model, weights, hidden = model, files.weights, self.config.hidden_size
        self.dtype = model.dtype
        target = model.config
        self._table: LinearWeight | None = None
        if files.has("model.embed_tokens.weight"):
            self._table = weights.table("model.embed_tokens")
            check_shape("embed_tokens.weight", self._table, (target.vocab_size, hidden))
        elif hidden != target.hidden_size:
            raise UsageError(f"{uri} can't draft for this model", next="take the head that was made for it",
                             why=f"its hidden size is {hidden}, the model's {target.hidden_size}, and it has "
                                 "no embedding of its own")
        self._fc = linear(weights, "fc", (hidden, len(self.layers) * target.hidden_size), False)
        layer = "model.layers.0"
        self._attention = Attention(self.config, 0, weights, 2 * hidden)
        self._mlp = MLP.of_layer(self.config, 0, weights)
        self._input_norm, self._hidden_norm, self._mlp_norm = (
            RMSNorm(f"{layer}.{name}", hidden, self.config, weights)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
        self._norm = RMSNorm("model.norm", hidden, self.config, weights)
        size = stated.draft_vocab
        self._head = linear(weights, "lm_head", (size, hidden), False)
        self._ids = torch.arange(size)
        if files.has("d2t"):
            offsets = files.integers("d2t")
            check_shape("d2t", offsets, (size,))
            self._ids = self._ids + offsets
        files.refuse_unused("", ("t2d",))
        if (wrong := self._ids[(self._ids < 0) | (self._ids >= target.vocab_size)]).numel():
            raise UsageError(f"{uri} can't draft for this model", next="take the head that was made for it",
                             why=f"it drafts token {int(wrong[0]):,} of {target.vocab_size:,}")
        self.nbytes = files.nbytes + (0 if self._table is None else self._table.nbytes)

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return self._fc(hidden.flatten(1).to(self.dtype))

    def run(self, ids: torch.Tensor, states: torch.Tensor, context: ForwardContext,
            batch: Batch) -> torch.Tensor:
        """See the base class."""
        tokens = self._model.embed(ids) if self._table is None else embedded(self.config, ids, self._table,
                                                                              self.dtype)
        normed = self._hidden_norm(states)
        residual = normed if self._normed_residual else states
        x = torch.cat([self._input_norm(tokens), normed], -1)[None]
        residual = residual + self._attention(x, context, batch)[0]
        return residual + self._mlp(self._mlp_norm(residual))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        logits = torch.full((self._model.config.vocab_size,), NEVER)
        logits[self._ids] = self._head(self._norm(state[None]))[0].float()
        return logits


def _stored_name(stored: Mapping[str, object]) -> Callable[[str], str]:
    """How the layers' names are written in a checkpoint: the paper's code calls its layer ``midlayer``."""
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"

    def name_of(name: str) -> str:
        name = name.removeprefix("model.")
        return name.replace("layers.0", prefix, 1) if name.startswith("layers.0.") else name

    return name_of
