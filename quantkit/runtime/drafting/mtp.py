"""Drafts by the head that a model was trained with for predicting several tokens (multi-token prediction).

https://arxiv.org/abs/2412.19437 (DeepSeek-V3). The head is one more decoder layer of the model's family: its
input is a token's embedding beside what the model's last layer left for the token before, each normalized. It
shares the model's embedding and output layer. Its tensors lie in the model's own original files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.forward_context import ForwardContext
from quantkit.models.layers import RMSNorm, linear
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


class MtpDrafter(HeadDrafter):
    """The model's own head for further tokens, from the model's original files: a quantized checkpoint leaves
    it out."""

    name: ClassVar[str] = "mtp"
    max_tokens: int = Field(default=3, ge=1, le=MAX_DRAFT)

    def start(self, target: LoadedModel) -> DraftSource:
        model = drafted_model(target, self.name)
        with head_source(self.checkpoint) as source:
            layout = layout_in(source.tensors(), model.config, self.checkpoint)
            head = MtpHead(layout, HeadFiles(source, layout.name_of, model), model)
        return HeadSource(head, model, self.least_chance)


@dataclass(frozen=True)
class MtpLayout:
    """How a family's files name a head's tensors, and what it does in its own way.

    Attributes:
        block: the prefix of the decoder layer's tensors.
        token_norm, hidden_norm, projection, norm: of the others.
        hidden_first: the projection's input begins with the hidden state, not with the embedding.
        normed_state: whether a draft goes on from what is behind the norm.
    """

    block: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    normed_state: bool = False

    def name_of(self, name: str) -> str:
        """What a layer asks for → how it is stored."""
        return name.replace("model.layers.0", self.block, 1)


def layouts(layers: int) -> tuple[MtpLayout, ...]:
    """The published layouts, for a model with this number of layers: MiMo's, DeepSeek-V3's and Qwen's."""
    mimo, deepseek = "model.mtp_layers.0", f"model.layers.{layers}"
    return (
        MtpLayout(mimo, f"{mimo}.token_layernorm", f"{mimo}.hidden_layernorm", f"{mimo}.input_proj",
                  f"{mimo}.final_layernorm", hidden_first=True, normed_state=True),
        MtpLayout(deepseek, f"{deepseek}.enorm", f"{deepseek}.hnorm", f"{deepseek}.eh_proj",
                  f"{deepseek}.shared_head.norm"),
        MtpLayout("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
                  normed_state=True))


def layout_in(stored: Mapping[str, object], config: ModelConfig, uri: str) -> MtpLayout:
    """The layout that these tensors have. Raises UsageError: there is no head among them."""
    for layout in layouts(config.num_layers):
        if f"{layout.projection}.weight" in stored:
            return layout
    raise UsageError(f"{uri} has no head for further tokens",
                     why="none of its tensors is called as in MiMo's, DeepSeek-V3's or Qwen's files",
                     next="name the model's original files, or take another drafter: see docs/drafts.md")


class MtpHead(DraftHead):
    """The network.

    Raises:
        QuantkitError: its files are off.
    """

    def __init__(self, layout: MtpLayout, files: HeadFiles, model: ProgramModel) -> None:
        config = model.config
        self.config = dataclasses.replace(config, num_layers=1, sliding_windows=config.sliding_windows[-1:])
        self._layout = layout
        self._model = model
        self.dtype = model.dtype
        self.layers = (config.num_layers,)
        weights, hidden = files.weights, config.hidden_size
        self._projection = linear(weights, layout.projection, (hidden, 2 * hidden), False)
        self._layer = DecoderLayer(self.config, 0, weights)
        self._token_norm, self._hidden_norm, self._norm = (
            RMSNorm(name, hidden, config, weights)
            for name in (layout.token_norm, layout.hidden_norm, layout.norm))
        # DeepSeek's files repeat the model's own embedding and output layer
        files.refuse_unused(f"{layout.block}.", (f"{layout.block}.embed_tokens.weight",
                                                 f"{layout.block}.shared_head.head.weight"))
        self.nbytes = files.nbytes

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.normalized(hidden[:, 0].to(self.dtype))

    def run(self, ids: torch.Tensor, states: torch.Tensor, context: ForwardContext,
            batch: Batch) -> torch.Tensor:
        parts = [self._token_norm(self._model.embed(ids)), self._hidden_norm(states)]
        x = self._projection(torch.cat(parts[::-1] if self._layout.hidden_first else parts, -1))
        x = self._layer(x[None], context.positions, batch, context)[0]
        return self._norm(x) if self._layout.normed_state else x

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        normed = state if self._layout.normed_state else self._norm(state)
        return self._model.head(normed[None])[0].float()
