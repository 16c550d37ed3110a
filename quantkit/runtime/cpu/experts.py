"""A layer's mixture of experts in a CPU's program: where its rows and pairs lie, and the table of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.models.config import Experts
from quantkit.models.layers import MixtureOfExperts
from quantkit.models.linear import Linear
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.ops.cpu_weight import widened
from quantkit.runtime.memory.scratch import CPU_ROWS, buffer_width, packed_of


class ExpertBuffers:
    """What all layers with experts leave between their operations. A row and one of its experts are a pair.

    Args:
        experts: of the model.
        mixtures: of all layers that have one.

    Attributes:
        scores: of the routers, float32 ``[rows, …]``.
        chosen: experts of a row.
        gate, up: float32 ``[pairs, …]``, in the order of experts.
        result: what the experts gave, likewise.
        shared_scores, shared_result: of the expert that every row gets, by rows.
        tensors: all of them.
    """

    def __init__(self, experts: Experts, mixtures: Sequence[MixtureOfExperts]) -> None:
        self._experts, self.chosen = experts, experts.chosen
        pairs = CPU_ROWS * experts.chosen
        inputs = [expert.inputs for mixture in mixtures for expert in mixture.experts]
        downs = [expert.down_proj for mixture in mixtures for expert in mixture.experts]
        self.scores = lazy_zeros(CPU_ROWS, buffer_width([mixture.router for mixture in mixtures], []))
        self.gate, self.up = (lazy_zeros(pairs, buffer_width([linears[side] for linears in inputs], downs))
                              for side in (0, 1))
        self.result = lazy_zeros(pairs, buffer_width(downs, []))
        gates = [mixture.shared_gate for mixture in mixtures if mixture.shared_gate is not None]
        shared = [mixture.shared.down_proj for mixture in mixtures if mixture.shared is not None]
        self.shared_scores, self.shared_result = (
            lazy_zeros(CPU_ROWS, buffer_width(writers, [])) if writers else torch.empty(0)
            for writers in (gates, shared))
        self._shares = torch.zeros(pairs)
        self._numbers, self.rows, self._places, self._tiles, self._next, self._count = (
            torch.zeros(size, dtype=torch.int64)
            for size in (pairs, pairs, pairs, 3 * pairs, experts.count, 1))
        self.tensors = (self.scores, self.shared_scores, self.shared_result, self.gate, self.up, self.result,
                        self._shares, self._numbers, self.rows, self._places, self._tiles)

    @property
    def route(self) -> dict[str, Any]:
        """Arguments of the operation that chooses experts."""
        return {"scores": self.scores, "scores_stride": 4 * self.scores.shape[1], "numbers": self._numbers,
                "shares": self._shares, "experts": self._experts.count, "chosen": self._experts.chosen,
                "normalized": int(self._experts.normalized)}

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of the operation that adds the expert of every row."""
        return {"x": self.shared_result, "x_stride": 4 * self.shared_result.shape[1],
                "scores": self.shared_scores, "scores_stride": 4 * self.shared_scores.shape[1]}

    @property
    def order(self) -> dict[str, Any]:
        """Arguments of the operation that orders pairs."""
        return {"numbers": self._numbers, "rows": self.rows, "places": self._places, "tiles": self._tiles,
                "count": self._count, "next": self._next, "experts": self._experts.count,
                "chosen": self._experts.chosen}

    @property
    def product(self) -> dict[str, Any]:
        """Arguments of a product by tiles."""
        return {"tiles": self._tiles, "times": self._count}

    @property
    def sum(self) -> dict[str, Any]:
        """Arguments of the weighted sum."""
        return {"x": self.result, "x_stride": 4 * self.result.shape[1], "places": self._places,
                "shares": self._shares, "chosen": self._experts.chosen}


class ExpertTable:
    """The weights of a Linear of all experts, by their addresses.

    Args:
        linears: of each expert, quantized alike.
        high: read only the high halves of weights that have two.

    Attributes:
        weight: that of the first: what the others are like.
        addresses: int64, see :data:`quantkit_kernels.cpu.experts.PARTS`.
    """

    def __init__(self, linears: Sequence[Linear], high: bool) -> None:
        from quantkit_kernels.cpu.weight_decoder import STRIPE

        weights = [packed_of(linear, high) for linear in linears]
        self.weight = weights[0]
        like = {(weight.kernel.name, weight.shape, weight.columns, weight.rotated) for weight in weights}
        assert len(like) == 1, f"{linears[0].name} isn't packed as those of the other experts"
        size = self.weight.stripes * STRIPE
        self._parts = [(weight.weights, weight.scales, weight.outer, weight.zeros,
                        None if linear.bias is None else widened(linear.bias, size))
                       for weight, linear in zip(weights, linears)]  # kept as long as their addresses are
        self.addresses = torch.tensor([[0 if part is None else part.data_ptr() for part in parts]
                                       for parts in self._parts])
