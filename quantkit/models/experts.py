"""Experts in place of an MLP: a router sends every token to some of them,
https://arxiv.org/abs/1701.06538."""

from __future__ import annotations

import torch

from quantkit.models.config import ModelConfig
from quantkit.models.layers import MLP, linear
from quantkit.models.linear import Linear, Weights
from quantkit.ops.experts import by_expert, route
from quantkit.ops.sequences import by_sequence


class MixtureOfExperts:
    """The chosen experts' results, weighed by the router.

    What a token gets depends on no other token: each expert multiplies its tokens row by row, and their
    results are added in the experts' order.

    Attributes:
        router: ``[experts, hidden]``, perhaps with a bias, never quantized.
        experts: one by one.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        experts = config.experts
        assert experts is not None and experts.layers[index]
        name = f"model.layers.{index}.{experts.module}"
        self._chosen, self._normalized = experts.chosen, experts.normalized
        self.router = linear(weights, f"{name}.{experts.router}", (experts.count, config.hidden_size),
                             experts.router_bias)
        self.experts = []
        for number in range(experts.count):
            gate, up, down = (f"{name}.experts.{number}.{part}" for part in experts.projections)
            self.experts.append(MLP(config, weights, (gate, up), down, experts.intermediate_size,
                                    config.mlp_bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, hidden]`` → ``[B, T, hidden]``."""
        tokens = x.reshape(-1, x.shape[-1])
        routed = [route(scores.flatten(0, 1), self._chosen, self._normalized)
                  for scores in by_sequence(self.router(x))]
        chosen, shares = (torch.cat(parts) for parts in zip(*routed))
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for number, rows, places in by_expert(chosen):
            result = self.experts[number](tokens[rows], rows)
            out.index_add_(0, rows, result.float() * shares[rows, places, None])
        return out.to(x.dtype).view_as(x)

    def linears(self) -> list[Linear]:
        """The experts' Linears, in the order of the model's slots."""
        return [linear for expert in self.experts for linear in expert.linears()]
