"""Fills a cache with a context of random keys and values, for measurements: no prompt has to be read."""

from __future__ import annotations

import torch

from quantkit.kv.base import PAGE
from quantkit.kv.cache import KVCache

PAGES = 64
"""Pages of random vectors that are encoded; all pages hold what one of them does."""
STEP = 2048
"""Tokens for which pages are taken at a time: vectors that wait for the rest of their page have pages too."""


def fill(cache: KVCache, number: int, length: int) -> None:
    """Let an empty sequence, the only one of a cache whose policies drop nothing, hold ``length`` tokens."""
    state = cache.sequence(number)
    for begin in range(0, length, STEP):
        count = min(STEP, length - begin)
        cache.reserve(state, count)
        cache.advance(state, count)
    generator = torch.Generator(cache.device).manual_seed(0)
    for layer in cache.layers:
        dim = layer.geometry.config.head_dim
        k, v = (torch.randn(PAGES, PAGE, dim, generator=generator, dtype=torch.float32,
                            device=cache.device).to(cache.dtype) for _ in range(2))
        encoded = [layer.store.encode(k, v), {"k.values": k, "v.values": v}]
        for pool, values in zip(layer.store.all, encoded):
            for name, part in pool.parts.items():
                value = values[name].to(part.dtype)
                for at in range(0, len(part), PAGES):
                    part[at:at + PAGES].copy_(value[:len(part) - at])
