"""Calls a model as serving does, to score it: a prompt in chunks, then forced tokens as if generated.

Teacher forcing scores a text while its KV cache is compressed. A window's first tokens are the prompt, which
goes through the cache as a request's would; the rest is fed as if it had been generated, so that every query
reads what decoding would read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.reread import finish_prompt
from quantkit.kv.spec import KVSpec
from quantkit.ops.rows import greedy
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.scratch import prompt_portion
from quantkit.support.errors import QuantkitError

MOST = 256
"""Forced tokens at once, at most."""


def prefill(loaded: LoadedModel, cache: KVCache, row: int, ids: Sequence[int], *,
            ends: bool = True, prompt: Sequence[int] | None = None) -> torch.Tensor:
    """Read prompt tokens in the engine's chunks.

    Args:
        loaded: the model in memory.
        cache: with the sequence ``row``.
        row: the number of the sequence in it.
        ids: at least one token.
        ends: the prompt ends here, and policies act; else more of it follows.
        prompt: what policies read again; by default ``ids``.

    Returns:
        Logits ``[1, vocab]`` after the last token.
    """
    device, logits = loaded.model.device, torch.empty(0)
    portion = prompt_portion(loaded.model, cache)
    for start in range(0, len(ids), portion):
        chunk = ids[start:start + portion]
        last = ends and start + len(chunk) == len(ids)
        batch = Batch(cache, [row], "prefill_end" if last else "prefill", defers=last)
        logits = loaded.model(torch.tensor([list(chunk)], device=device), cache=batch,
                              last=torch.tensor([len(chunk) - 1]))
        if last:
            for _ in finish_prompt(loaded.model, batch, ids if prompt is None else prompt):
                pass
    return without_codec_fault(logits, cache, row)


def force(loaded: LoadedModel, cache: KVCache, row: int, ids: Sequence[int], done: int = 0, *,
          hidden: bool = False) -> torch.Tensor:
    """Feed tokens as if they had been generated; every query reads what decoding reads.

    Tokens go together between two actions of the policy, which changes nothing but the speed.

    Args:
        loaded, cache, row: as for :func:`prefill`.
        ids: at least one token.
        done: tokens that were decoded or forced after the prompt before.
        hidden: what the last layer leaves is wanted, of which ``loaded.model.logits`` makes logits.

    Returns:
        Logits ``[n, vocab]``, or hidden states ``[n, hidden]``, each after one of the tokens.
    """
    run = loaded.model.hidden if hidden else loaded.model
    every = cache.policy.decode_interval
    steps = []
    start = 0
    while start < len(ids):
        room = MOST if every is None else min(MOST, every - (done + start) % every)
        chunk = torch.tensor([list(ids[start:start + room])], device=loaded.model.device)
        steps.append(run(chunk, cache=Batch(cache, [row], "decode"))[0].clone())
        start += room
    return without_codec_fault(torch.cat(steps), cache, row)


def without_codec_fault(rows: torch.Tensor, cache: KVCache, row: int) -> torch.Tensor:
    """``rows`` as they are. Raises PluginError if they aren't finite and a plugin's codec is to blame."""
    if not (rows < torch.inf).all() and (fault := cache.codec_fault(row)) is not None:
        raise fault
    return rows


def likeliest(loaded: LoadedModel, logits: torch.Tensor) -> int:
    """Greedy decoding's token for ``logits [vocab]``. Raises QuantkitError if they aren't finite."""
    tokens = greedy(finite(loaded, logits))
    return int(logits.argmax()) if tokens is None else tokens


def finite(loaded: LoadedModel, logits: torch.Tensor) -> torch.Tensor:
    """``logits`` as they are. Raises QuantkitError if one is NaN or +∞."""
    if not (logits < torch.inf).all():
        raise QuantkitError(f"{loaded.uri} gives logits that are not finite", next="--dtype float32",
                            why="its weights are finite: activations outgrow the dtype that it runs in")
    return logits


class TeacherForcedModel:
    """One model with one KV setting.

    Args:
        loaded: the model in memory.
        kv: how keys and values are kept.
        prompt: tokens of a window that are its prompt.

    Attributes:
        kv_bytes: allocated when the last window had all its tokens; of one that writes blocks, its pages.
        kv_bytes_per_token: the bytes of codes and scales, all layers and heads.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec, prompt: int) -> None:
        self.loaded = loaded
        self.kv = kv
        self._prompt = prompt
        self.kv_bytes, self.kv_bytes_per_token = 0, 0

    def hidden(self, window: torch.Tensor) -> torch.Tensor:
        """What the last layer leaves of ``window`` int64 ``[n]`` from position ``prompt`` on, ``[n - prompt,
        hidden]``."""
        ids: list[int] = window.tolist()
        cache = KVCache(self.loaded.config, self.kv, self.loaded.dtype, self.loaded.model.device)
        row = cache.add(len(ids))
        prefill(self.loaded, cache, row, ids[:self._prompt])
        rows = force(self.loaded, cache, row, ids[self._prompt:], hidden=True)
        self.kv_bytes, self.kv_bytes_per_token = cache.allocated_bytes, cache.bytes_per_token
        return rows
