"""What the libraries that are compared with must not do, lest nothing can be compared."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def bitsandbytes_in_float32(monkeypatch):
    """Where a CPU has AVX-512 BF16, bitsandbytes multiplies in bfloat16, whatever the model's dtype."""
    if importlib.util.find_spec("bitsandbytes"):
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
