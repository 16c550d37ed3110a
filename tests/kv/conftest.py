"""A small model's shape, and a way to feed a cache with one layer's random keys and values."""

from __future__ import annotations

import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.models.forward_context import ForwardContext

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32


class Feeder:
    """A cache and random queries, keys and values for it."""

    layers, heads, kv_heads, dim = LAYERS, HEADS, KV_HEADS, DIM

    def __init__(self, kv: str = "none", *, dim: int = DIM, dtype: torch.dtype = torch.float32,
                 seed: int = 0, **keys: object) -> None:
        self.dtype, self.dim, self.sinks = dtype, dim, None
        self.config = parse_config({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": dim,
            "num_key_value_heads": KV_HEADS, **keys})
        self.cache = KVCache(self.config, parse_kv(kv), dtype)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, rows: int, count: int) -> list[torch.Tensor]:
        """q, k, v of a step, not rotated."""
        return [torch.randn(rows, heads, count, self.dim, generator=self._random).to(self.dtype)
                for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def feed(self, ids, counts, phase="prefill", *, window=None, drawn=None):
        """One step with so many tokens a row; returns a layer's (q, k, v, positions, out) each."""
        batch = Batch(self.cache, ids, phase)
        positions = batch.next_positions(max(counts))
        for row, count in enumerate(counts):
            positions[row, count:] = -1
        context = ForwardContext(self.config, positions, self.dtype, batch)
        batch.begin(counts)
        done = []
        for layer in range(LAYERS):
            q, k, v = drawn[layer] if drawn else self.draw(len(ids), max(counts))
            done.append((q, k, v, positions, batch.attend(layer, q, k, v, context, window, self.sinks)))
        batch.end()
        return done


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def feeder():
    """``feeder("window(8)+int8")``: a cache with that setting and data for it."""
    return Feeder
