"""A decoder layer in the stages in which it is quantized: Linears that see the same input, and what follows.

A stage's Linears are solved before the next stage is measured, so that what the next one sees has passed
through them as they are stored; and the layer is run once, where measuring all of it before any is solved
takes two runs. Experts are one stage: which of them see a token is known only while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.decoder import DecoderLayer
from quantkit.models.forward_context import ForwardContext
from quantkit.models.layers import MixtureOfExperts
from quantkit.models.linear import Linear
from quantkit.quantization.calibration.finite import behind

States = tuple[torch.Tensor, ...]
"""Between two stages: hidden states ``[B, T, hidden]`` and, within attention or MLP, what its last Linear
multiplies, ``[B, T, in]``."""


@dataclass(frozen=True)
class Stage:
    """Linears of a decoder layer that are measured, solved and run together.

    Attributes:
        index: of the layer.
        result: what it computes, for messages.
        linears: by full name.
        run: ``(states, positions int64 [B, T]) → states`` behind it.
        inputs: what enters every one of the Linears, from the states before it; ``None`` where that is known
            only while it runs.
        last: it is the layer's last.
    """

    index: int
    result: str
    linears: Mapping[str, Linear]
    run: Callable[[States, torch.Tensor], States]
    inputs: Callable[[States], torch.Tensor] | None = None
    last: bool = False


def stages(config: ModelConfig, index: int, layer: DecoderLayer) -> tuple[Stage, ...]:
    """Those of a layer, in order."""
    name, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp

    def attend(states: States, positions: torch.Tensor) -> States:
        context = ForwardContext(config, positions, states[0].dtype)
        return states[0], attention.attend(layer.before_attention(states[0]), context, None)

    def add_attention(states: States, positions: torch.Tensor) -> States:
        return (layer.add_attention(states[0], attention.o_proj(states[1])),)

    first = (Stage(index, f"the input of {attention.o_proj.name}", _by_name(attention.inputs), attend,
                   lambda states: layer.before_attention(states[0])),
             Stage(index, f"the hidden state after {name}.self_attn", _by_name([attention.o_proj]),
                   add_attention, lambda states: states[1]))
    if isinstance(mlp, MixtureOfExperts):
        def route(states: States, positions: torch.Tensor) -> States:
            return (layer.add_mlp(states[0], mlp(layer.before_mlp(states[0]))),)

        return *first, Stage(index, behind(index), _by_name(mlp.linears()), route, last=True)

    def activate(states: States, positions: torch.Tensor) -> States:
        return states[0], mlp.activate(layer.before_mlp(states[0]))

    def add_mlp(states: States, positions: torch.Tensor) -> States:
        return (layer.add_mlp(states[0], mlp.down_proj(states[1])),)

    return (*first, Stage(index, f"the input of {mlp.down_proj.name}", _by_name(mlp.inputs), activate,
                          lambda states: layer.before_mlp(states[0])),
            Stage(index, behind(index), _by_name([mlp.down_proj]), add_mlp, lambda states: states[1],
                  last=True))


def whole(index: int, layer: DecoderLayer) -> Stage:
    """A layer as a single stage: for transforms, which change it once all of it was measured."""
    def run(states: States, positions: torch.Tensor) -> States:
        return (layer(states[0], positions, None),)

    return Stage(index, behind(index), layer.linears(), run, last=True)


def _by_name(linears: list[Linear]) -> dict[str, Linear]:
    return {linear.name: linear for linear in linears}
