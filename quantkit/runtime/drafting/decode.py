"""Decoding drafts with a model: tokens are chosen one after another until one is too unlikely."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.interfaces import LanguageModel
from quantkit.ops.sampling import largest_chance
from quantkit.runtime.drafting.base import DraftedText


def decode_drafts(model: LanguageModel, cache: KVCache, numbers: Sequence[int], ids: Sequence[Sequence[int]],
                  texts: Sequence[DraftedText], limits: Sequence[int], least_chance: float,
                  vocab: int) -> list[list[int]]:
    """Draft for some texts at once. What goes through the model stays in its cache.

    Args:
        model: that drafts.
        cache, numbers: where its keys and values are, and each text's sequence there.
        ids: of each text, the tokens that the sequence lacks, at least one.
        texts: that are drafted for.
        limits: tokens of each draft, at most.
        least_chance: a draft ends before a token that is less likely than this.
        vocab: ids that may be drafted.
    """
    drafts: list[list[int]] = [[] for _ in texts]
    feed, going = [list(tokens) for tokens in ids], list(range(len(texts)))
    while going:
        batch = Batch(cache, [numbers[at] for at in going], "decode", tentative=range(len(going)))
        logits = model.forward([feed[at] for at in going], batch, [1] * len(going))[:, :vocab]
        still = []
        for row, at in zip(logits, going):
            if not largest_chance(row) >= least_chance:  # which NaN isn't either
                continue
            feed[at] = [texts[at].choose(row)]
            drafts[at] += feed[at]
            if len(drafts[at]) < limits[at]:
                still.append(at)
        going = still
    return drafts
