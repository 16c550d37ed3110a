"""Drafts by the model's own version of fewer bits, over the model's own KV cache: another checkpoint, or the
high halves of its int8 weights, which take no memory of their own.

The draft's keys and values are written behind the text's, and taken back before the model writes its own
there: a draft costs no cache and reads no prompt. https://arxiv.org/abs/2502.10424 (QuantSpec) drafts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from quantkit.kv.batch import Batch
from quantkit.models.config import ModelConfig
from quantkit.models.interfaces import LanguageModel
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.drafting.base import DraftedText, DraftSource
from quantkit.runtime.drafting.decode import CheckpointDrafter, decode_drafts
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


class LowBitDrafter(CheckpointDrafter):
    """The model itself in fewer bits.

    Attributes:
        checkpoint: of fewer bits; without it, int8 weights are read by their high halves.
    """

    name: ClassVar[str] = "self"
    checkpoint: str = ""

    def start(self, target: LoadedModel) -> DraftSource:
        """See the base class."""
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
        self._model, self._least, self.nbytes = model, least_chance, nbytes
        self._vocab = model.config.vocab_size

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        """See the base class."""
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
