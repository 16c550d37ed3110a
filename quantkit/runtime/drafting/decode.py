"""Decoding drafts with a model: tokens are chosen one after another until one is too unlikely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.interfaces import LanguageModel
from quantkit.ops.sampling import largest_chance
from quantkit.runtime.drafting.base import MAX_DRAFT, DraftedText, Drafter
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


class CheckpointDrafter(Drafter):
    """A drafter that decodes with a checkpoint.

    Attributes:
        checkpoint: what drafts.
        least_chance: a draft ends before a token that is less likely than this by the draft.
    """

    first: ClassVar[str] = "checkpoint"
    max_tokens: int = Field(default=6, ge=1, le=MAX_DRAFT)
    checkpoint: str
    least_chance: float = Field(default=0.2, ge=0, le=1)

    def load(self, target: LoadedModel, dtype: str = "auto") -> LoadedModel:
        """The checkpoint, where ``target`` is.

        Raises:
            UsageError: it would be run operation by operation, which is too slow for a draft.
            QuantkitError: it can't be loaded.
        """
        from quantkit.runtime.loader import load

        draft = load(self.checkpoint, dtype=dtype, device=str(target.model.device))
        if draft.fallback_reason is not None:
            raise UsageError(f"{self.checkpoint} can't draft", why=draft.fallback_reason)
        return draft


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
