"""Quantized weights of any shape, and the error rule that every kernel obeys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry

SCALES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def random_weight(rows: int, cols: int, bits: int, group: int | None = None, *, symmetric: bool = True,
                  dtype: torch.dtype = torch.bfloat16, form: str = "pack-quantized", seed: int = 0,
                  kind: str = "int", activations: str | None = None) -> QuantizedTensor:
    """Random codes and scales; ``group`` None: a scale a row."""
    random = torch.Generator().manual_seed(seed)
    if kind == "nf":
        granularity = Granularity(strategy="block", size=64)
    elif group:
        granularity = Granularity(strategy="group", size=group)
    else:
        granularity = Granularity(strategy="channel")
    spec = QuantSpec(kind=kind, bits=bits, symmetric=symmetric, granularity=granularity,
                     scale_dtype="float32" if kind == "nf" else SCALES[dtype], activations=activations)
    shape = spec.scale_shape((rows, cols))
    scale = (0.01 * (0.5 + torch.rand(shape, generator=random))).to(dtype).float()
    zero = None
    if not symmetric:
        zero = torch.randint(0, 2**bits, shape, generator=random, dtype=torch.uint8)
    codes = torch.randint(0, 2**bits, (rows, cols), generator=random, dtype=torch.uint8)
    if kind == "fp":
        codes[codes & 0x7F == 0x7F] = 0
    packed: QuantizedTensor = registry("formats").get(form).pack(Codes(spec, codes, scale, zero), dtype)
    return packed


def check_rule(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor,
               terms: torch.Tensor | None = None) -> None:
    """At most twice the error of torch in the same precision, both against float64.

    ``terms``: the sums of the magnitudes of each result's terms. Nothing is required below one rounding of
    the result, nor below one float32 rounding of them: there only the order of summation makes a difference.
    """
    assert got.dtype == plain.dtype and got.shape == plain.shape
    assert torch.isfinite(got).all()
    ours, theirs = (got.double() - exact).norm(), (plain.double() - exact).norm()
    floor = (exact.to(got.dtype).double() - exact).norm()
    if terms is not None:
        floor = max(floor, 2.0**-24 * terms.norm())
    assert ours <= 2 * max(theirs, floor), f"{ours:.3g} against {theirs:.3g}, rounding alone {floor:.3g}"


@pytest.fixture
def make_weight() -> Callable[..., QuantizedTensor]:
    return random_weight


@pytest.fixture
def obeys_the_rule() -> Callable[..., None]:
    return check_rule
