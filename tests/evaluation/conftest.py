"""A tiny model, and what quantization makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.quantization.run import quantize
from quantkit.runtime.loader import LoadedModel, load
from quantkit.testing import tiny_model

RECIPE = """
name: tiny-int{bits}
description: for tests
rules:
  - match: "*"
    method: rtn
    spec: {{bits: {bits}, granularity: {{strategy: group, size: 32}}}}
"""


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are shown however busy the machine is that runs the tests."""
    monkeypatch.setattr("quantkit.evaluation.sweep.jobs.busy_reason", lambda load: None)
    monkeypatch.setattr("quantkit.evaluation.speed.machine_load.busy_now", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama folder, bf16."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> LoadedModel:
    """The tiny model. Tests don't write to it."""
    return load(str(tiny))


def _made(tiny: Path, folder: Path, bits: int) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(bits=bits))
    quantize(str(tiny), str(recipe), folder / f"int{bits}")
    return folder / f"int{bits}"


@pytest.fixture(scope="session")
def int8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, rtn int8 in groups of 32."""
    return _made(tiny, tmp_path_factory.mktemp("int8"), 8)


@pytest.fixture(scope="session")
def int4(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, rtn int4 in groups of 32."""
    return _made(tiny, tmp_path_factory.mktemp("int4"), 4)


@pytest.fixture(scope="session")
def tiny_nf4(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model by recipe nf4."""
    out = tmp_path_factory.mktemp("nf4") / "nf4"
    quantize(str(tiny), "nf4", out)
    return out
