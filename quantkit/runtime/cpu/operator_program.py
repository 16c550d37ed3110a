"""The program of a step whose operators can be run alone, for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.batch import Batch
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.runtime.chunks import Chunk
from quantkit.runtime.cpu.program import CpuProgram

LINEARS = ("q+k+v", "o", "gate+up", "down")
"""Products of a layer in their order. Those with a ``+`` read the same input, and no thread waits for another
between them."""
HEAD = "head"
ALIGNMENT = 64
"""Bytes; of an operation's record."""


@dataclass(frozen=True)
class LinearOperator:
    """Products of one layer that read the same rows.

    Attributes:
        name: one of :data:`LINEARS`, or :data:`HEAD`.
        operations: begin and end in the program.
        weights: that are multiplied by.
        input_bytes: of a row as the products read it: codes, scales and sums.
        output_bytes: of a row of the results in float32; twice where they are added to what is there.
    """

    name: str
    operations: tuple[int, int]
    weights: tuple[CpuWeight, ...]
    input_bytes: int
    output_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.weights)


class OperatorProgram(CpuProgram):
    """A :class:`CpuProgram` that lists its operators and runs some of them again.

    After a step of some rows, an operator is set to as many rows. What it then computes again is of no use:
    only the time that it takes is.
    """

    def _select(self, selected: Sequence[int]) -> torch.Tensor:
        self._logits = super()._select(selected)  # the head writes there again when it is run alone
        return self._logits

    def linears(self) -> list[LinearOperator]:
        """The products, in order."""
        groups: list[list[int]] = []
        for index in sorted(self._packed):
            if groups and groups[-1][-1] == index - 1:
                groups[-1].append(index)
            else:
                groups.append([index])
        names = [*LINEARS * self._config.num_layers, HEAD]
        return [self._operator(name, group) for name, group in zip(names, groups, strict=True)]

    def _operator(self, name: str, group: Sequence[int]) -> LinearOperator:
        packed = [self._packed[index] for index in group]
        inputs = {weight.input_key: stride for weight, stride in packed}
        moved = sum(4 * weight.shape[0] * (1 + self._program.get(index, "add"))
                    for index, (weight, _) in zip(group, packed))
        return LinearOperator(name, (group[0], group[-1] + 1), tuple(weight for weight, _ in packed),
                              sum(inputs.values()), moved)

    def attention(self) -> list[tuple[int, int]]:
        """For each layer begin and end of attention in the program: over pages, and what adds up splits."""
        return [(attend, combine + 1) for _, attend, combine in self._attention]

    def step_rows(self, batch: Batch, tokens: Sequence[Sequence[int]], selected: int | None = None) -> None:
        """Take tokens of every sequence through the model.

        Args:
            batch: the sequences.
            tokens: ids of each; at most MAX_ROWS in all.
            selected: how many go through the head; ``None``: all.
        """
        ids = [np.array(row, np.int64) for row in tokens]
        chunks = [Chunk(sequence, 0, len(row)) for sequence, row in enumerate(tokens)]
        self.step(batch, ids, chunks, range(sum(map(len, tokens)) if selected is None else selected))
        batch.finish([len(row) for row in tokens])

    def records_of(self, operations: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """A program of these operations alone, as they are set now. It is valid until the next step."""
        parts = np.concatenate([self._program.records[begin:end] for begin, end in operations])
        room = np.zeros(parts.size + ALIGNMENT // 8, np.int64)
        start = -room.ctypes.data % ALIGNMENT // 8
        records = room[start:start + parts.size].reshape(parts.shape)
        records[:] = parts
        return records

    @torch.inference_mode()
    def run_records(self, records: npt.NDArray[np.int64]) -> None:
        """Run a program of :meth:`records_of`."""
        self._pool.run(records)
