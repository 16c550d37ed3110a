"""Products by weights of bfloat16 with Intel's AMX.

A tile of weights is read as it lies: 16 rows, 32 columns. Activations are brought into the other factor's
order first: pairs of columns are rows, tokens are columns. What
:mod:`~quantkit_kernels.cpu.float_product` says of chunks holds here too. Within one, the even columns of each
32 are a chain and the odd ones another, and both are added to the sum: these bits differ from those of other
instructions, and are the same in any company.

Integers are left to AVX-512: with a scale for each 32 columns every tile's product would be stored and
scaled by itself, which takes longer than it spares.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit_kernels.cpu.float_product import CHUNK, FloatProduct
from quantkit_kernels.cpu.product_spec import MOST_ROWS
from quantkit_kernels.cpu.tiles import ROWS, TILE_BYTES, Tiles
from quantkit_kernels.cpu.values import I32, I64, Value, vec
from quantkit_kernels.cpu.weight_decoder import STRIPE, SUB

SCRATCH_BYTES = MOST_ROWS * CHUNK * 2
"""What a thread needs for a chunk of them."""
WEIGHTS, INPUTS = 4, 6
"""The first tile of weights, and of activations; those before are sums."""


class AmxProduct(FloatProduct):
    """Emits the kernel of a product by weights of bfloat16."""

    def write(self) -> None:
        e, a = self.e, self.a
        self.scratch = a.scratch + self.thread * a.scratch_private
        self.room = e.room(2 * TILE_BYTES)
        self.tiles = Tiles(e)
        begin, end, top, bottom = self.bounds()
        groups = (bottom - top + ROWS - 1) // ROWS
        self.tiles.begin()
        with e.loop(0, a.subgroups, self.chunk) as chunk:
            stop = e.min(chunk + self.chunk, a.subgroups)
            with e.loop(0, groups) as group, e.loop(chunk, stop) as s:
                self._turn(top + group * ROWS, bottom, s, self._inputs(group, s - chunk))
            with e.loop(begin, end, STRIPE) as weight:
                with e.loop(0, groups // 2 * 2, 2) as group:
                    self._square(weight, top, bottom, group, 2, chunk, stop)
                with e.when((groups % 2).equals(1)):
                    self._square(weight, top, bottom, groups - 1, 1, chunk, stop)
        self.tiles.end()
        e.ret()

    def _inputs(self, group: Value, subgroup: Value) -> Value:
        """Where 16 rows of activations lie as a tile."""
        place: Value = (group * self.chunk + subgroup) * TILE_BYTES
        return self.scratch + place

    def _turn(self, row: Value, bottom: Value, subgroup: Value, out: Value) -> None:
        """16 rows of activations as a tile; behind the last row it is repeated, for outputs that nobody
        stores."""
        e, a = self.e, self.a
        pairs = []
        for i in range(ROWS):
            place = a.x + e.min(row + i, bottom - 1) * a.x_stride
            pairs.append(e.load(place + subgroup * (2 * SUB), vec(I32, ROWS)))
        for i, turned in enumerate(transposed(pairs)):
            e.store(out, turned, i * 64)

    def _square(self, weight: Value, top: Value, bottom: Value, group: Value, count: int, chunk: Value,
                stop: Value) -> None:
        """A chunk's products of 32 rows of weights by ``count`` groups of activations."""
        e, a, tiles = self.e, self.a, self.tiles
        places = [(i, j) for i in range(2) for j in range(count)]
        for i, j in places:
            tiles.clear(2 * i + j)
        with e.loop(chunk, stop) as s:
            for i in range(2):
                source = a.weights + (weight + i * ROWS) * self.row_bytes + s * (2 * SUB)
                tiles.load(WEIGHTS + i, source, self.row_bytes)
            for j in range(count):
                tiles.load(INPUTS + j, self._inputs(group + j, s - chunk), e.const(I64, 64))
            for i, j in places:
                tiles.multiply(2 * i + j, WEIGHTS + i, INPUTS + j)
        turned = self.room + TILE_BYTES
        for i, j in places:
            tiles.store(2 * i + j, self.room)
            rows = [e.load(self.room, self.kind, n * 64) for n in range(ROWS)]
            for n, sums in enumerate(transposed(rows)):
                e.store(turned, sums, n * 64)
            first = top + (group + j) * ROWS
            with e.loop(first, e.min(first + ROWS, bottom)) as row:
                sums = e.load(turned + (row - first) * 64, self.kind)
                self.add(weight + i * ROWS, row, [sums], chunk)


def transposed(rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 16: halves of blocks change places, blocks of 2 first."""
    result, lanes = list(rows), range(len(rows))
    distance = 1
    while distance < len(rows):
        for i in lanes:
            if i & distance:
                continue
            upper, lower = result[i], result[i + distance]
            result[i] = upper.shuffle([n + 16 - distance if n & distance else n for n in lanes], lower)
            result[i + distance] = upper.shuffle([n + 16 if n & distance else n + distance for n in lanes],
                                                 lower)
        distance *= 2
    return result
