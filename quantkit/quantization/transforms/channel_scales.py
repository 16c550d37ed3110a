"""Transforms that scale channels between what writes them and what reads them: AWQ and SmoothQuant.

AWQ, https://arxiv.org/abs/2306.00978, gives important channels finer levels. A channel's scale is a power of
how large its inputs are; in one of the two forms in use it is also divided by the complementary power of how
large its weights are. For every seam the exponent and form are those with the least loss ``tr(E H Eᵀ)``,
where ``E`` is what rounding to nearest does to the readers: exact in the calibration's Hessian, so that no
activation is kept.

SmoothQuant, https://arxiv.org/abs/2211.10438, moves the outliers of a layer's input into its weights. A
channel is divided by ``max|x|ᵃ / max|w|¹⁻ᵃ``, and the weights that read it are multiplied: after that both
are about as hard to round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from quantkit.models.config import ModelConfig
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.grid import choose_grid, from_grid, round_to_grid
from quantkit.quantization.methods.hessian import losses
from quantkit.quantization.transforms.base import LayerTensors, ScaleGroup, Transform, scale_groups

AWQ_ROWS = 512
"""Rows of a Linear that are tried, evenly spread: enough to rank a few scales."""
GRIDS = ("int", "fp")


class AwqOptions(MethodOptions):
    """Options of ``awq``.

    Attributes:
        steps: exponents tried between 0 and 1, for both forms.
    """

    steps: int = Field(default=20, ge=1, le=100)


def find_awq_scales(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
    """Scale every seam of a layer whose readers are rounded to a grid, unless nothing improves it."""
    assert isinstance(options, AwqOptions)
    for seam in scale_groups(config, index):
        tried = [name for name in seam.readers if _suits(tensors, name)]
        if tried:
            best = _search(seam, tried, tensors, options.steps)
            if best is not None:
                tensors.scale(seam, best)


def _suits(tensors: LayerTensors, name: str) -> bool:
    spec, stats = tensors.specs.get(name), tensors.stats.get(name)
    return (spec is not None and spec.kind in GRIDS and stats is not None and stats.hessian is not None
            and bool((stats.hessian.diagonal() > 0).any()))


def _search(seam: ScaleGroup, names: list[str], tensors: LayerTensors, steps: int) -> torch.Tensor | None:
    """The best scale ``[channels]``; ``None`` if it is 1 everywhere."""
    weights = [_some(tensors.tensor(f"{name}.weight")) for name in names]
    forms = []
    for name in names:
        stats = tensors.stats[name]
        assert stats.hessian is not None
        forms.append(stats.hessian)
    inputs = seam.gather(torch.stack([form.diagonal() for form in forms]).mean(dim=0).sqrt())
    size = seam.gather(torch.stack([(w / w.abs().amax(1, keepdim=True).clamp(min=1e-30)).abs().mean(0)
                                    for w in weights]).mean(dim=0))

    def loss(scale: torch.Tensor | None) -> float:
        total = 0.0
        for name, weight, form in zip(names, weights, forms, strict=True):
            columns = seam.spread(scale) if scale is not None else torch.ones(weight.shape[1])
            spec, scaled = tensors.specs[name], weight * columns
            grid = choose_grid(scaled, spec)
            error = from_grid(round_to_grid(scaled, grid, spec), grid) / columns - weight
            total += float(losses(error, form).sum(dtype=torch.float64))
        return total

    best, least = None, loss(None)
    for scale in _scales(inputs, size, steps):
        current = loss(scale)
        if current < least:
            best, least = scale, current
    return best


def _some(weight: torch.Tensor) -> torch.Tensor:
    return weight[::-(-weight.shape[0] // AWQ_ROWS)]


def _scales(inputs: torch.Tensor, size: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Both forms at every exponent, around 1."""
    for step in range(steps + 1):
        power = step / steps
        for scale in (inputs.clamp(min=1e-4) ** power,
                      inputs.clamp(min=1e-4) ** power / size.clamp(min=1e-4) ** (1 - power)):
            scale = scale.clamp(min=1e-4)
            yield scale / (scale.max() * scale.min()).sqrt()


class SmoothOptions(MethodOptions):
    """Options of ``smoothquant``.

    Attributes:
        strength: the exponent ``a``; 0 evens out the weights, 1 the inputs.
        where: ``norms``: only what a norm writes, as in the paper; ``all``: what v and up write too.
    """

    strength: float = Field(default=0.5, ge=0, le=1)
    where: Literal["norms", "all"] = "all"


def smooth_layer(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
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


AWQ = Transform(name="awq", paper="https://arxiv.org/abs/2306.00978", layer=find_awq_scales,
                needs=frozenset({"hessian"}), options=AwqOptions,
                reason_against_spec=lambda spec: None if spec.kind in GRIDS else
                f"it is for weights of kind {' or '.join(GRIDS)}, not for {spec.label()}")
SMOOTHQUANT = Transform(name="smoothquant", paper="https://arxiv.org/abs/2211.10438", layer=smooth_layer,
                        needs=frozenset({"largest"}), options=SmoothOptions,
                        reason_against_spec=lambda spec: None if spec.activations else
                        f"it is for inputs that are rounded too (spec: activations), not for {spec.label()}; "
                        "awq is for weights alone")
