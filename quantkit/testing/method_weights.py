"""Weights and statistics that :func:`~quantkit.testing.methods.check_method` puts to a method."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.formats.trellis_code import RING
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.recipe import default_format

SHAPES = ((5, 96), (3, 128), (200, 48), (2, 32))
"""Besides those of 64 columns: more columns, more rows than columns, two groups a row."""


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """float32 ``[rows, columns]``, as large as a model's."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


WITH_FORMAT = ("int", "nf", "fp", "trellis")
"""Grids whose standard format takes groups of any size."""


def fits(spec: QuantSpec, shape: tuple[int, int]) -> bool:
    """Whether the standard format holds such a weight: others are refused before a method sees them."""
    if spec.grid not in WITH_FORMAT or spec.signed:  # formats for them fix the sizes of groups, too
        return shape[1] % (spec.superblock or spec.granularity.size or 1) == 0
    return registry("formats").get(default_format(spec)).refuses(spec, shape) is None


def method_weights(spec: QuantSpec) -> dict[str, torch.Tensor]:
    """Ordinary and awkward weights by name, those that the standard format of ``spec`` holds."""
    normal = random_weight(12, 64)
    outlier = normal.clone()
    outlier[3, 5] = 50.0
    weights = {"normal": normal, "one row": normal[:1].clone(), "zeros": torch.zeros(4, 64),
               "outlier": outlier, "equal": torch.full((4, 64), 0.25), "denormal": normal * 1e-39,
               "all positive": normal.abs() + 0.01}
    weights |= {f"{rows} x {columns}": random_weight(rows, columns, rows) for rows, columns in SHAPES}
    multiple = RING if spec.kind == "trellis" else 1
    weights = {name: weight.repeat(multiple // math.gcd(len(weight), multiple), 1)
               for name, weight in weights.items() if len(weight) <= 64 or multiple == 1}
    return {name: weight for name, weight in weights.items()
            if fits(spec, (weight.shape[0], weight.shape[1]))}


def layer_stats(columns: int, needs: Collection[str], tokens: int = 256, seed: int = 1) -> LayerStats | None:
    """What calibration hands to a method with these ``needs``; zeros for ``tokens`` 0, as an expert has that
    no token reached; ``None`` for a method without needs."""
    if not needs:
        return None
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, ::7] *= 4
    hessian, largest = x.T @ x / max(tokens, 1), torch.zeros(columns)
    if tokens:
        largest = x.abs().amax(dim=0)
    # inputs that were a little larger in the original model
    drift = 0.05 * hessian
    return LayerStats(tokens, hessian if "hessian" in needs else None,
                      largest if "largest" in needs else None, drift=drift if "drift" in needs else None)
