"""Programs of a step that do more than :class:`CpuProgram`: over decoded pages, with hidden states handed
out, and with operators that can be run alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.rows import one_thread
from quantkit.runtime.cpu.program import MAX_ROWS, CpuProgram, page_addresses, stride_of
from quantkit.runtime.program_model import RowSlice

if TYPE_CHECKING:
    from quantkit_kernels.cpu.kv_pages import PageCodecs

LINEARS = ("q+k+v", "o", "gate+up", "down")
"""Products of a layer in their order. Those with a ``+`` read the same input, and no thread waits for another
between them."""
HEAD = "head"
ALIGNMENT = 64
"""Bytes; of an operation's record."""


class DecodedCpuProgram(CpuProgram):
    """The program of a step over a cache whose codec has no kernel: attention reads decoded pages.

    Between the operation that stores a layer's keys and values and its attention the program stops, and the
    codec encodes and decodes them in Python (:mod:`quantkit.kv.decoded`). All other operations are the same.
    """

    encodes = False

    def _run(self, batch: Batch, slices: Sequence[RowSlice], end: int) -> None:
        decoded, counts = batch.cache.decoded, [part.count for part in slices]
        sequences = [batch.sequences[part.sequence] for part in slices]
        begin = 0
        with one_thread():  # torch's others, once woken, would spin on the cores that the program needs
            for index, layer in enumerate(self._attention):
                self._pool.run(self._program.records[begin:layer.attend])
                decoded.encode(index, [sequence.layers[index] for sequence in sequences], counts)
                begin = layer.attend
        self._pool.run(self._program.records[begin:end])

    def _pages(self, cache: KVCache) -> None:
        cache.decoded.fit()
        super()._pages(cache)

    def _addresses(self, cache: KVCache, layer: int) -> dict[str, int]:
        vectors = cache.decoded.vectors(layer)
        return page_addresses(cache.layers[layer].store) | {
            f"{side}_values": pages.data_ptr() for side, pages in vectors.items()}


class TappedCpuProgram(CpuProgram):
    """A :class:`CpuProgram` that leaves hidden states in :attr:`Batch.hidden`: drafts go on from them.

    Args:
        model, codecs, high: as of a :class:`CpuProgram`.
        layers: layers to hand out, see :attr:`Batch.taps`.
    """

    def __init__(self, model: CausalLM, codecs: PageCodecs, high: bool, layers: Sequence[int]) -> None:
        self._layers, self._taps = tuple(layers), {layer: torch.empty(0) for layer in layers}
        super().__init__(model, codecs, high)

    def _layer(self, index: int, layer: DecoderLayer) -> None:
        from quantkit_kernels.cpu.rows import RowKernel
        from quantkit_kernels.cpu.weight_decoder import FLOATS, SUB

        if index in self._taps:
            hidden = self._hidden
            columns = -(-self._config.hidden_size // SUB) * SUB
            copy = self._taps[index] = lazy_zeros(max(MAX_ROWS, self._pool.threads), columns)
            self._prepared.add(self._program.add(
                RowKernel("plain", FLOATS), units_per_row=1, x=hidden, x_stride=stride_of(hidden), out=copy,
                out_stride=stride_of(copy), subgroups=columns // SUB))
        super()._layer(index, layer)

    def _done(self, batch: Batch, slices: Sequence[RowSlice]) -> None:
        super()._done(batch, slices)
        self._taps[self._config.num_layers] = self._hidden
        size, begin = self._config.hidden_size, 0
        for part in slices:
            rows = [self._taps[layer][begin:begin + part.count, :size] for layer in self._layers]
            batch.hidden.setdefault(part.sequence, []).append(torch.stack(rows, 1))
            begin += part.count


@dataclass(frozen=True)
class LinearOperator:
    """Products of one layer that read the same rows.

    Attributes:
        name: one of :data:`LINEARS`, or :data:`HEAD`.
        operations: begin and end in the program.
        input_bytes: bytes of a row as the products read it: codes, scales and sums.
        output_bytes: bytes of a row of the results in float32; twice where they are added.
    """

    name: str
    operations: tuple[int, int]
    weights: tuple[CpuWeight, ...]
    input_bytes: int
    output_bytes: int

    @property
    def weight_bytes(self) -> int:
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
        return [(layer.attend, layer.reduce + 1) for layer in self._attention]

    def step_rows(self, batch: Batch, tokens: Sequence[Sequence[int]], selected: int | None = None) -> None:
        """Take tokens of every sequence through the model.

        Args:
            tokens: ids of each; at most MAX_ROWS in all.
            selected: the number of rows that go through the head; ``None``: all.
        """
        ids = [np.array(row, np.int64) for row in tokens]
        slices = [RowSlice(sequence, 0, len(row)) for sequence, row in enumerate(tokens)]
        batch.begin([*map(len, tokens)])
        self.step(batch, ids, slices, range(sum(map(len, tokens)) if selected is None else selected))
        batch.end()

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
        self._pool.run(records)
