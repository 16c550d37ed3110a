"""What models as kernels on a CPU and on a GPU share: their calls, cut into steps of a program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.kv.batch import Batch, block_of
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.forward_context import inverse_frequencies
from quantkit.models.interfaces import KVCacheProtocol, LanguageModel
from quantkit.models.linear import Linear
from quantkit.models.rope_config import RopeConfig

POSITION_BLOCK = 512
"""Positions whose cosines and sines are computed together."""


@dataclass(frozen=True)
class RowSlice:
    """Tokens ``[start, start + count)`` of a row of a batch, which go through a program in one step.

    Attributes:
        sequence: the row's place in the batch.
    """

    sequence: int
    start: int
    count: int


class ProgramModel(LanguageModel):
    """A model as a program of kernels, with the calls of :class:`~quantkit.models.decoder.CausalLM`.

    A step of the model is cut into steps of the program where it has more tokens than the program takes at
    once, or queries that must be accumulated in between.

    Args:
        model: the model as its operations.

    Attributes:
        max_rows: tokens that go through the program at once, at most.
    """

    max_rows: ClassVar[int]

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.config = model.config
        self.dtype = model.dtype
        self.device = device
        self._model = model

    @abstractmethod
    def reason_against(self, cache: KVCache) -> str | None:
        """Why the program can't run over this cache."""

    @abstractmethod
    def token_rows(self, tokens: Sequence[Sequence[int]]) -> Any:
        """Token ids, a list for each row, as the program takes them: what can be indexed as an int64
        ``[B, T]``."""

    @abstractmethod
    def step_logits(self, batch: Batch, ids: Any, counts: Sequence[int],
                    wanted: Sequence[range]) -> list[torch.Tensor]:
        """Take a batch's tokens through the program.

        Args:
            ids: token ids of each row, see :meth:`token_rows`.
            counts: tokens of each row.
            wanted: for each row the places whose logits are returned.

        Returns:
            Logits ``[n, vocab]``, in parts.
        """

    @abstractmethod
    def step_hidden(self, batch: Batch, ids: Any, counts: Sequence[int]) -> list[torch.Tensor]:
        """The same, but for what the last layer leaves of all tokens: ``[n, hidden]``, in parts."""

    @abstractmethod
    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's ``[n, hidden]`` → ``[n, vocab]`` of at most :attr:`max_rows` rows."""

    @abstractmethod
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[n]`` → what the first layer gets, ``[n, hidden]``."""

    @abstractmethod
    def head(self, x: torch.Tensor) -> torch.Tensor:
        """What is behind the final norm, ``[n, hidden]`` → ``[n, vocab]``."""

    def warm_up(self, cache: KVCache, sequences: int, tokens: int, rows: int = 1,
                taps: tuple[int, ...] = ()) -> Iterable[None]:
        """Nothing takes longer the first time."""
        return ()

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched where the model is meanwhile."""
        return nullcontext()

    def linears(self) -> dict[str, Linear]:
        """The Linears of the model: names, shapes, and the weights that multiply."""
        return self._model.linears()

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
                 cache: KVCacheProtocol | None = None, last: torch.Tensor | None = None) -> torch.Tensor:
        with self.on_device():
            batch = self._batch(ids, cache)
            if batch is None:
                return self._model(ids, positions, cache, last).float()
            counts = batch.counts(ids.shape, positions)
            wanted = [range(count) for count in counts] if last is None else [
                single_position(int(at), count) for at, count in zip(last, counts, strict=True)]
            batch.begin(counts)
            parts = self.step_logits(batch, self._rows(ids), counts, wanted)
            batch.end()
            rows = join_rows(parts, self.config.vocab_size)
            return rows if last is not None else pad_rows(rows, counts, ids.shape[1])

    def forward(self, tokens: Sequence[Sequence[int]], batch: Batch, wanted: Sequence[int]) -> torch.Tensor:
        with self.on_device():
            if not self._runs(batch):
                return self._model.forward(tokens, batch, wanted)
            counts = [*map(len, tokens)]
            places = [range(count - wants, count) for count, wants in zip(counts, wanted)]
            batch.begin(counts)
            parts = self.step_logits(batch, self.token_rows(tokens), counts, places)
            batch.end()
            return join_rows(parts, self.config.vocab_size).float()

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None = None,
               cache: KVCacheProtocol | None = None) -> torch.Tensor:
        with self.on_device():
            batch = self._batch(ids, cache)
            if batch is None:
                return self._model.hidden(ids, positions, cache).float()
            counts = batch.counts(ids.shape, positions)
            batch.begin(counts)
            parts = self.step_hidden(batch, self._rows(ids), counts)
            batch.end()
            return pad_rows(join_rows(parts, self.config.hidden_size), counts, ids.shape[1])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        with self.on_device():
            flat = join_rows([self.head_logits(part) for part in rows.split(self.max_rows)],
                             self.config.vocab_size)
        return flat.reshape(*x.shape[:-1], self.config.vocab_size)

    def slices(self, batch: Batch, counts: Sequence[int]) -> Iterable[list[RowSlice]]:
        """A batch's tokens as steps of the program."""
        diffusion = self.config.diffusion
        return slices_of(counts, self.max_rows, block_of(batch.cache, batch.phases), batch.starts,
                         1 if diffusion is None else diffusion.block_size)

    def _rows(self, ids: torch.Tensor) -> Any:
        """``ids [B, T]`` as the program takes them."""
        return ids

    def _batch(self, ids: torch.Tensor, cache: KVCacheProtocol | None) -> Batch | None:
        """The sequences as rows of pages; ``None`` if the program doesn't run over them."""
        if cache is None:
            cache_of_step = KVCache(self.config, KVSpec(), self.dtype, self.device)
            return Batch(cache_of_step, [cache_of_step.add() for _ in range(ids.shape[0])])
        return cache if isinstance(cache, Batch) and self._runs(cache) else None

    def _runs(self, batch: Batch) -> bool:
        """Whether the program runs over these sequences, and not one operation after another. Raises
        UsageError: neither can."""
        if self.reason_against(batch.cache) is None:
            return True
        self.check_cache(batch.cache)
        return False


