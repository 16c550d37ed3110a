"""Tiny models, built from a config dictionary and seeded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.architecture import parse_config
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.testing import FAMILIES, VOCAB, tiny_weights


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    return {"model_type": family, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": True, "torch_dtype": "float32", **FAMILIES[family], **overrides}


def tiny_lm(config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None,
            dtype: torch.dtype = torch.float32) -> CausalLM:
    weights = tiny_weights(config) if weights is None else weights
    return CausalLM(parse_config(config), Weights(weights.__getitem__, weights.__contains__, dtype))


@pytest.fixture
def make_config():
    """``make_config(family, **overrides)`` → a ``config.json`` dictionary."""
    return tiny_config


@pytest.fixture
def make_model():
    """``make_model(config, weights=None, dtype=float32)`` → CausalLM."""
    return tiny_lm


class Fed:
    """A model with a cache of its own: each call goes on where the last one ended."""

    def __init__(self, model: CausalLM, batch: int, kv: KVSpec | None = None) -> None:
        self.model, self.cache = model, KVCache(model.config, kv, model.dtype)
        self.rows = [self.cache.add() for _ in range(batch)]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 last: torch.Tensor | None = None) -> torch.Tensor:
        batch = Batch(self.cache, self.rows)
        return self.model(ids, batch.next_positions(ids.shape[1]) if positions is None else positions, batch,
                          last)


@pytest.fixture
def fed():
    """``fed(model, batch)`` → a callable with a cache of its own."""
    return Fed


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield
