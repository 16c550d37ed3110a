"""AWQ: gives important channels finer levels, by a scale that the layer before compensates.

https://arxiv.org/abs/2306.00978. A channel's scale is a power of how large its inputs are; in one of the two
forms in use it is also divided by the complementary power of how large its weights are. For every seam the
exponent and form are those with the least loss ``tr(E H Eᵀ)``, where ``E`` is what rounding to nearest
does to the readers: exact in the calibration's Hessian, so that no activation is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field

from quantkit.models.config import ModelConfig
from quantkit.models.scale_groups import ScaleGroup, scale_groups
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.grid import from_grid, round_to_grid
from quantkit.quantization.methods.group_scales import choose_grid
from quantkit.quantization.methods.hessian import losses
from quantkit.quantization.transforms.base import LayerTensors, Transform

ROWS = 512
"""Rows of a Linear that are tried, evenly spread: enough to rank a few scales."""
GRIDS = ("int", "fp")


class AwqOptions(MethodOptions):
    """Options of ``awq``.

    Attributes:
        steps: exponents tried between 0 and 1, for both forms.
    """

    steps: int = Field(default=20, ge=1, le=100)


def layer(config: ModelConfig, index: int, tensors: LayerTensors, options: MethodOptions) -> None:
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
    return weight[::-(-weight.shape[0] // ROWS)]


def _scales(inputs: torch.Tensor, size: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Both forms at every exponent, around 1."""
    for step in range(steps + 1):
        power = step / steps
        for scale in (inputs.clamp(min=1e-4) ** power,
                      inputs.clamp(min=1e-4) ** power / size.clamp(min=1e-4) ** (1 - power)):
            scale = scale.clamp(min=1e-4)
            yield scale / (scale.max() * scale.min()).sqrt()


TRANSFORM = Transform(name="awq", paper="https://arxiv.org/abs/2306.00978", layer=layer,
                      needs=frozenset({"hessian"}), options=AwqOptions,
                      idle=lambda spec: None if spec.kind in GRIDS else
                      f"it is for weights of kind {' or '.join(GRIDS)}, not for {spec.label()}")
