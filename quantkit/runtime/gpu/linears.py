"""Fuses Linears that see the same input into as few products as their kernels allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.ops.dispatch import choose, codes_of, query_for
from quantkit.ops.hadamard import hadamard_factors
from quantkit.ops.linear_weight import DeviceWeight
from quantkit.ops.stored_weight import PlainWeight, QuantizedWeight, StoredWeight
from quantkit.ops.triton_linear import TritonKernel
from quantkit.runtime.gpu.prompts import PromptProducts

if TYPE_CHECKING:
    from quantkit_kernels.triton.levels import QuantizedActivations
    from quantkit_kernels.triton.matmul import Gate
    from quantkit_kernels.triton.packed import TritonWeight
    from quantkit_kernels.triton.token_groups import GroupRounding

def reason_against(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel of ours multiplies it there; ``None`` if one does."""
    kernel = choose(query_for(weight, dtype, device, "decode")).kernel
    return None if isinstance(kernel, TritonKernel) else f"is multiplied by {kernel.name}"


@dataclass(frozen=True)
class DeviceLinear:
    """One weight on the device.

    Attributes:
        weight: in the tensor core's order.
        bias: ``[n]``, or none.
        rotation: rotates rows before: see :func:`quantkit.ops.hadamard.hadamard_factors`.
    """

    weight: TritonWeight
    bias: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor | QuantizedActivations, prompts: PromptProducts | None = None,
                 **options: Any) -> torch.Tensor:
        """``x [m, k]`` → ``[m, n]``; ``options``: see :func:`quantkit_kernels.triton.matmul.multiply`;
        ``prompts``: multiplies rows of a prompt, if it can."""
        from quantkit_kernels.triton.matmul import multiply

        ready = self._multiplied(self.prepared(x) if isinstance(x, torch.Tensor) else x)
        if prompts is not None:
            y = prompts.multiply(ready, self.weight, bias=self.bias, **options)
            if y is not None:
                return y
        return multiply(ready, self.weight, bias=self.bias, **options)

    @property
    def takes(self) -> torch.dtype | None:
        """Levels that whoever makes x may round it to; ``None``: x as it is."""
        decoder, kept = self.weight.decoder, self.rotation is None and self.weight.inputs is None
        return decoder.takes[0] if decoder.levels and kept else None

    @property
    def inputs(self) -> GroupRounding | None:
        """Groups that whoever makes x may round it in; ``None``: in none."""
        return self.weight.inputs if self.rotation is None else None

    def _multiplied(self, x: torch.Tensor | QuantizedActivations) -> torch.Tensor | QuantizedActivations:
        """What was rounded to numbers that are multiplied as any others is these numbers."""
        return x if isinstance(x, torch.Tensor) or self.weight.decoder.levels else x.values

    def prepared(self, x: torch.Tensor) -> torch.Tensor | QuantizedActivations:
        """What the weight multiplies: x rotated, or rounded."""
        if self.rotation is not None:
            from quantkit_kernels.triton.hadamard import apply_hadamard

            x = apply_hadamard(x, *self.rotation)
        if self.weight.inputs is not None:
            from quantkit_kernels.triton.token_groups import round_groups

            return self._multiplied(round_groups(x, self.weight.inputs))
        if not self.weight.decoder.levels:
            return x
        from quantkit_kernels.triton.levels import quantize

        return quantize(x, self.weight.decoder.takes[0])


class _Part(NamedTuple):
    """A product, and the columns of the result that are its."""

    product: DeviceLinear
    start: int
    end: int


