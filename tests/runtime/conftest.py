"""Tiny models, loaded once; one thread, because other processes may want the rest."""

import pytest
import torch

from quantkit.runtime import engine, speculation
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.sampler import Sampling
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
def by_operation(tmp_path_factory) -> LoadedModel:
    """A model that rotates parts of heads, which goes operation by operation."""
    return load(str(tiny_model(tmp_path_factory.mktemp("partial") / "tiny", "phi3", dtype="float32",
                               partial_rotary_factor=0.5)))


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> LoadedModel:
    """A two-layer Qwen3 in bfloat16, whose head dimension fits every KV codec."""
    return load(str(tiny_model(tmp_path_factory.mktemp("small") / "tiny", "qwen3")))


@pytest.fixture(scope="session")
def real(smollm2) -> LoadedModel:
    """A real model with a real tokenizer and chat template."""
    return load(smollm2)


@pytest.fixture
def short_chunks(monkeypatch):
    """Prompts are read in many chunks, as long ones are."""
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 16)


@pytest.fixture
def always_drafted(monkeypatch):
    """Drafts are made whether they pay or not."""
    monkeypatch.setattr(speculation, "best_length", lambda acceptance, times, others, limit: limit)


@pytest.fixture(scope="session")
def long() -> Sampling:
    """An answer that goes on until somebody stops it."""
    return Sampling(max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="session")
def prompt_of():
    """``prompt_of(length, seed=0)`` → ids."""
    def make(length, seed=0):
        return torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture(scope="session")
def submit(prompt_of, long):
    """``submit(engine, length, sampling=long, seed=0, **listeners)`` → the request, and why it ended, once
    it has."""
    def make(engine, length, sampling=long, seed=0, **listeners):
        ends = []
        listeners.setdefault("on_done", lambda request: ends.append(request.result.finish_reason))
        request = engine.submit(prompt_of(length, seed), sampling, **listeners)
        return request, ends

    return make
