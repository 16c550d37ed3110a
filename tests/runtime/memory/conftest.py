"""Models of a size that can be counted by hand, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two key heads of 32, tied embeddings."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and columns that no kernel pads, and a head of its own."""
    return tiny_model(tmp_path_factory.mktemp("models") / "wide", hidden_size=128, intermediate_size=256,
                      vocab_size=320, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def checkpoint(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model by recipe int8."""
    out = tmp_path_factory.mktemp("checkpoints") / "int8"
    quantize(str(tiny), "int8", out)
    return out
