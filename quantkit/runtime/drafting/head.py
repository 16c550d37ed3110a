"""Drafts by a head: a small network, in files of its own, that goes on from the model's hidden states.

A head has seen a text's position p once it got the model's hidden states there together with the token at
p + 1; what it gives then says what comes at p + 2. A draft goes on from what the head itself gave.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.models.forward_context import ForwardContext
from quantkit.models.linear import Weights
from quantkit.models.loadable import PLAIN
from quantkit.ops import gpu
from quantkit.ops.rows import largest_chance, one_thread
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.drafting.base import DraftedText, Drafter, DraftSource
from quantkit.runtime.memory.kv import DraftMemory
from quantkit.runtime.memory.scratch import gpu_step_bytes
from quantkit.runtime.program_model import ProgramModel
from quantkit.sources.base import ModelSource, QuantizedError, TensorInfo
from quantkit.support.errors import SourceError, UsageError

if TYPE_CHECKING:
    from quantkit.runtime.loader import LoadedModel


class HeadDrafter(Drafter):
    """A drafter whose drafts are a head's.

    Attributes:
        checkpoint: the files that the head was published in.
        least_chance: a draft ends before a token that is less likely than this by the head.
    """

    first: ClassVar[str] = "checkpoint"
    checkpoint: str
    least_chance: float = Field(default=0.3, ge=0, le=1)


class DraftHead(ABC):
    """The network.

    Attributes:
        config: the config of its one layer; its KV cache is made for that.
        layers: the model's layers whose inputs it goes on from; the number of layers stands for what the
            last one leaves.
    """

    config: ModelConfig
    layers: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    @abstractmethod
    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's hidden states float32 ``[n, layers, hidden]`` as the head takes them: ``[n, size]``."""

    @abstractmethod
    def run(self, ids: torch.Tensor, states: torch.Tensor, context: ForwardContext,
            batch: Batch) -> torch.Tensor:
        """Tokens int64 ``[n]`` and the states before them ``[n, size]`` → the states with them
        ``[n, size]``. Keys and values go into the batch's one sequence."""

    @abstractmethod
    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """A state ``[size]`` that :meth:`run` gave → float32 ``[vocab]`` of the model's vocabulary."""


AT_ONCE = 64
"""Positions that a head sees at once on a GPU, where every launch costs the host time; all before a draft."""


@dataclass
class _Reading:
    """What a head has seen of a text.

    Attributes:
        first: position that it has seen first; a text may begin with what another one left in the prefix
            cache.
        seen: position that comes next.
        waiting: states ``[n, size]`` of the positions from there on.
    """

    number: int
    first: int = 0
    seen: int = 0
    waiting: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))


