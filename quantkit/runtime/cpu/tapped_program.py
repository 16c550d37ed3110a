"""The program of a step that also hands out hidden states, for drafts that go on from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.kv.batch import Batch
from quantkit.models.decoder import CausalLM, DecoderLayer
from quantkit.ops.cpu_machine import lazy_zeros
from quantkit.runtime.chunks import Chunk
from quantkit.runtime.cpu.buffers import MAX_ROWS, stride_of
from quantkit.runtime.cpu.program import CpuProgram

if TYPE_CHECKING:
    from quantkit_kernels.cpu.kv_pages import PageCodecs


class TappedCpuProgram(CpuProgram):
    """A :class:`CpuProgram` that leaves hidden states in :attr:`Batch.hidden`.

    Args:
        model, codecs, high: as of a :class:`CpuProgram`.
        layers: as :attr:`Batch.taps`.
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

    def _done(self, batch: Batch, chunks: Sequence[Chunk]) -> None:
        super()._done(batch, chunks)
        self._taps[self._config.num_layers] = self._hidden
        size, begin = self._config.hidden_size, 0
        for chunk in chunks:
            rows = [self._taps[layer][begin:begin + chunk.count, :size] for layer in self._layers]
            batch.hidden.setdefault(chunk.sequence, []).append(torch.stack(rows, 1))
            begin += chunk.count
