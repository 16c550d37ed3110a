"""Steps of decoding as CUDA graphs: one for every number of sequences and of slots that comes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import StepTokens

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Sequences of a graph; a step has the next larger one's, and what is missing are nobody's."""
SMALL = 16
"""The number of sequences up to which the logits' memory isn't that of the largest graph."""
SLOTS = 1536
"""Of a head, at least; more by doubling. Answers to texts of 1,024, 2,048, … tokens need no other graph."""
Run = Callable[["torch.Tensor", "StepTokens", "torch.Tensor"], None]
"""``ids [N]`` and whose they are, and where logits ``[N, vocab]`` go."""


def slots_of(longest: int, limit: int) -> int:
    """The slots of the graph for heads of ``longest``; ``limit``: where the model's longest text ends."""
    slots = SLOTS << (-(-longest // SLOTS) - 1).bit_length()
    return slots if longest > limit else min(slots, limit)


@dataclass
class _Graph:
    """A captured step, the memory that it reads, and whose tokens it took last."""

    ids: torch.Tensor
    step: StepTokens
    replay: Callable[[], None] | None
    rows: Sequence[int] = ()


class GraphCache:
    """Captured steps, as long as everything that they point to lies where it was. All write their logits to
    the same memory.

    Args:
        device: the device; on a CPU there are no graphs, and the step itself is called.
        vocab: numbers of a token's logits.
        limit: slots of a head where the model's longest text ends.
    """

    def __init__(self, device: torch.device, vocab: int, dtype: torch.dtype, limit: int) -> None:
        self._device, self._limit = device, limit
        self._logits = torch.empty(0, vocab, dtype=dtype, device=device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._valid: object = None
        self._pool: Any = None

    def __call__(self, run: Run, ids: torch.Tensor, rows: Sequence[int], longest: int,
                 valid: object) -> torch.Tensor:
        """A token of each of some sequences.

        Args:
            run: the step; always the same.
            ids: int64 ``[n]``, at most 256, on the device.
            rows: their rows in the tables on the device.
            longest: slots of a head after this step, at most.
            valid: changes when something lies elsewhere.

        Returns:
            Logits ``[n, vocab]``, valid until the next call.
        """
        if valid != self._valid:
            self._graphs = {}
            self._valid = valid
            self._pool = None
        size = next(size for size in BATCHES if size >= len(rows))
        if size > len(self._logits):
            self._graphs, self._pool = {}, None
            self._logits = torch.empty(BATCHES[-1] if size > SMALL else SMALL, self._logits.shape[1],
                                       dtype=self._logits.dtype, device=self._device)
        key = size, slots_of(longest, self._limit)
        if key not in self._graphs:
            self._graphs[key] = self._captured(run, *key)
        graph = self._graphs[key]
        if rows != graph.rows:
            whose = torch.tensor([*rows, *[-1] * (size - len(rows))], dtype=torch.int32)
            graph.step.rows[:, 0].copy_(gpu.sent(whose, self._device))
            graph.rows = rows
        graph.ids[:len(rows)].copy_(ids)
        if graph.replay is None:
            run(graph.ids, graph.step, self._logits[:size])
        else:
            graph.replay()
        return self._logits[:len(rows)]

    def _captured(self, run: Run, size: int, longest: int) -> _Graph:
        from quantkit_kernels.triton.cache import StepTokens

        ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.zeros(size, 2, dtype=torch.int32, device=self._device)
        rows[:, 0] = -1
        step = StepTokens(rows, longest)
        out = self._logits[:size]
        run(ids, step, out)  # compiles what isn't yet, and does nothing: the rows are nobody's
        if self._device.type != "cuda":
            return _Graph(ids, step, None)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run(ids, step, out)
        self._pool = graph.pool()
        return _Graph(ids, step, graph.replay)

