"""Models whose arithmetic is exact enough to compare ways of computing."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.evaluation.long.haystack import FillerHaystack
from quantkit.evaluation.long.items import LongItem, make_items
from quantkit.runtime import engine
from quantkit.runtime.loader import LoadedModel, load
from quantkit.testing import tiny_model


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, heads of 32: any codec takes them. Sharp enough to have opinions."""
    return tiny_model(tmp_path_factory.mktemp("wide") / "wide", head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def exact(wide: Path, request: pytest.FixtureRequest) -> LoadedModel:
    """In float32 operation by operation, in bfloat16 as one program where the CPU has kernels for it."""
    return load(str(wide), dtype=request.param)


@pytest.fixture(scope="session")
def item(exact: LoadedModel) -> LongItem:
    """Four questions about one context of several chunks."""
    (found,) = make_items(exact.tokenizer, "multikey", FillerHaystack(), length=1300, depths=4, samples=1,
                          seed=2)
    assert len(found.context) > 2 * engine.PREFILL_CHUNK
    return found
