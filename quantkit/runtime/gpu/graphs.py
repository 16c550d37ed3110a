"""Steps of decoding as CUDA graphs: one for every number of sequences and of slots that comes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from quantkit_kernels.triton.cache import Step

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Sequences of a graph; a step has the next larger one's, and what is missing are nobody's."""
SLOTS = 1024
"""Of a head, at least; more in powers of two."""
Run = Callable[["torch.Tensor", "Step"], "torch.Tensor"]
"""``ids [N]`` and whose they are → logits ``[N, vocab]``."""


@dataclass
class _Graph:
    """A captured step, the memory that it reads and writes, and whose tokens it took last."""

    ids: torch.Tensor
    step: Step
    logits: torch.Tensor
    replay: Callable[[], None] | None
    rows: Sequence[int] = ()


class Graphs:
    """Captured steps, as long as everything that they point to lies where it was.

    Args:
        device: where; without graphs, on a CPU, the step itself is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._valid: object = None
        self._pool: Any = None

    def __call__(self, run: Run, ids: torch.Tensor, rows: Sequence[int], longest: int,
                 valid: object) -> torch.Tensor:
        """A token of each of some sequences.

        Args:
            run: the step; always the same.
            ids: int64 ``[n]``, at most 256, on the device.
            rows: of the tables on the device.
            longest: slots of a head after this step, at most.
            valid: changes when something lies elsewhere.

        Returns:
            Logits ``[n, vocab]``, valid until the next call.
        """
        if valid != self._valid:
            self._graphs, self._valid, self._pool = {}, valid, None
        size = next(size for size in BATCHES if size >= len(rows))
        key = size, max(SLOTS, 1 << (longest - 1).bit_length())
        if key not in self._graphs:
            self._graphs[key] = self._captured(run, *key)
        graph = self._graphs[key]
        if rows != graph.rows:
            whose = torch.tensor([*rows, *[-1] * (size - len(rows))], dtype=torch.int32)
            graph.step.rows[:, 0].copy_(_sent(whose, self._device), non_blocking=True)
            graph.rows = rows
        graph.ids[:len(rows)].copy_(ids)
        if graph.replay is None:
            return run(graph.ids, graph.step)[:len(rows)]
        graph.replay()
        return graph.logits[:len(rows)]

    def _captured(self, run: Run, size: int, longest: int) -> _Graph:
        from quantkit_kernels.triton.cache import Step

        ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.zeros(size, 2, dtype=torch.int32, device=self._device)
        rows[:, 0] = -1
        step = Step(rows, longest)
        logits = run(ids, step)  # compiles what isn't yet, and does nothing: the rows are nobody's
        if self._device.type != "cuda":
            return _Graph(ids, step, logits, None)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run(ids, step)
        self._pool = graph.pool()
        return _Graph(ids, step, logits, graph.replay)


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