def reason_against_shape(config: ModelConfig, also: Mapping[str, bool] = MappingProxyType({})) -> str | None:
    """What a model does that no kernel computes; ``None`` if there is nothing.

    Args:
        also: further features that no kernel of this device computes, and whether the model has them.
    """
    has = {**also, "a rotation that depends on the sequence's length": config.rope.kind == "longrope",
           "a rotation of parts of a head": config.rope.partial != 1.0}
    feature = next((name for name, used in has.items() if used), None)
    return None if feature is None else f"has no kernel for {feature}"


def reason_against_experts(config: ModelConfig, quantized: Mapping[str, QuantizedTensor]) -> str | None:
    """Why a model's experts aren't multiplied side by side; ``None`` if they are, or there are none.

    Args:
        quantized: packed weights by name.
    """
    if (experts := config.experts) is None:
        return None
    gate, up, down = experts.projections
    for index, has_experts in enumerate(experts.layers):
        for parts in ((gate, up), (down,)) if has_experts else ():
            names = [f"{experts.expert_name(index, number)}.{part}"
                     for number in range(experts.count) for part in parts]
            if len({None if (weight := quantized.get(name)) is None else weight.spec for name in names}) > 1:
                return f"multiplies experts that are quantized alike, unlike those of layer {index}"
    return None


def slices_of(counts: Sequence[int], rows: int, block: int | None = None, starts: Sequence[int] = (),
              together: int = 1) -> Iterable[list[RowSlice]]:
    """Cut a batch into steps.

    Args:
        counts: tokens of each sequence.
        rows: tokens of a step, at most.
        block: a step has tokens of a sequence from one block of this many positions only.
        starts: the position of each sequence's first token; needed with ``block`` or ``together``.
        together: no block of this number of positions is cut; at most ``rows``.

    Yields:
        The slices of a step.
    """
    step: list[RowSlice] = []
    free = rows
    for sequence, count in enumerate(counts):
        start = 0
        while start < count:
            size = min(free, count - start)
            if block is not None:
                size = min(size, block - (starts[sequence] + start) % block)
            if together > 1 and size < count - start:
                size = max(0, size - (starts[sequence] + start + size) % together)
                if not size:
                    yield step
                    step, free = [], rows
                    continue
            step.append(RowSlice(sequence, start, size))
            start, free = start + size, free - size
            if not free or start < count:
                yield step
                step, free = [], rows
    if step:
        yield step


def selected_rows(slices: Sequence[RowSlice], wanted: Sequence[range]) -> list[int]:
    """The rows of a step whose places in their sequences are in ``wanted``."""
    rows: list[int] = []
    first = 0
    for part in slices:
        rows += [first + place - part.start for place in wanted[part.sequence]
                 if part.start <= place < part.start + part.count]
        first += part.count
    return rows


def single_position(index: int, count: int) -> range:
    """The one place ``index`` of a row of ``count`` tokens. Raises ValueError if there is none."""
    index += count if index < 0 else 0
    if not 0 <= index < count:
        raise ValueError(f"last is {index} in a row of {count} tokens")
    return range(index, index + 1)


def join_rows(parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """The rows ``[n, size]`` of all steps."""
    if not parts:
        return torch.empty(0, size)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def pad_rows(rows: torch.Tensor, counts: Sequence[int], length: int) -> torch.Tensor:
    """Sequences' rows ``[n, size]``, one after another → ``[B, length, size]``, zeros behind their ends."""
    if all(count == length for count in counts):
        return rows.view(len(counts), length, rows.shape[1])
    return torch.stack([torch.nn.functional.pad(sequence, (0, 0, 0, length - len(sequence)))
                        for sequence in rows.split(counts)])


def rope_tables(config: ModelConfig, size: int,
                device: torch.device | str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines of ``size`` positions, float32 ``[size, D / 2]`` each, for every layer in turn.

    Layers with the same rotation share their tables. A position's bits don't depend on ``size``, because
    torch always computes a full block of positions.
    """
    tables: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
    for window in config.sliding_windows:
        if (rope := config.rope_of(window)) not in tables:
            inverse = inverse_frequencies(rope, config.head_dim, torch.device("cpu"))
            blocks = [torch.arange(start, start + POSITION_BLOCK)[:, None].float() * inverse
                      for start in range(0, size, POSITION_BLOCK)]
            cos = torch.cat([block.cos() for block in blocks])[:size] * rope.attention_factor
            sin = torch.cat([block.sin() for block in blocks])[:size] * rope.attention_factor
            tables[rope] = cos.to(device), sin.to(device)
        yield tables[rope]
