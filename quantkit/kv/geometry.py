"""The shape of attention in one layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext, HasMaxLengths


@dataclass(frozen=True)
class LayerGeometry:
    """What the cache of a layer must know of the model.

    Attributes:
        config: the model's.
        layer: index of the layer.
        dtype: in which the model computes keys and values.
        device: where the cache lies.
    """

    config: ModelConfig
    layer: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.config.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def window(self) -> int | None:
        """The model's own sliding window in this layer."""
        return self.config.sliding_windows[self.layer]

    @property
    def scale(self) -> float:
        """Scores are multiplied by it."""
        scale = self.config.attention_scale
        return self.config.head_dim**-0.5 if scale is None else scale

    @property
    def attention_factor(self) -> float:
        """YaRN and longrope make rotated vectors longer by this factor."""
        return self.config.rope_of(self.window).attention_factor

    def rope_tables(self, positions: torch.Tensor,
                    lengths: HasMaxLengths) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos`` and ``sin`` of :func:`quantkit.ops.rope.tables` in float32, for positions int64 ``[n]``."""
        context = ForwardContext(self.config, positions[None].to(self.device), torch.float32, lengths)
        return context.rope_tables(self.window)
