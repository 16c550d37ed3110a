"""SmoothQuant: moves the outliers of a layer's input into its weights.

https://arxiv.org/abs/2211.10438. A channel is divided by ``max|x|ᵃ / max|w|¹⁻ᵃ``, and the weights that read
it are multiplied: after that both are about as hard to round.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from quantkit.models.config import ModelConfig
from quantkit.models.scale_groups import scale_groups
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.transforms.base import LayerTensors, Transform


class SmoothOptions(MethodOptions):
    """Options of ``smoothquant``.

    Attributes:
        strength: the exponent ``a``; 0 evens out the weights, 1 the inputs.
        where: ``norms``: only what a norm writes, as in the paper; ``all``: what v and up write too.
    """

    strength: float = Field(default=0.5, ge=0, le=1)
    where: Literal["norms", "all"] = "all"


def layer(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
    """Smooth the inputs of all Linears whose inputs will be rounded."""
    assert isinstance(options, SmoothOptions)
    for seam in scale_groups(config, index):
        if seam.rows is not None and options.where == "norms":
            continue
        names = [name for name in seam.readers if (spec := tensors.specs.get(name)) and spec.activations]
        largest = [magnitude for name in names if (stats := tensors.stats.get(name)) is not None
                   and (magnitude := stats.largest) is not None]
        if not largest:
            continue
        inputs = seam.gather(torch.stack(largest).amax(dim=0))
        weights = seam.gather(torch.stack(
            [tensors.tensor(f"{name}.weight").abs().amax(dim=0) for name in names]).amax(dim=0))
        scale = inputs.clamp(min=1e-5)**options.strength / weights.clamp(min=1e-5)**(1 - options.strength)
        # a channel that is silent on the calibration text says nothing about itself
        scale = torch.where((inputs > 0) & (weights > 0), scale, torch.ones_like(scale))
        tensors.scale(seam, scale.clamp(1e-4, 1e4))


TRANSFORM = Transform(name="smoothquant", paper="https://arxiv.org/abs/2211.10438", layer=layer,
                      needs=frozenset({"largest"}), options=SmoothOptions,
                      idle=lambda spec: None if spec.activations else
                      f"it is for inputs that are rounded too (spec: activations), not for {spec.label()}; "
                      "awq is for weights alone")
