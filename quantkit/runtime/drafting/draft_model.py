"""Drafts that a model decodes: tokens are chosen one after another until one is too unlikely.

The model is a smaller one with the same tokenizer, which reads the text into a KV cache of its own
(speculative decoding, https://arxiv.org/abs/2211.17192). Or it is the model itself in fewer bits, over the
model's own KV cache: another checkpoint, or the high halves of its int8 weights, which take no memory of
their own. The draft's keys and values are then written behind the text's, and taken back before the model
writes its own there: such a draft costs no cache and reads no prompt. https://arxiv.org/abs/2502.10424
(QuantSpec) drafts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.config import ModelConfig
from quantkit.models.interfaces import LanguageModel
from quantkit.ops.rows import largest_chance
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.drafting.base import MAX_DRAFT, DraftedText, Drafter, DraftSource
from quantkit.runtime.memory.kv import DraftMemory
from quantkit.runtime.memory.scratch import gpu_step_bytes
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


class CheckpointDrafter(Drafter):
    """A drafter that decodes with a checkpoint.

    Attributes:
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
        cache, numbers: where its keys and values are, and each text's sequence there.
        ids: for each text the tokens that its sequence lacks, at least one.
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


AT_ONCE = 512
"""Tokens of a text that the drafting model reads between two steps, at most; until it has read all, it drafts
nothing."""


class ModelDrafter(CheckpointDrafter):
    """Another model, as any command takes it."""

    name: ClassVar[str] = "model"

    def start(self, target: LoadedModel) -> DraftSource:
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
        fed: ids in it, those of the last draft included.
        known: the number of them that are known to be the text's.
    """

    number: int
    fed: list[int] = field(default_factory=list)
    known: int = 0


class _ModelSource(DraftSource):
    def __init__(self, draft: LoadedModel, vocab: int, least_chance: float) -> None:
        self._model, self._least = draft.model, least_chance
        self._vocab = min(vocab, draft.config.vocab_size)
        self._longest = draft.config.max_position_embeddings
        self.cache = self._cache = KVCache(draft.config, dtype=draft.dtype, device=draft.model.device)
        self.nbytes = draft.weight_bytes
        self.memory = DraftMemory(gpu_step_bytes(draft.config, draft.dtype), self._cache.bytes_per_token)

    def begin(self, text: DraftedText) -> None:
        text.state = _Reading(self._cache.add())

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
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


class LowBitDrafter(CheckpointDrafter):
    """The model itself in fewer bits.

    Attributes:
        checkpoint: a checkpoint of fewer bits; without one, int8 weights are read by their high halves.
    """

    name: ClassVar[str] = "self"
    checkpoint: str = ""

    def start(self, target: LoadedModel) -> DraftSource:
        if not self.checkpoint:
            return _LowBitSource(_high_halves(target), self.least_chance, 0)
        draft = self.load(target, dtype=str(target.dtype).removeprefix("torch."))
        if _shape(draft.config) != _shape(target.config):
            raise UsageError(f"{self.checkpoint} can't draft for {target.uri}",
                             why="its shape is another: the KV cache of one is not that of the other",
                             next="name a checkpoint that was quantized from the same model")
        return _LowBitSource(draft.model, self.least_chance, draft.weight_bytes)


class _LowBitSource(DraftSource):
    def __init__(self, model: LanguageModel, least_chance: float, nbytes: int) -> None:
        self._model = model
        self._least = least_chance
        self.nbytes, self.memory = nbytes, DraftMemory(gpu_step_bytes(model.config, model.dtype))
        self._vocab = model.config.vocab_size

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in texts]
        for cache in {id(text.cache): text.cache for text in texts}.values():
            rows = [row for row, text in enumerate(texts) if text.cache is cache]
            numbers = [texts[row].sequence for row in rows]
            begin = Batch(cache, numbers, "decode", tentative=range(len(rows)))
            with ExitStack() as afterwards:  # each is taken back, whatever goes wrong
                for place in range(len(rows)):
                    afterwards.callback(begin.accept, place, 0)
                made = decode_drafts(self._model, cache, numbers, [texts[row].tokens[-1:] for row in rows],
                                     [texts[row] for row in rows], [limits[row] for row in rows], self._least,
                                     self._vocab)
            for row, draft in zip(rows, made):
                drafts[row] = draft
        return drafts


def _high_halves(target: LoadedModel) -> LanguageModel:
    """The model, its int8 weights by their high halves. Raises UsageError: it has none."""
    draft = target.model.high_halves() if isinstance(target.model, CpuModel) else None
    if draft is None:
        raise UsageError(f"{target.uri} has no high halves to draft with",
                         why="no layer of it is int8 without zero points and run by the CPU's kernels",
                         next="quantize it by `quantkit quantize --recipe int8-head8-draft`, or name a "
                              "checkpoint of fewer bits: self(CHECKPOINT)")
    return draft


def _shape(config: ModelConfig) -> tuple[object, ...]:
    """What a KV cache and the tokens depend on."""
    return (config.model_type, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
            config.hidden_size, config.vocab_size, config.rope, config.sliding_windows)