class HeadSource(DraftSource):
    """Drafts of a head, a text at a time.

    Args:
        least_chance: a draft ends before a token that is less likely than this.
    """

    def __init__(self, head: DraftHead, model: ProgramModel, least_chance: float) -> None:
        self._head = head
        self._device = model.device
        self._least = least_chance
        self.layers, self.nbytes = head.layers, head.nbytes
        self.cache = self._cache = KVCache(head.config, KVSpec(), head.dtype, model.device)
        self.memory = DraftMemory(gpu_step_bytes(head.config, head.dtype), self._cache.bytes_per_token)
        # a device that runs ahead is given no more than it needs for every token
        self._at_once = AT_ONCE if model.runs_ahead else 1

    def begin(self, text: DraftedText) -> None:
        text.state = _Reading(self._cache.add())

    def observe(self, text: DraftedText, start: int, hidden: torch.Tensor) -> None:
        reading = _reading(text)
        if start > reading.seen + len(reading.waiting):  # what came between was never computed for this text
            self._cache.take_back(reading.number, reading.seen - reading.first)
            reading.first = reading.seen = start
            reading.waiting = reading.waiting[:0]
        with one_thread():
            states = self._head.join(hidden[max(0, reading.seen - start):])
            kept = max(0, start - reading.seen)
            reading.waiting = torch.cat([reading.waiting[:kept], states]) if kept else states
            if len(reading.waiting) >= self._at_once:
                self._catch_up(text)

    def propose(self, texts: Sequence[DraftedText], limits: Sequence[int]) -> list[list[int]]:
        with one_thread():
            return [self._draft(text, limit) for text, limit in zip(texts, limits)]

    def end(self, text: DraftedText) -> None:
        self._cache.free([_reading(text).number])

    def _draft(self, text: DraftedText, limit: int) -> list[int]:
        reading, draft = _reading(text), list[int]()
        state = self._catch_up(text)
        if state is None or reading.seen != len(text.tokens) - 1:
            return draft
        while True:
            logits = self._head.logits(state)
            if not largest_chance(logits) >= self._least:  # which NaN isn't either
                break
            draft.append(text.choose(logits))
            if len(draft) == limit:
                break
            (state,) = self._run(reading, draft[-1:], state[None])
        self._cache.take_back(reading.number, max(0, len(draft) - (len(draft) == limit)))
        return draft

    def _catch_up(self, text: DraftedText) -> torch.Tensor | None:
        """Let the head see all positions whose next token is known; its last state, if there were any."""
        reading = _reading(text)
        count = min(len(reading.waiting), len(text.tokens) - 1 - reading.seen)
        if count < 1:
            return None
        begin = reading.seen + 1
        states = self._run(reading, text.tokens[begin:begin + count], reading.waiting[:count])
        reading.seen, reading.waiting = reading.seen + count, reading.waiting[count:]
        return states[-1]

    def _run(self, reading: _Reading, tokens: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        batch = Batch(self._cache, [reading.number])
        batch.begin([len(tokens)])
        positions = batch.next_positions(len(tokens))
        ids = gpu.sent(torch.tensor(tokens), self._device)
        context = ForwardContext(self._head.config, positions, self._head.dtype, batch)
        result = self._head.run(ids, states, context, batch)
        batch.end()
        return result


def drafted_model(target: LoadedModel, drafter: str) -> ProgramModel:
    """The model that a head drafts for. Raises UsageError: it hands out no hidden states."""
    if not isinstance(target.model, ProgramModel):
        raise UsageError(f"{drafter} can't draft for {target.uri}",
                         why=target.fallback_reason or "it hands out no hidden states",
                         next="leave out --draft, or take ngram")
    return target.model


def _reading(text: DraftedText) -> _Reading:
    assert isinstance(text.state, _Reading)
    return text.state


AGAIN = "get its files from the same place again"
INTEGERS = (torch.int64, torch.int32)


@contextmanager
def head_source(uri: str) -> Iterator[ModelSource]:
    """The files that hold a head. Raises UsageError: they are a quantized checkpoint, which holds none."""
    from quantkit.sources.open import open_source

    try:
        source = open_source(uri)
    except QuantizedError:
        raise UsageError(f"{uri} holds no head", why="a quantized checkpoint leaves it out",
                         next="name the files that the head was published in") from None
    try:
        yield source
    finally:
        source.close()


class HeadFiles:
    """The tensors.

    Args:
        source: the files that have them.
        name_of: maps the name that a layer asks for to the stored one.
        model: the model that the head drafts for, in whose dtype and where it is computed.

    Attributes:
        weights: by the names that layers ask for; Linears are packed for a CPU's kernels.
        nbytes: bytes of the Linears and tables that were asked for.
    """

    def __init__(self, source: ModelSource, name_of: Callable[[str], str], model: ProgramModel) -> None:
        self._source = source
        self._name_of = name_of
        self._infos = source.tensors()
        self._asked: set[str] = set()
        self.nbytes = 0
        packs = isinstance(model, CpuModel)
        self.weights = Weights(self._tensor, self.has, model.dtype, device=model.device,
                               pack=(lambda weight: weight.packed(model.dtype)) if packs else None)

    def has(self, name: str) -> bool:
        return self._name_of(name) in self._infos

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers, int64. Raises SourceError: it is missing or another."""
        info = self._info(name)
        if info.dtype not in INTEGERS:
            raise SourceError(f"{self._source.uri}: tensor {info.name!r} is stored as {info.dtype}",
                              why="it must be whole numbers", next=AGAIN)
        return self._source.tensor(info.name).to(torch.int64)

    def refuse_unused(self, prefix: str, ignored: Collection[str]) -> None:
        """Raise SourceError if a tensor whose name begins so was never asked for."""
        for name in sorted(self._infos.keys() - self._asked - set(ignored)):
            if name.startswith(prefix):
                raise SourceError(f"{self._source.uri} has a tensor that nothing uses: {name[:120]!r}",
                                  why="such a head isn't implemented: its drafts would be others",
                                  next="take a head of another kind: see docs/drafts.md")

    def _tensor(self, name: str) -> torch.Tensor:
        info = self._info(name)
        dimensions = 1 if name.endswith(".bias") or "norm" in name.rpartition(".")[0] else 2
        if info.dtype not in PLAIN or len(info.shape) != dimensions or 0 in info.shape:
            raise SourceError(f"{self._source.uri}: tensor {info.name!r} is {info.dtype} {list(info.shape)}",
                              why=f"a head has floating-point numbers of {dimensions} dimensions there",
                              next=AGAIN)
        if dimensions == 2:
            self.nbytes += math.prod(info.shape) * self.weights.dtype.itemsize
        return self._source.tensor(info.name)

    def _info(self, name: str) -> TensorInfo:
        stored = self._name_of(name)
        self._asked.add(stored)
        if (info := self._infos.get(stored)) is None:
            raise SourceError(f"{self._source.uri} lacks the tensor {stored!r}",
                              why="the head can't compute without it", next=AGAIN)
        return info
