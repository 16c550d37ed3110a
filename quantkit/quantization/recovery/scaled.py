"""A quantized weight as a function of its scales."""

from __future__ import annotations

import dataclasses

import torch

from quantkit.formats.base import Format, QuantizedTensor
from quantkit.formats.spec import QuantSpec
from quantkit.ops import packing
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.plugins.manager import registry
from quantkit.support.errors import RecipeError


def refuses(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    """Why the scales of such a weight can't be trained, with the remedy; ``None`` if they can."""
    if spec.nested:
        return "its scales are quantized themselves; use a spec without 'nested'"
    if spec.scale_dtype == "e8m0":
        return "its scales are powers of 2, which training can't move little by little; use scale_dtype: e4m3"
    if spec.granularity.strategy == "tile":
        return "its scales are of squares of weights; use another strategy"
    if spec.activations:
        return "its inputs are rounded too, which training doesn't simulate; use a spec without 'activations'"
    if spec.granularity.strategy == "block" and shape[0] * shape[1] % (spec.granularity.size or 1):
        return f"blocks of {spec.granularity.size} don't divide its {shape[0]} × {shape[1]} weights"
    return None


def scale_of(packed: QuantizedTensor) -> torch.Tensor:
    """The scales of a packed weight, float32 of the spec's ``scale_shape``."""
    form: Format = registry("formats").get(packed.format)
    return form.unpack(packed).scale.float()


def with_scale(packed: QuantizedTensor, scale: torch.Tensor) -> QuantizedTensor:
    """The same codes under other scales, which are rounded to the dtype that the format stores.

    Raises:
        RecipeError: the format doesn't keep the codes.
    """
    form: Format = registry("formats").get(packed.format)
    codes = form.unpack(packed)
    changed = packing.pack(form, dataclasses.replace(codes, scale=scale), packed.dtype)
    if not torch.equal(form.unpack(changed).codes, codes.codes):
        raise RecipeError(f"format {packed.format} can't take other scales for the same codes",
                          why="it packs codes differently under other scales",
                          next="use another format, or leave 'recover' out of the recipe")
    return changed


class ScaledWeight:
    """A packed weight whose scales are ``scale · ratio``.

    Args:
        packed: the weight.
        start: its scales, as :func:`scale_of` gives them.
        device: where it is computed.
    """

    def __init__(self, packed: QuantizedTensor, start: torch.Tensor, device: torch.device) -> None:
        form: Format = registry("formats").get(packed.format)
        self._stored = packing.dequantize(form, packed).to(device)
        self._start, self._rotated = start.to(device), packed.spec.rotation is not None

    def weight(self, scale: torch.Tensor) -> torch.Tensor:
        """``[out, in]`` float32 with these scales, not rotated."""
        ratio = torch.where(self._start == 0, torch.ones_like(self._start),
                            scale.to(self._start.device) / self._start)
        stored = self._stored.view(*self._start.shape, -1) * ratio.unsqueeze(-1)
        weight = stored.view(self._stored.shape)
        return undo_hadamard(weight) if self._rotated else weight

    def gradient(self, weight_gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the scales, on the CPU, from that of the weight ``[out, in]``."""
        if self._rotated:
            weight_gradient = apply_hadamard(weight_gradient)
        products = (weight_gradient * self._stored).view(*self._start.shape, -1).sum(-1)
        return torch.where(self._start == 0, torch.zeros_like(products), products / self._start).cpu()
