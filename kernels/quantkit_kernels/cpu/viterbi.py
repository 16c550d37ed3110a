"""The best path around a ring of a trellis: Viterbi's algorithm, https://doi.org/10.1109/TIT.1967.1054010.

A state is the last ``window`` bits of a stream; a step shifts ``bits`` new ones in. ``path[u]`` is the least
error of any way that ends with the low ``window − bits`` bits ``u``. One step needs those of the step
before, and nothing else is kept: the way is found again from its end, by the same sums.

A ring has no beginning. So first the way is searched without one, half way around to both sides of the place
where the ring is cut; what it passes there is then both the beginning and the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir

from quantkit_kernels.cpu.driver import begin
from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.isa import Isa
from quantkit_kernels.cpu.values import F32, I8, I64, Value, vec

RING = 64
"""Steps of a ring."""
LANES = 8
"""Of this module's vectors, whatever the instruction set's are."""
FAR = 1e30
"""The error of what may not be."""
BLOCK = 64
"""Columns solved before the rest is updated."""
ARGUMENTS = ("*target", "*weight", "*values", "*symbols", "*found", "*room", "room_private")
"""Of a record. A unit is a ring: ``target`` and ``weight`` float32 ``[units, 64]``; ``values`` float32
``[2 ** window]``; results are ``symbols`` uint8 and ``found`` float32, ``[units, 64]``. Minimized is the sum
of ``(weight · (value − target))²``."""
COLUMN_ARGUMENTS = ("*work", "*matrix", "*scale", "*weight", "*values", "*symbols", "*found", "*room",
                    "room_private", "columns")
"""Of a record. A unit is a tile, 64 rows of all columns: ``work``, ``symbols`` and ``found`` are ``[units,
columns, 64]``, ``scale`` and ``weight`` ``[units, 64]``; ``matrix`` is float32 ``[columns, columns]``."""


@dataclass(frozen=True)
class Viterbi:
    """A search.

    Attributes:
        bits: the bits of a symbol, 2 to 4.
        window: the bits of a state.
    """

    bits: int
    window: int
    arguments: ClassVar[Sequence[str]] = ARGUMENTS

    @property
    def name(self) -> str:
        return f"viterbi_{self.bits}_{self.window}"

    @property
    def ends(self) -> int:
        """How many ends a way may have."""
        return 1 << self.window - self.bits

    @property
    def room_bytes(self) -> int:
        return (RING + 1) * self.ends * 4

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, ARGUMENTS)
        at = unit * (RING * 4)
        ring = _Ring(e, self, a.values, a.room + thread * a.room_private)
        ring.search(a.target + at, a.weight + at, a.symbols + unit * RING, a.found + at)
        e.ret()


@dataclass(frozen=True)
class ColumnSearch:
    """Searches a tile's rings column by column, and tells the columns that are left.

    Attributes:
        search: the search of a ring.
        visit: whether there are rings already. If not, ``work`` is what is left of the weights and
            ``matrix`` the upper factor of the inverse Hessian: https://arxiv.org/abs/2210.17323. If so,
            ``work`` is the loss's slope, ``matrix`` the Hessian, and a ring is changed where the loss gets
            lower.
    """

    search: Viterbi
    visit: bool
    arguments: ClassVar[Sequence[str]] = COLUMN_ARGUMENTS

    @property
    def name(self) -> str:
        return f"columns_{'visit_' if self.visit else ''}{self.search.name}"

    @property
    def room_bytes(self) -> int:
        return self.search.room_bytes + (BLOCK + 2) * RING * 4 + RING

    def emit(self, module: ir.Module, isa: Isa) -> None:
        e, a, unit, thread = begin(module, self.name, COLUMN_ARGUMENTS)
        size, wide = RING * 4, vec(F32, LANES)
        tile = unit * a.columns
        work, values, symbols = a.work + tile * size, a.found + tile * size, a.symbols + tile * RING
        scale, weight = a.scale + unit * size, a.weight + unit * size
        room = a.room + thread * a.room_private
        ring = _Ring(e, self.search, a.values, room)
        target = room + self.search.room_bytes
        new, steps = target + size, target + 2 * size
        marks = steps + BLOCK * size
        with e.loop(0, a.columns, BLOCK) as start:
            stop = e.min(start + BLOCK, a.columns)
            with e.loop(start, stop) as i:
                targets, results, step = work + i * size, values + i * size, steps + (i - start) * size
                pivot = e.load(a.matrix, F32, (i * a.columns + i) * 4).spread(LANES)
                for at in range(0, size, LANES * 4):
                    target_value = e.load(targets, wide, at)
                    if self.visit:
                        target_value = target_value / (pivot * e.load(scale, wide, at)) + e.load(results,
                                                                                                 wide, at)
                    else:
                        target_value = target_value / e.load(scale, wide, at)
                    e.store(target, target_value, at)
                if self.visit:
                    ring.search(target, weight, marks, new)
                    with e.when(self._worse(e, target, weight, new, results)):
                        for at in range(0, size, LANES * 4):
                            e.store(new, e.load(results, wide, at), at)
                        for at in range(0, RING, 16):
                            e.store(marks, e.load(symbols + i * RING, vec(I8, 16), at), at)
                    for at in range(0, RING, 16):
                        e.store(symbols + i * RING, e.load(marks, vec(I8, 16), at), at)
                    for at in range(0, size, LANES * 4):
                        value = e.load(new, wide, at)
                        e.store(step, (value - e.load(results, wide, at)) * e.load(scale, wide, at), at)
                        e.store(results, value, at)
                else:
                    ring.search(target, weight, symbols + i * RING, results)
                    for at in range(0, size, LANES * 4):
                        error = e.load(targets, wide, at) - e.load(results, wide, at) * e.load(scale, wide,
                                                                                               at)
                        e.store(step, error / pivot, at)
                with e.loop(i + 1, stop) as j:
                    factor = -e.load(a.matrix, F32, (i * a.columns + j) * 4).spread(LANES)
                    for at in range(0, size, LANES * 4):
                        e.store(work + j * size, e.fma(factor, e.load(step, wide, at),
                                                       e.load(work + j * size, wide, at)), at)
            with e.loop(stop, a.columns) as j:
                remaining = [e.var(e.load(work + j * size, wide, at)) for at in range(0, size, LANES * 4)]
                with e.loop(start, stop) as i:
                    factor = -e.load(a.matrix, F32, (i * a.columns + j) * 4).spread(LANES)
                    for part, total in enumerate(remaining):
                        step = e.load(steps + (i - start) * size, wide, part * LANES * 4)
                        total.set(e.fma(factor, step, total.get()))
                for part, total in enumerate(remaining):
                    e.store(work + j * size, total.get(), part * LANES * 4)
        e.ret()

    @staticmethod
    def _worse(e: Emitter, target: Value, weight: Value, new: Value, old: Value) -> Value:
        """Whether a new ring is farther than the old: it is the nearest for the place of its cut only."""
        wide, totals = vec(F32, LANES), []
        for values in (new, old):
            total = e.const(wide, 0.0)
            for at in range(0, RING * 4, LANES * 4):
                error = (e.load(values, wide, at) - e.load(target, wide, at)) * e.load(weight, wide, at)
                total = e.fma(error, error, total)
            totals.append(e.sum(total))
        return totals[0] > totals[1]


class _Ring:
    def __init__(self, e: Emitter, spec: Viterbi, values: Value, room: Value) -> None:
        self.e, self.bits, self.ends, self.choices = e, spec.bits, spec.ends, 1 << spec.bits
        self.values, self.room = values, room

    def search(self, target: Value, weight: Value, symbols: Value, results: Value) -> None:
        """Store the ring that is nearest to ``target``, and its values."""
        self.target, self.weight = target, weight
        self._close(self._cut(), symbols, results)

    def _cut(self) -> Value:
        """What the best way without a beginning passes where the ring is cut."""
        e, wide = self.e, vec(F32, LANES)
        with e.loop(0, self.ends, LANES) as u:
            e.store(self.room, e.const(wide, 0.0), u * 4)
        with e.loop(0, RING) as step:
            self._step(step, step + RING // 2 & RING - 1)
        last = self._errors(e.const(I64, RING))
        best, where = e.var(e.load(last, F32)), e.var(e.const(I64, 0))
        with e.loop(1, self.ends) as u:
            error = e.load(last, F32, u * 4)
            with e.when(error < best.get()):
                best.set(error)
                where.set(u)
        with e.loop(0, RING // 2) as back:
            step = e.const(I64, RING - 1) - back
            state = self._before(step, step + RING // 2 & RING - 1, where.get())
            where.set(state.shr(self.bits))
        return where.get()

    def _close(self, cut: Value, symbols: Value, results: Value) -> None:
        """Store the best way from ``cut`` to ``cut``."""
        e, wide = self.e, vec(F32, LANES)
        with e.loop(0, self.ends, LANES) as u:
            e.store(self.room, e.const(wide, FAR), u * 4)
        e.store(self.room, e.const(F32, 0.0), cut * 4)
        with e.loop(0, RING) as step:
            self._step(step, step)
        where = e.var(cut)
        with e.loop(0, RING) as back:
            step = e.const(I64, RING - 1) - back
            state = self._before(step, step, where.get())
            e.store(symbols, (state & self.choices - 1).trunc(I8), step)
            e.store(results, e.load(self.values, F32, state * 4), step * 4)
            where.set(state.shr(self.bits))

    def _errors(self, step: Value) -> Value:
        """Where the least errors before a step lie."""
        return self.room + step * (self.ends * 4)

    def _factors(self, place: Value) -> tuple[Value, Value]:
        """``(r, y)`` of the error ``(value · r + y)²`` at a place of the ring."""
        e = self.e
        factor = e.load(self.weight, F32, place * 4)
        return factor, -(e.load(self.target, F32, place * 4) * factor)

    def _step(self, step: Value, place: Value) -> None:
        """The least errors after a step, from those before."""
        e, wide = self.e, vec(F32, LANES)
        factor, offset = (number.spread(LANES) for number in self._factors(place))
        before, after = self._errors(step), self._errors(step + 1)
        span = max(1, LANES // self.choices)  # errors before it that a vector of states needs
        with e.loop(0, self.ends, LANES) as u:
            least = None
            for j in range(self.choices):
                state = u + j * self.ends
                earlier = before + state.shr(self.bits) * 4
                if span == 1:
                    base = e.load(earlier, F32).spread(LANES)
                else:
                    costs = e.load(earlier, vec(F32, span))
                    base = costs.shuffle([i // self.choices for i in range(LANES)])
                error = e.fma(e.load(self.values, wide, state * 4), factor, offset)
                total = e.fma(error, error, base)
                least = total if least is None else e.min(total, least)
            assert least is not None
            e.store(after, least, u * 4)

    def _before(self, step: Value, place: Value, end: Value) -> Value:
        """The state with which the best way to ``end`` passes ``place``; of equals, the first."""
        e = self.e
        factor, offset = self._factors(place)
        before = self._errors(step)
        best, best_state = e.var(e.const(F32, 3e38)), e.var(end)
        for j in range(self.choices):
            state = end + j * self.ends
            error = e.fma(e.load(self.values, F32, state * 4), factor, offset)
            total = e.fma(error, error, e.load(before, F32, state.shr(self.bits) * 4))
            with e.when(total < best.get()):
                best.set(total)
                best_state.set(state)
        return best_state.get()
