"""Teacher forcing through a KV cache: scores a text's tokens while the cache is compressed.

A window's first tokens are the prompt, which goes through the cache as a request's would; then the
rest is fed as if it had been generated, and every query reads what decoding would read.
"""

from __future__ import annotations

import torch

from quantkit.evaluation.feed import force, prefill
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel


class TeacherForcedModel:
    """One model with one KV setting.

    Args:
        loaded: the model.
        kv: how keys and values are kept.
        prompt: tokens of a window that are its prompt.

    Attributes:
        kv_bytes: allocated when the last window had all its tokens.
        kv_bytes_per_token: of codes and scales, all layers and heads.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec, prompt: int) -> None:
        self.loaded, self.kv, self._prompt = loaded, kv, prompt
        self.kv_bytes, self.kv_bytes_per_token = 0, 0

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """Logits ``[n - prompt, vocab]`` of ``window`` int64 ``[n]`` from position ``prompt`` on."""
        ids: list[int] = window.tolist()
        cache = KVCache(self.loaded.config, self.kv, self.loaded.dtype, self.loaded.model.device)
        row = cache.add(len(ids))
        prefill(self.loaded, cache, row, ids[:self._prompt])
        logits = force(self.loaded, cache, row, ids[self._prompt:])
        self.kv_bytes, self.kv_bytes_per_token = cache.allocated_bytes, cache.bytes_per_token
        return logits
