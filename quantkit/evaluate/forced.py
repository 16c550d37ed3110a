"""Teacher forcing through a KV cache: what a text's tokens cost once it is compressed.

A window's first tokens are the prompt, which goes through the cache as a request's would; then the
rest is fed as if it had been generated, and every query reads what decoding would read. Tokens go in
chunks as long as the time between two actions of the policy, which changes nothing but the speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.evaluate.feed import prefill
from quantkit.kv.cache import KVCache
from quantkit.runtime.loader import LoadedModel
from quantkit.spec import KVSpec

CHUNK = 256
"""Forced tokens at once, at most."""


class Forced:
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
        model = self.loaded.model
        cache = KVCache(self.loaded.config, self.kv, self.loaded.dtype, model.device)
        row, end = cache.add(len(window)), len(window)
        step = min(cache.policy.every or CHUNK, CHUNK)
        if cache.policy.every and cache.policy.every % step:
            step = 1
        ids, found = window[None].to(model.device), []
        prefill(self.loaded, cache, row, window[:self._prompt].tolist())
        for start in range(self._prompt, end, step):
            stop = min(start + step, end)
            batch = cache.batch([row], "decode")
            found.append(model(ids[:, start:stop], cache=batch)[0])
        self.kv_bytes, self.kv_bytes_per_token = cache.allocated_bytes, cache.bytes_per_token
        return torch.cat(found)


def split_settings(text: str) -> Sequence[str]:
    """``none,int8,window(512, sinks=4)`` → its parts; commas in parentheses separate nothing."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
