"""What a KV setting promises while a model runs: equal bits in any company, and memory as predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.evaluation.feed import prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.memory.kv import footprint
from quantkit.memory.scratch import PREFILL_CHUNK
from quantkit.runtime.loader import LoadedModel, load
from quantkit.testing.contract import Contract
from quantkit.testing.tiny import VOCAB, tiny_model

PROMPT, ANSWER = 300, 2 * 64 + 5
"""Tokens of a text: some pages, and an answer in which pages fill up."""


@dataclass
class TextRun:
    """What running a text left.

    Attributes:
        logits: after the prompt and after each token of the answer, ``[1 + ANSWER, vocab]``.
        cache: with the text in it.
        slots: that each layer's heads hold at the end.
        used: the most bytes of pages in use, at the end of a step.
    """

    logits: torch.Tensor
    cache: KVCache
    slots: list[tuple[int, ...]]
    used: int


def check_setting(spec: KVSpec, dim: int, contract: Contract) -> TextRun:
    """Run a tiny model with a KV setting whose policy and codec are registered.

    Args:
        spec: the setting.
        dim: head dimension of the model.
        contract: of what is checked.

    Returns:
        What a text left that ran alone.

    Raises:
        PluginError: logits aren't finite or depend on another sequence, or more memory is used than
            predicted.
    """
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        loaded = load(str(tiny_model(folder, "mistral", head_dim=dim, max_position_embeddings=2048)))
        texts = torch.randint(4, VOCAB, (2, PROMPT + ANSWER), generator=torch.Generator().manual_seed(0))
        alone = _run(loaded, spec, texts[:1].tolist())
        contract.must(bool(torch.isfinite(alone.logits).all()), "a tiny model's logits aren't finite with it")
        together = _run(loaded, spec, texts.tolist())
        contract.must(torch.equal(alone.logits, together.logits),
                      "a sequence's logits depend on another one that runs beside it")
        shared = _run(loaded, spec, texts[:1].tolist(), limit=0)
        contract.must(torch.equal(alone.logits, shared.logits),
                      "logits depend on whether pages are kept decoded or decoded in each step",
                      "let decode() give the same for a page whatever other pages it is given with")
        predicted = footprint(loaded.config, spec, loaded.dtype, PROMPT + ANSWER, PROMPT, PREFILL_CHUNK)
        contract.must(alone.used <= predicted.used_bytes(1),
                      f"a text takes {alone.used:,} bytes, {predicted.used_bytes(1):,} are predicted",
                      "let the number of slots that stay depend on view.lengths and view.prompt alone")
        return alone


def _run(loaded: LoadedModel, spec: KVSpec, texts: Sequence[Sequence[int]],
         limit: int | None = None) -> TextRun:
    """Run texts side by side; the result is of the first. ``limit``: bytes of pages that are kept decoded."""
    cache = KVCache(loaded.config, spec, loaded.dtype, loaded.model.device)
    if limit is not None:
        cache.decoded.bound(limit)
    rows = [cache.add(len(text)) for text in texts]
    prompts = [prefill(loaded, cache, row, text[:PROMPT]).clone() for row, text in zip(rows, texts)]
    logits, used = [prompts[0].reshape(1, -1).float()], cache.used_bytes
    for at in range(PROMPT, PROMPT + ANSWER):
        ids = torch.tensor([[text[at]] for text in texts])
        logits.append(loaded.model(ids, cache=Batch(cache, rows, "decode"))[0, -1:].float().clone())
        used = max(used, cache.used_bytes)
    return TextRun(torch.cat(logits), cache, cache.slots(rows[0]), used)
