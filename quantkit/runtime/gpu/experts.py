"""A layer's mixture of experts on a GPU: the weights of all lie side by side.

Nothing is read by the host: a step with experts is a graph as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.models.config import ModelConfig
from quantkit.models.layers import MixtureOfExperts
from quantkit.models.linear import Linear
from quantkit.runtime.gpu.linears import DeviceLinear, FusedLinear, gate_of, packed_product
from quantkit.runtime.gpu.prompts import PromptProducts
from quantkit.runtime.program_model import reason_against_experts

if TYPE_CHECKING:
    from quantkit_kernels.triton.experts import Pairs
    from quantkit_kernels.triton.matmul import Gate


def reason_against(config: ModelConfig, quantized: Mapping[str, QuantizedTensor]) -> str | None:
    """Why a model's experts aren't multiplied side by side; ``None`` if they are, or there are none.

    Args:
        quantized: packed weights by name.
    """
    if any(".experts." in name and weight.spec.activations == "group" and weight.spec.bits == 4
           for name, weight in quantized.items()):
        return "multiplies experts whose inputs aren't rounded to 4 bits"
    return reason_against_experts(config, quantized)


class ExpertLayer:
    """All experts of a layer, and their router.

    Attributes:
        nbytes: of all weights.
        step_bytes: those that one token reads.
    """

    def __init__(self, mixture: MixtureOfExperts, config: ModelConfig, dtype: torch.dtype,
                 device: torch.device) -> None:
        experts = config.experts
        assert experts is not None
        self._experts, self._gate = experts, gate_of(config)
        self._hidden = config.hidden_size
        self._router = FusedLinear([mixture.router], dtype, device)
        inputs = [expert.inputs for expert in mixture.experts]
        self._gate_up = _side_by_side([[linears[side] for linears in inputs] for side in (0, 1)], dtype,
                                      device)
        self._down = _side_by_side([[expert.down_proj for expert in mixture.experts]], dtype, device)
        self.shared: list[FusedLinear] = []
        if mixture.shared is not None and mixture.shared_gate is not None:
            self.shared = [FusedLinear([mixture.shared_gate], dtype, device),
                           FusedLinear(mixture.shared.inputs, dtype, device, self._gate),
                           FusedLinear([mixture.shared.down_proj], dtype, device)]
        always = self._router.nbytes + sum(product.nbytes for product in self.shared)
        routed = self._gate_up.weight.nbytes + self._down.weight.nbytes
        self.nbytes = always + routed
        self.step_bytes = always + routed * experts.chosen // experts.count

    def __call__(self, x: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor | None,
                 prompts: PromptProducts | None = None) -> torch.Tensor:
        """Normed ``x [N, hidden]`` of tokens → ``[N, hidden]``, plus ``residual``; ``rows`` say whose they
        are, see :class:`~quantkit_kernels.triton.cache.StepTokens`; ``prompts``: see
        :class:`~quantkit.runtime.gpu.linears.DeviceLinear`."""
        from quantkit_kernels.triton.experts import combine, route

        experts = self._experts
        if self.shared:
            gate, gate_up, down = self.shared
            result = down(gate_up(x, prompts=prompts), prompts=prompts) * torch.sigmoid(gate(x).float())
            residual = (result if residual is None else result + residual.float()).to(x.dtype)
        pairs = route(self._router(x), rows, experts.chosen, experts.normalized)
        opened = self._multiply(self._gate_up, x, pairs, experts.intermediate_size, experts.chosen,
                                self._gate)
        return combine(self._multiply(self._down, opened, pairs, self._hidden), pairs, residual)

    def _multiply(self, linear: DeviceLinear, x: torch.Tensor, pairs: Pairs, outputs: int, chosen: int = 1,
                  gated: Gate | None = None) -> torch.Tensor:
        from quantkit_kernels.triton.experts import multiply_experts

        return multiply_experts(linear.prepared(x), linear.weight, pairs, experts=self._experts.count,
                                outputs=outputs, bias=linear.bias, gated=gated, chosen=chosen)


def _side_by_side(sides: Sequence[Sequence[Linear]], dtype: torch.dtype, device: torch.device
                  ) -> DeviceLinear:
    """One weight of a Linear of all experts, or of two: all gates, then all that they open."""
    from quantkit_kernels.triton.experts import padded_rows

    gated = len(sides) == 2
    rows = padded_rows(sides[0][0].shape[0], gated)
    biases = None
    if sides[0][0].bias is not None:
        biases = torch.stack([torch.cat([linear.bias for linear in of_expert if linear.bias is not None])
                              for of_expert in zip(*sides)]).to(device, dtype)
    weight = packed_product([linear for side in sides for linear in side], dtype, device, gated, rows)
    return DeviceLinear(weight.weight, biases, weight.rotation)
