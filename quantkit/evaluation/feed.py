"""Calls a model as serving does, to score it: a prompt in chunks, then forced tokens as if generated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.memory.scratch import PREFILL_CHUNK
from quantkit.ops.sampling import greedy
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import QuantkitError

MOST = 256
"""Forced tokens at once, at most."""


def prefill(loaded: LoadedModel, cache: KVCache, row: int, ids: Sequence[int], *,
            ends: bool = True) -> torch.Tensor:
    """Read prompt tokens in the engine's chunks.

    Args:
        loaded: the model.
        cache: with the sequence ``row``.
        row: the sequence.
        ids: at least one token.
        ends: the prompt ends here, and policies act; else more of it follows.

    Returns:
        Logits ``[1, vocab]`` after the last token.
    """
    device, logits = loaded.model.device, torch.empty(0)
    for start in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[start:start + PREFILL_CHUNK]
        last = ends and start + len(chunk) == len(ids)
        batch = Batch(cache, [row], "prefill_end" if last else "prefill")
        logits = loaded.model(torch.tensor([list(chunk)], device=device), cache=batch,
                              last=torch.tensor([len(chunk) - 1]))
    return _without_codec_fault(logits, cache, row)


def force(loaded: LoadedModel, cache: KVCache, row: int, ids: Sequence[int], done: int = 0) -> torch.Tensor:
    """Feed tokens as if they had been generated; every query reads what decoding reads.

    Tokens go together between two actions of the policy, which changes nothing but the speed.

    Args:
        loaded, cache, row: as for :func:`prefill`.
        ids: at least one token.
        done: tokens that were decoded or forced after the prompt before.

    Returns:
        Logits ``[n, vocab]``, each after one of the tokens.
    """
    every, steps, start = cache.policy.decode_interval, [], 0
    while start < len(ids):
        room = MOST if every is None else min(MOST, every - (done + start) % every)
        chunk = torch.tensor([list(ids[start:start + room])], device=loaded.model.device)
        steps.append(loaded.model(chunk, cache=Batch(cache, [row], "decode"))[0].clone())
        start += room
    return _without_codec_fault(torch.cat(steps), cache, row)


def _without_codec_fault(logits: torch.Tensor, cache: KVCache, row: int) -> torch.Tensor:
    """``logits`` as they are. Raises PluginError if they aren't finite and a plugin's codec is to blame."""
    if not (logits < torch.inf).all() and (fault := cache.codec_fault(row)) is not None:
        raise fault
    return logits


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
