"""Steps as CUDA graphs: of decoding for every number of tokens and of slots that comes up, of prompts for a
few numbers of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.ops import gpu
from quantkit.runtime.memory.scratch import GPU_LEAST, GPU_ROWS

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import StepTokens

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Tokens of a decoding step's graph, one of each sequence or, with drafts, several; a step has the next
larger one's, and what is missing are nobody's."""
SMALL = 16
"""The number of sequences up to which the logits' memory isn't that of the largest graph."""
SLOTS = 1536
"""Of a head, at least; more by doubling. Answers to texts of 1,024, 2,048, … tokens need no other graph."""
Run = Callable[["torch.Tensor", "StepTokens", "torch.Tensor", "torch.Tensor"], None]
"""``ids [N]`` and whose they are, and where logits ``[N, vocab]`` and hidden states that are handed out
``[taps, N, hidden]`` go."""
RunPrompt = Callable[["torch.Tensor", "StepTokens", "torch.Tensor", "torch.Tensor", "torch.Tensor"], None]
"""``ids [N]`` and whose they are, tiles, and where the last layer's ``[N, hidden]`` and hidden states that
are handed out go."""


def slots_of(longest: int, limit: int) -> int:
    """The slots of the graph for heads of ``longest``; ``limit``: where the model's longest text ends."""
    slots = SLOTS << (-(-longest // SLOTS) - 1).bit_length()
    return slots if longest > limit else min(slots, limit)


@dataclass
class _Graph:
    """A captured step, the memory that it reads, and whose tokens it took last."""

    ids: torch.Tensor
    step: StepTokens
    hidden: torch.Tensor
    replay: Callable[[], None] | None
    rows: Sequence[tuple[int, int]] = ()


class GraphCache:
    """Captured steps, as long as everything that they point to lies where it was. All write their results to
    the same memory.

    Args:
        device: the device; on a CPU there are no graphs, and the step itself is called.
        vocab: numbers of a token's logits.
        limit: slots of a head where the model's longest text ends.
        taps, hidden: layers whose hidden states are handed out, and their size.
    """

    def __init__(self, device: torch.device, vocab: int, dtype: torch.dtype, limit: int, taps: int,
                 hidden: int) -> None:
        self._device, self._limit = device, limit
        self._logits = torch.empty(0, vocab, dtype=dtype, device=device)
        self._hidden = torch.empty(taps, 0, hidden, dtype=dtype, device=device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._valid: object = None
        self._pool: Any = None

    def __call__(self, run: Run, ids: torch.Tensor, rows: Sequence[tuple[int, int]], longest: int,
                 valid: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of some sequences.

        Args:
            run: the step; always the same.
            ids: int64 ``[n]``, at most 256, on the device.
            rows: whose they are: a row of the tables on the device, and the token's place among the step's of
                that sequence, which stand side by side.
            longest: slots of a head after this step, at most.
            valid: changes when something lies elsewhere.

        Returns:
            Logits ``[n, vocab]`` and hidden states ``[taps, n, hidden]``, valid until the next call.
        """
        size = next(size for size in BATCHES if size >= len(rows))
        self._make_room(size, valid)
        graph = self._graph(run, size, slots_of(longest, self._limit))
        if rows != graph.rows:
            whose = torch.tensor([*rows, *[(-1, 0)] * (size - len(rows))], dtype=torch.int32)
            graph.step.rows.copy_(gpu.sent(whose, self._device))
            graph.rows = rows
        graph.ids[:len(rows)].copy_(ids)
        if graph.replay is None:
            run(graph.ids, graph.step, self._logits[:size], graph.hidden)
        else:
            graph.replay()
        return self._logits[:len(rows)], graph.hidden[:, :len(rows)]

    def warm_up(self, run: Run, sequences: int, longest: int, valid: object) -> Iterator[None]:
        """Capture the steps of up to ``sequences`` sequences, whose heads have up to ``longest`` slots: one
        for each item that is taken."""
        sizes = [size for size, below in zip(BATCHES, (0, *BATCHES)) if below < sequences]
        self._make_room(sizes[-1], valid)
        lengths = {slots_of(min(SLOTS << doublings, longest), self._limit)
                   for doublings in range((longest // SLOTS).bit_length() + 1)}
        for size in reversed(sizes):  # the largest first, whose memory the others share
            for slots in sorted(lengths, reverse=True):
                self._graph(run, size, slots)
                yield

    def _make_room(self, size: int, valid: object) -> None:
        """Forget graphs whose memory moved, and have room for the logits of ``size`` sequences."""
        if valid != self._valid:
            self._graphs, self._valid, self._pool = {}, valid, None
        if size > len(self._logits):
            self._graphs, self._pool = {}, None
            rows = BATCHES[-1] if size > SMALL else SMALL
            self._logits = self._logits.new_empty(rows, self._logits.shape[1])
            self._hidden = self._hidden.new_empty(len(self._hidden), rows, self._hidden.shape[2])

    def _graph(self, run: Run, size: int, longest: int) -> _Graph:
        if (size, longest) not in self._graphs:
            ids, step = _nobodys(size, self._device, longest)
            out, hidden = self._logits[:size], self._hidden[:, :size]
            replay, self._pool = _captured(lambda: run(ids, step, out, hidden), self._device, self._pool)
            self._graphs[size, longest] = _Graph(ids, step, hidden, replay)
        return self._graphs[size, longest]


PORTIONS = (GPU_LEAST, 512, 1024, GPU_ROWS)
"""Tokens of prompts in a graph; a step has the next larger one's."""
OFTEN = 4
"""Portions of a size after which a graph is worth it where none was captured at the start: a cache that grows
moves before as many have come, or is let go of."""
SEQUENCES = 64
"""Sequences whose prompts' tokens a graph has room for, at least."""


@dataclass
class _PromptGraph:
    """A captured step of prompts, the memory that it reads, and where its results are."""

    ids: torch.Tensor
    step: StepTokens
    tiles: torch.Tensor
    out: torch.Tensor
    hidden: torch.Tensor
    replay: Callable[[], None] | None


class PromptGraphs:
    """Captured steps of prompts, as long as everything that they point to lies where it was.

    Args:
        device: as for :class:`GraphCache`.
        hidden, dtype: of results.
        tokens: of a tile, at most.
        taps: layers whose hidden states are handed out.
    """

    def __init__(self, device: torch.device, hidden: int, dtype: torch.dtype, tokens: int, taps: int) -> None:
        self._device, self._hidden, self._dtype, self._tokens = device, hidden, dtype, tokens
        self._tapped = torch.empty(taps, PORTIONS[-1], hidden, dtype=dtype, device=device)
        self._graphs: dict[int, _PromptGraph] = {}
        self._seen = Counter[int]()
        self._valid: object = None
        self._pool: Any = None

    def __call__(self, run: RunPrompt, ids: torch.Tensor, rows: np.ndarray, tiles: np.ndarray,
                 valid: object) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Tokens of some prompts.

        Args:
            run: the step; always the same.
            ids: int64 ``[n]``, on the device.
            rows: int32 ``[n, 2]``, see :class:`~quantkit_kernels.triton.cache.StepTokens`.
            tiles: int32 ``[t, 3]``, see
                :func:`~quantkit_kernels.triton.prefill_attention.prefill_attention`.
            valid: changes when something lies elsewhere.

        Returns:
            ``[n, hidden]`` and the hidden states ``[taps, n, hidden]``, valid until the next call; ``None``:
            there is no graph for as many, or not yet.
        """
        size = next((size for size in PORTIONS if size >= len(ids)), 0)
        if not size or len(tiles) > size // self._tokens + SEQUENCES:
            return None
        self._forget_what_moved(valid)
        if size not in self._graphs and self._seen[size] < OFTEN:
            self._seen[size] += 1
            return None
        graph = self._graph(run, size)
        graph.ids[:len(ids)].copy_(ids)
        graph.step.rows.copy_(gpu.sent(_filled(rows, size, -1), self._device))
        graph.tiles.copy_(gpu.sent(_filled(tiles, len(graph.tiles), 0), self._device))
        if graph.replay is None:
            run(graph.ids, graph.step, graph.tiles, graph.out, graph.hidden)
        else:
            graph.replay()
        return graph.out[:len(ids)], graph.hidden[:, :len(ids)]

    def warm_up(self, run: RunPrompt, valid: object) -> Iterator[None]:
        """Capture the steps of all sizes, one for each item that is taken."""
        self._forget_what_moved(valid)
        for size in reversed(PORTIONS):
            self._graph(run, size)
            yield

    def _forget_what_moved(self, valid: object) -> None:
        if valid != self._valid:
            self._graphs, self._valid, self._pool = {}, valid, None
            self._seen.clear()

    def _graph(self, run: RunPrompt, size: int) -> _PromptGraph:
        if size not in self._graphs:
            ids, step = _nobodys(size, self._device, 1)
            tiles = torch.zeros(size // self._tokens + SEQUENCES, 3, dtype=torch.int32, device=self._device)
            out = torch.empty(size, self._hidden, dtype=self._dtype, device=self._device)
            hidden = self._tapped[:, :size]
            replay, self._pool = _captured(lambda: run(ids, step, tiles, out, hidden), self._device,
                                           self._pool)
            self._graphs[size] = _PromptGraph(ids, step, tiles, out, hidden, replay)
        return self._graphs[size]


def _nobodys(size: int, device: torch.device, longest: int) -> tuple[torch.Tensor, StepTokens]:
    """Ids and a step of tokens that belong to no sequence."""
    from quantkit_kernels.triton.cache import StepTokens

    rows = torch.zeros(size, 2, dtype=torch.int32, device=device)
    rows[:, 0] = -1
    return torch.zeros(size, dtype=torch.int64, device=device), StepTokens(rows, longest)


def _filled(rows: np.ndarray, size: int, value: int) -> torch.Tensor:
    """int32 ``[n, c]`` → ``[size, c]``."""
    full = np.full((size, rows.shape[1]), value, np.int32)
    full[:len(rows)] = rows
    return torch.from_numpy(full)


def _captured(run: Callable[[], None], device: torch.device, pool: Any
              ) -> tuple[Callable[[], None] | None, Any]:
    """How to run something again, and the memory that it shares with others; ``None``: by itself."""
    run()  # compiles what isn't yet, and does nothing: the rows are nobody's
    if device.type != "cuda":
        return None, pool
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay, graph.pool()

