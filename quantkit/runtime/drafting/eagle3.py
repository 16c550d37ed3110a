"""Drafts by an EAGLE-3 head from its published checkpoint, https://arxiv.org/abs/2503.01840.

The head is a decoder layer over a token's embedding beside what the model computed in three of its layers. It
has an output layer of its own, often over the most frequent part of the vocabulary alone. Its ``config.json``
is as the paper's code, SpecForge or speculators write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.models.architecture import parse_config
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.models.layers import MLP, Attention, RMSNorm, check_shape, embedded, linear
from quantkit.models.reader import HARMLESS, ConfigReader
from quantkit.ops.linear_weight import LinearWeight
from quantkit.runtime.drafting.base import MAX_DRAFT, DraftSource
from quantkit.runtime.drafting.head import (
    DraftHead,
    HeadDrafter,
    HeadFiles,
    HeadSource,
    drafted_model,
    head_source,
)
from quantkit.runtime.program_model import ProgramModel
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel

OWN_KEYS = frozenset({"draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual",
                      "norm_before_fc", "bias", "eagle_aux_hidden_state_layer_ids"})
"""What a head's config has beside its layer's."""
NESTED = "transformer_layer_config"
"""Where speculators writes the layer's."""
BOOKKEEPING = frozenset({"speculators_config", "speculators_model_type", "speculators_version",
                         "has_no_defaults_at_init", "embed_requires_grad", "target_model_type",
                         "transformers_version", "tie_word_embeddings"})


@dataclass(frozen=True)
class Eagle3Config:
    """What a head is.

    Attributes:
        layer: its decoder layer.
        draft_vocab: tokens that it can draft.
        normed_residual: the layer's residual is behind the norm of the hidden state.
        layers: the model's layers whose inputs it takes.
    """

    layer: ModelConfig
    draft_vocab: int
    normed_residual: bool
    layers: tuple[int, ...]


def read_config(hf: Mapping[str, Any], target: ModelConfig, uri: str) -> Eagle3Config:
    """Read it strictly.

    Args:
        target: the config of the model that it drafts for.

    Raises:
        UnsupportedModelError: a key is malformed, unknown or not implemented.
        UsageError: it was made for another model.
    """
    where = f"config.json of the EAGLE-3 head {uri}"
    nested = ConfigReader(hf, where).raw(NESTED)
    if nested is None:
        layer = {key: value for key, value in hf.items() if key not in OWN_KEYS | BOOKKEEPING}
        reader = ConfigReader({key: value for key, value in hf.items() if key in OWN_KEYS}, where)
    elif isinstance(nested, dict):
        layer = nested
        reader = ConfigReader({key: value for key, value in hf.items() if key != NESTED}, where)
    else:
        raise ConfigReader(hf, where).wrong(NESTED, nested, "it must be an object")
    parsed = parse_config({"model_type": "llama"} | {key: value for key, value in layer.items()
                                                     if key != "architectures"})
    if parsed.num_layers != 1:
        raise reader.wrong("num_hidden_layers", parsed.num_layers, "only heads of one layer are implemented")
    for key in ("norm_before_fc", "bias"):
        reader.only(key, (False,))
    reader.only("target_hidden_size", (target.hidden_size,))
    config = Eagle3Config(replace(parsed, sliding_windows=(None,)),
                          reader.integer("draft_vocab_size", parsed.vocab_size),
                          reader.flag("norm_before_residual"), _layers(reader, target, uri))
    reader.finish(HARMLESS | BOOKKEEPING, {})
    return config


def _layers(reader: ConfigReader, target: ModelConfig, uri: str) -> tuple[int, ...]:
    """As the config says, or those of the paper's code. In ``eagle_config`` they are layers whose outputs are
    taken, which are the next ones' inputs."""
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    stated, eagle = reader.raw(key), reader.raw("eagle_config")
    if eagle is not None:
        if not isinstance(eagle, dict):
            raise reader.wrong("eagle_config", eagle, "it must be an object")
        reader.only("use_aux_hidden_state", (True,))
        if eagle.get("use_aux_hidden_state") is False:
            raise reader.wrong("eagle_config", eagle, "only heads over several layers are implemented")
        if stated is None and eagle.get(key) is not None:
            stated, shift = eagle[key], 1
    count = target.num_layers
    if stated is None:
        return 2, count // 2, count - 3
    if not isinstance(stated, list) or not stated or not all(type(layer) is int for layer in stated):
        raise reader.wrong(key, stated, "it must be a list of layers' numbers")
    layers = tuple(layer + shift for layer in stated)
    if not all(0 <= layer <= count for layer in layers):
        raise UsageError(f"{uri} can't draft for this model", next="take the head that was made for it",
                         why=f"it wants hidden states of the layers {', '.join(map(str, stated))}, and the "
                             f"model has {count}")
    return layers


NEVER = -1e30
"""The logit of tokens that a head doesn't draft: samplers refuse infinite ones."""


class Eagle3Drafter(HeadDrafter):
    """An EAGLE-3 head."""

    name: ClassVar[str] = "eagle3"
    max_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT)

    def start(self, target: LoadedModel) -> DraftSource:
        model = drafted_model(target, self.name)
        with head_source(self.checkpoint) as source:
            head = Eagle3Head(source.config(), HeadFiles(source, _stored_name(source.tensors()), model),
                              model, self.checkpoint)
        return HeadSource(head, model, self.least_chance)


class Eagle3Head(DraftHead):
    """The network.

    Raises:
        UsageError: it was made for a model of another shape.
        QuantkitError: its files are off.
    """

    def __init__(self, hf: Mapping[str, Any], files: HeadFiles, model: ProgramModel, uri: str) -> None:
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
        self._ids = self._ids.to(model.device)
        self.nbytes = files.nbytes

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._fc(hidden.flatten(1).to(self.dtype))

    def run(self, ids: torch.Tensor, states: torch.Tensor, context: ForwardContext,
            batch: Batch) -> torch.Tensor:
        tokens = self._model.embed(ids) if self._table is None else embedded(self.config, ids, self._table,
                                                                              self.dtype)
        normed = self._hidden_norm(states)
        residual = normed if self._normed_residual else states
        x = torch.cat([self._input_norm(tokens), normed], -1)[None]
        residual = residual + self._attention(x, context, batch)[0]
        return residual + self._mlp(self._mlp_norm(residual))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = torch.full((self._model.config.vocab_size,), NEVER, device=state.device)
        logits[self._ids] = self._head(self._norm(state[None]))[0].float()
        return logits


def _stored_name(stored: Mapping[str, object]) -> Callable[[str], str]:
    """How the layers' names are written in a checkpoint: the paper's code calls its layer ``midlayer``."""
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"

    def name_of(name: str) -> str:
        name = name.removeprefix("model.")
        return name.replace("layers.0", prefix, 1) if name.startswith("layers.0.") else name

    return name_of
