"""A tiny model in float32 and windows of a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.evaluation.peers.row import peer_row
from quantkit.evaluation.peers.run import measure_peer
from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.evaluation.result import ModelResult
from quantkit.runtime.loader import LoadedModel, load
from quantkit.testing import tiny_model

TEXT = "the cat and dog in house of a man sat on red mat with tall hat. " * 20


def run_peer(peer: str, texts: dict[str, torch.Tensor], prompt: int, reference: LoadedModel,
             *more: Any) -> ModelResult:
    """The row that :func:`measure_peer` comes to."""
    states = {name: HiddenStates(reference, windows, prompt) for name, windows in texts.items()}
    return peer_row(measure_peer(peer, states, prompt, reference, *more))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of the tiny model."""
    return tiny_model(tmp_path_factory.mktemp("peers") / "tiny", dtype="float32")


@pytest.fixture(scope="session")
def reference(folder) -> LoadedModel:
    """The tiny model. Tests don't write to it."""
    torch.set_num_threads(1)
    return load(str(folder))


@pytest.fixture(scope="session")
def windows(reference) -> torch.Tensor:
    """int64 ``[3, 24]``."""
    ids = reference.tokenizer.encode(TEXT, special=False)
    return torch.tensor(ids[:72]).reshape(3, 24)
