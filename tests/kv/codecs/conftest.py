"""Awkward vectors for codecs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

KINDS = ("normal", "zeros", "minus zeros", "denormal", "tiniest", "equal", "one outlier", "fp16 max",
         "fp32 large", "mixed signs of zero", "offset", "positive", "negative", "wide range")


def awkward(kind: str, rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """float32 ``[rows, dim]``, finite."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=random)
    if kind == "one outlier" and x.numel():
        x[0, seed % dim] = 6e4
    signs = torch.where(x < 0, -1.0, 1.0)
    return {"normal": x, "zeros": x * 0, "minus zeros": x.abs() * -0.0, "denormal": x * 1e-39,
            "tiniest": signs * 2.0**-149, "equal": x[:, :1].expand(-1, dim).clone(), "one outlier": x,
            "fp16 max": signs * 65504, "fp32 large": x.clamp(-3, 3) / 3 * 8e37,
            "mixed signs of zero": signs * 0.0, "offset": 1000.001 + 1e-3 * x, "positive": x.abs() + 1,
            "negative": -x.abs() - 1,
            "wide range": x * 10.0**(20 * torch.rand(rows, 1, generator=random) - 10)}[kind]


@pytest.fixture
def vectors():
    """A strategy of ``(kind, x [rows, dim])`` with dim a multiple of what is given."""
    def make(multiple: int = 1):
        return st.builds(lambda kind, rows, dim, seed: (kind, awkward(kind, rows, dim * multiple, seed)),
                         st.sampled_from(KINDS), st.integers(0, 5), st.integers(1, 96 // multiple),
                         st.integers(0, 2**16))
    return make
