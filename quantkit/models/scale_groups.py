"""Where a layer's channels can be rescaled without changing the model: what writes them is divided,
what reads them is multiplied.

A norm's weight writes what q, k and v read, or gate and up; v writes what o reads, since attention only
averages it; up writes what down reads, since the activation is on the other factor (where it isn't, as with
``clamped_silu``, there is no such group).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantkit.models.config import ModelConfig


@dataclass(frozen=True)
class ScaleGroup:
    """Channels between a writer and all that reads them.

    Attributes:
        writer: full name, without ``.weight``, of a norm or a Linear.
        rows: first and end of the rows of the Linear that writes them; ``None``: the writer is a norm.
        readers: full names of Linears whose columns are these channels.
        router: the experts' router, if it reads the channels too; it is never quantized.
        heads: ``(key heads, query heads a key head, head_dim)`` where each channel is read by several
            columns.
    """

    writer: str
    rows: tuple[int, int] | None
    readers: tuple[str, ...]
    router: str | None = None
    heads: tuple[int, int, int] | None = None

    def spread(self, channels: torch.Tensor) -> torch.Tensor:
        """``[channels]`` → ``[columns]`` of the readers."""
        if self.heads is None:
            return channels
        keys, _, dim = self.heads
        return channels.view(keys, 1, dim).expand(self.heads).reshape(-1)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """``[columns]`` → ``[channels]``: the largest value of each channel's columns."""
        if self.heads is None:
            return columns
        return columns.view(self.heads).amax(dim=1).reshape(-1)


def scale_groups(config: ModelConfig, index: int) -> Iterator[ScaleGroup]:
    """The scale groups of one decoder layer, in the order of its operations."""
    layer, experts = f"model.layers.{index}", config.experts
    attention, dim = f"{layer}.self_attn", config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    fused = config.fused_projections
    inputs: tuple[str, ...] = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    yield ScaleGroup(f"{layer}.input_layernorm", None, tuple(f"{attention}.{name}" for name in inputs))
    first = q + kv if fused else 0
    yield ScaleGroup(f"{attention}.{inputs[-1]}", (first, first + kv), (f"{attention}.o_proj",),
                     heads=(config.num_kv_heads, config.num_heads // config.num_kv_heads, dim))
    norm = f"{layer}.{'pre_feedforward' if config.sandwich_norms else 'post_attention'}_layernorm"
    if experts is not None and experts.layers[index]:
        module = f"{layer}.{experts.module}"
        gate, up, down = experts.projections
        names = [f"{module}.experts.{number}" for number in range(experts.count)]
        yield ScaleGroup(norm, None, tuple(f"{name}.{part}" for name in names for part in (gate, up)),
                         router=f"{module}.{experts.router}")
        if config.activation != "clamped_silu":
            yield from (ScaleGroup(f"{name}.{up}", (0, experts.intermediate_size), (f"{name}.{down}",))
                        for name in names)
        return
    size, mlp = config.intermediate_size, f"{layer}.mlp"
    inputs = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield ScaleGroup(norm, None, tuple(f"{mlp}.{name}" for name in inputs))
    if config.activation == "clamped_silu":
        return
    first = size if fused else 0
    yield ScaleGroup(f"{mlp}.{inputs[-1]}", (first, first + size), (f"{mlp}.down_proj",))
