"""Commands are called in this process; a few tests need a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.export.gguf.export import export_gguf
from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are shown however busy the machine is that runs the tests."""
    monkeypatch.setattr("quantkit.evaluation.sweep.jobs.busy_reason", lambda load: None)
    monkeypatch.setattr("quantkit.evaluation.speed.machine_load.busy_now", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama folder."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def checkpoint(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model by recipe int8. Tests don't write to it."""
    out = tmp_path_factory.mktemp("checkpoints") / "tiny-int8"
    quantize(str(tiny), "int8", out)
    return out


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a GGUF file whose Linears are Q4_0, 4.5 bits a weight."""
    folder = tmp_path_factory.mktemp("gguf")
    source = tiny_model(folder / "plain", hidden_size=64, intermediate_size=128)
    quantize(str(source), "gguf-q4_0", folder / "quantized")
    export_gguf(str(folder / "quantized"), folder / "tiny.gguf")
    return folder / "tiny.gguf"


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in a process of its own."""

    def call(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)],
                              capture_output=True, text=True, timeout=120, **options)

    return call
