"""Tiny models, loaded once; one thread, because other processes may want the rest."""

import pytest
import torch

from quantkit.runtime.loader import LoadedModel, load
from quantkit.testing import tiny_model


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A two-layer Llama in float32. Tests don't write to it."""
    return tiny_model(tmp_path_factory.mktemp("runtime") / "tiny", dtype="float32")


@pytest.fixture(scope="session")
def loaded(folder) -> LoadedModel:
    """The same, loaded."""
    return load(str(folder))


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> LoadedModel:
    """A two-layer Qwen3 in bfloat16, whose head dimension fits every KV codec."""
    return load(str(tiny_model(tmp_path_factory.mktemp("small") / "tiny", "qwen3")))


@pytest.fixture(scope="session")
def real(smollm2) -> LoadedModel:
    """A real model with a real tokenizer and chat template."""
    return load(smollm2)
