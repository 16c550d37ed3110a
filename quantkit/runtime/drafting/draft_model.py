"""Drafts by a smaller model with the same tokenizer, which reads the text into a KV cache of its own.

Speculative decoding, https://arxiv.org/abs/2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.runtime.drafting.base import DraftedText, DraftSource
from quantkit.runtime.drafting.decode import CheckpointDrafter, decode_drafts
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel

AT_ONCE = 512
"""Tokens of a text that the drafting model reads between two steps, at most; until it has read all, it drafts
nothing."""


class ModelDrafter(CheckpointDrafter):
    """Another model, as any command takes it."""

    name: ClassVar[str] = "model"

    def start(self, target: LoadedModel) -> DraftSource:
        """See the base class."""
        draft = self.load(target)
        if draft.tokenizer.vocabulary != target.tokenizer.vocabulary:
            raise UsageError(f"{self.checkpoint} can't draft for {target.uri}",
                             why="its tokenizer is another, so its tokens mean something else",
                             next="name a model of the same family")
        return _ModelSource(draft, target.config.vocab_size, self.least_chance)


@dataclass
class _Reading:
    """What the drafting model has of a text.

    Attributes:
        number: of its sequence.
        fed: ids in it, those of the last draft included.
        known: how many of them are known to be the text's.
    """

    number: int
    fed: list[int] = field(default_factory=list)
    known: int = 0


class _ModelSource(DraftSource):
    def __init__(self, draft: LoadedModel, vocab: int, least_chance: float) -> None:
        self._model, self._least = draft.model, least_chance
        self._vocab = min(vocab, draft.config.vocab_size)
        self._longest = draft.config.max_position_embeddings
        self._cache = KVCache(draft.config, dtype=draft.dtype, device=draft.model.device)
        self.nbytes = draft.weight_bytes

    def begin(self, text: DraftedText) -> None:
        """See the base class."""
        text.state = _Reading(self._cache.add())

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        """See the base class."""
        drafts: list[list[int]] = [[] for _ in texts]
        ready: list[int] = []
        self.cold = False
        for at, (text, limit) in enumerate(zip(texts, limits)):
            if len(text.tokens) + limit <= self._longest and self._catch_up(text):
                ready.append(at)
        if ready:
            readings = [_reading(texts[at]) for at in ready]
            missing = [texts[at].tokens[len(reading.fed):] for at, reading in zip(ready, readings)]
            made = decode_drafts(self._model, self._cache, [reading.number for reading in readings], missing,
                                 [texts[at] for at in ready], [limits[at] for at in ready], self._least,
                                 self._vocab)
            self.cold = self.cold or max(map(len, missing)) > 1 + max(limits)
            for at, reading, tokens, draft in zip(ready, readings, missing, made):
                drafts[at] = draft
                count = self._cache.seen(reading.number)  # the last token that was drafted isn't there
                reading.fed = [*reading.fed, *tokens, *draft][:count]
        return drafts

    def end(self, text: DraftedText) -> None:
        """See the base class."""
        self._cache.free([_reading(text).number])

    def _catch_up(self, text: DraftedText) -> bool:
        """Take back what became of no text, and read on; whether not much is left to be read."""
        reading, tokens = _reading(text), text.tokens
        same, end = reading.known, min(len(reading.fed), len(tokens) - 1)
        while same < end and reading.fed[same] == tokens[same]:
            same += 1
        self._cache.take_back(reading.number, len(reading.fed) - same)
        del reading.fed[same:]
        reading.known = same
        part = tokens[same:same + AT_ONCE]
        if same + len(part) == len(tokens):
            return True
        self._model.forward([part], Batch(self._cache, [reading.number], "prefill"), [0])
        reading.fed += part
        self.cold = True
        return False


def _reading(text: DraftedText) -> _Reading:
    assert isinstance(text.state, _Reading)
    return text.state
