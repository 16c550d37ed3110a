"""The program of a step over a cache whose codec has no kernel: attention reads decoded pages.

Between the operation that stores a layer's keys and values and its attention the program stops, and the codec
encodes and decodes them in Python (:mod:`quantkit.kv.decoded`). All other operations are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.ops.sampling import one_thread
from quantkit.runtime.chunks import Chunk
from quantkit.runtime.cpu.program import CpuProgram
from quantkit.runtime.cpu.tables import page_addresses


class DecodedCpuProgram(CpuProgram):
    """A :class:`CpuProgram` whose ``codecs`` are those of decoded pages."""

    encodes = False

    def _run(self, batch: Batch, chunks: Sequence[Chunk], end: int) -> None:
        decoded, counts = batch.cache.decoded, [chunk.count for chunk in chunks]
        sequences = [batch.sequences[chunk.sequence] for chunk in chunks]
        begin = 0
        with one_thread():  # torch's others, once woken, would spin on the cores that the program needs
            for index, (_, attend, _) in enumerate(self._attention):
                self._pool.run(self._program.records[begin:attend])
                decoded.encode(index, [sequence.layers[index] for sequence in sequences], counts)
                begin = attend
        self._pool.run(self._program.records[begin:end])

    def _pages(self, cache: KVCache) -> None:
        cache.decoded.fit()
        super()._pages(cache)

    def _addresses(self, cache: KVCache, layer: int) -> dict[str, int]:
        vectors = cache.decoded.vectors(layer)
        return page_addresses(cache.layers[layer].store) | {
            f"{side}_values": pages.data_ptr() for side, pages in vectors.items()}