class FusedLinear:
    """Linears that see one input, side by side in one result.

    Weights that are quantized alike, and round what they see alike, become one; each is moved to the device
    when its turn comes.

    Args:
        linears: in the order of their results.
        activation: joins gate and up, the two Linears or the two halves of one: see :func:`gate_of`.

    Attributes:
        takes: levels that x may be rounded to before; ``None``: x as it is.
        inputs: groups that x may be rounded in before; ``None``: in none.
        width: numbers in a row of the result.
        nbytes: read by one call.
        numbers: of the largest weight that prompts' products dequantize.
    """

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype, device: torch.device,
                 activation: Gate | None = None) -> None:
        self._activation = activation
        groups = [list(linears)] if _alike(linears, device) else [[linear] for linear in linears]
        self._gated = activation is not None and len(groups) == 1
        self._parts: list[_Part] = []
        start = 0
        for group in groups:
            size = sum(linear.shape[0] for linear in group)
            self._parts.append(_Part(_with_bias(group, dtype, device, self._gated), start, start + size))
            start += size
        self.takes = self._parts[0].product.takes if len(groups) == 1 else None
        self.inputs = self._parts[0].product.inputs if len(groups) == 1 else None
        self.width = start if activation is None else start // 2
        self._whole, self._dtype = start, dtype

    @property
    def nbytes(self) -> int:
        return sum(part.product.weight.nbytes for part in self._parts)

    @property
    def numbers(self) -> int:
        from quantkit_kernels.triton.dequantize import packed_rows, reason_against, reason_against_levels

        weights = [part.product.weight for part in self._parts]
        return max([0, *(weight.n * weight.k for weight in weights if reason_against(weight) is None),
                    *(-(-packed_rows(weight) * weight.k // 2) for weight in weights
                      if reason_against_levels(weight) is None)])  # levels have half the bytes

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[m]`` → those rows of the one weight, ``[m, k]``."""
        from quantkit_kernels.triton.embedding import embed

        return embed(ids, self._parts[0].product.weight, self._dtype)

    def __call__(self, x: torch.Tensor | QuantizedActivations, residual: torch.Tensor | None = None,
                 out: torch.Tensor | None = None, prompts: PromptProducts | None = None) -> torch.Tensor:
        """``x [m, k]`` → ``[m, width]``, plus ``residual`` if there is one, in ``out``; of a single weight
        without activation only. ``prompts``: see :class:`DeviceLinear`."""
        if len(self._parts) == 1:
            product = self._parts[0].product
            if self._gated:
                return product(x, prompts, gated=self._activation)
            result = product(x, prompts, residual=residual, out=out)
        else:
            assert isinstance(x, torch.Tensor) and residual is None and out is None
            result = x.new_empty(x.shape[0], self._whole)
            for part in self._parts:
                part.product(x, prompts, out=result[:, part.start:part.end])
        if self._activation is not None:
            from quantkit_kernels.triton.dequantize import apply_gate

            return apply_gate(result, self._activation)
        return result


def gate_of(config: ModelConfig) -> Gate:
    """How a model's MLPs join gate and up."""
    return config.activation_limit if config.activation == "clamped_silu" else config.activation


def device_weight(linear: Linear, dtype: torch.dtype, device: torch.device) -> DeviceWeight:
    """What is left of a Linear's weight when it is on the device."""
    weight = stored_of(linear)
    name = "triton-w16a16" if weight.spec is None else weight.kernel_name(dtype, device, "decode")
    return DeviceWeight(name, linear.shape)


def stored_of(linear: Linear) -> StoredWeight:
    """A Linear's weight as the checkpoint stores it. Raises TypeError if it was packed or moved."""
    if not isinstance(linear.weight, StoredWeight):
        raise TypeError(f"{linear.name} isn't as the checkpoint stores it")
    return linear.weight


def _alike(linears: Sequence[Linear], device: torch.device) -> bool:
    """Whether they are one product: weights have a spec, and what they see one number, if it is rounded with
    one."""
    weights = [stored_of(linear) for linear in linears]
    spec = weights[0].spec
    if any(weight.spec != spec for weight in weights[1:]):
        return False
    if spec is None or not spec.static_inputs:
        return True
    factors = [codes_of(weight.quantized.to(device)).input_factor for weight in weights
               if isinstance(weight, QuantizedWeight)]
    return len({float(factor) for factor in factors if factor is not None}) == 1


def _with_bias(linears: Sequence[Linear], dtype: torch.dtype, device: torch.device,
               gated: bool) -> DeviceLinear:
    biases = [linear.bias for linear in linears]
    bias = None
    if any(bias_of_linear is not None for bias_of_linear in biases):
        bias = torch.cat([torch.zeros(linear.shape[0], dtype=dtype)
                          if linear.bias is None else linear.bias.to(dtype)
                          for linear in linears]).to(device)
    product = packed_product(linears, dtype, device, gated)
    return DeviceLinear(product.weight, bias, product.rotation)


def packed_product(linears: Sequence[Linear], dtype: torch.dtype, device: torch.device, gated: bool,
                   rows: int = 0) -> DeviceLinear:
    """The weights of Linears that are quantized alike, one below the other, without their biases.

    Args:
        gated: the first half are gates, the others what they open.
        rows: rows that each one is filled up to; 0: its own.
    """
    weights = [stored_of(linear) for linear in linears]
    plain = [_filled(weight.tensor.to(device, dtype), rows) for weight in weights
             if isinstance(weight, PlainWeight)]
    if plain:
        from quantkit_kernels.triton import w16a16

        tensor = plain[0] if len(plain) == 1 else torch.cat(plain)
        return DeviceLinear(w16a16.pack(tensor, gated=gated), None)
    quantized = [weight.quantized for weight in weights if isinstance(weight, QuantizedWeight)]
    first = quantized[0]
    kernel = choose(query_for(first, dtype, device, "decode")).kernel
    assert isinstance(kernel, TritonKernel)
    codes = _side_by_side([codes_of(weight.to(device)) for weight in quantized], rows)
    rotation = None
    if first.spec.rotation:
        signs, mix = hadamard_factors(first.shape[1])
        rotation = signs.to(device), mix.to(device)
    return DeviceLinear(kernel.pack(codes, gated=gated), None, rotation)


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """With zeros, to this number of rows."""
    missing = rows - len(tensor)
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing > 0 else tensor


def _side_by_side(parts: Sequence[Codes], rows: int = 0) -> Codes:
    """Rows one after another, each part filled up to ``rows``; what several rows of one share is given to
    each. All see the same number of their input."""
    if len(parts) == 1 and not rows:
        return parts[0]
    granularity = parts[0].spec.granularity

    def shared_out(codes: Codes, part: torch.Tensor) -> torch.Tensor:
        count = codes.codes.shape[0]
        if granularity.strategy == "tile":
            part = part.repeat_interleave(granularity.size or 1, dim=0)[:count]
        part = part.expand(count, -1) if part.shape == (1, 1) else part
        return _filled(part, rows * len(part) // count)  # blocks of a flattened weight are several a row

    def below(name: str) -> torch.Tensor | None:
        tensors = [shared_out(codes, part) for codes in parts if (part := getattr(codes, name)) is not None]
        return torch.cat(tensors) if tensors else None

    scale = below("scale")
    assert scale is not None
    return Codes(parts[0].spec, torch.cat([_filled(codes.codes, rows) for codes in parts]), scale,
                 below("zero"), minimum=below("minimum"), outer=below("outer"),
                 outer_minimum=below("outer_minimum"), input_factor=parts[0].input_factor)

