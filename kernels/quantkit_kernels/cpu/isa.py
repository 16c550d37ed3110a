"""Instruction sets: how many lanes a vector has, and how small integers are multiplied.

Products of integers are exact and everything else goes through :mod:`emit`: all of them give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import BFLOAT, I8, I16, I32, I64, Value, vec


@dataclass(frozen=True)
class Isa:
    """An instruction set.

    Attributes:
        name: the name that is shown and that ``QUANTKIT_ISA`` takes.
        lanes: the lanes of 32 bits in a vector: rows of a weight that are multiplied at once.
        needs: features of the CPU, as LLVM names them.
    """

    name: str
    lanes: int
    needs: tuple[str, ...] = ()

    @property
    def vnni(self) -> bool:
        """Whether one instruction multiplies and adds small integers."""
        return "avx512vnni" in self.needs

    @property
    def vbmi(self) -> bool:
        """Whether one instruction looks bytes up in 128, and another takes bytes from any bit of a word."""
        return "avx512vbmi" in self.needs

    @property
    def amx(self) -> bool:
        """Whether one instruction multiplies tiles; the system must be asked first."""
        return "amx-bf16" in self.needs

    @property
    def bf16(self) -> bool:
        """Whether one instruction multiplies and adds pairs of bfloat16."""
        return "avx512bf16" in self.needs

    @property
    def sums_int16(self) -> bool:
        """Whether sums of :meth:`bytes_dot` have 16 bits."""
        return self.name == "avx2"

    def nothing(self, e: Emitter) -> Value:
        """A sum of :meth:`bytes_dot` that holds nothing yet."""
        return e.const(vec(I16, 2 * self.lanes) if self.sums_int16 else vec(I32, self.lanes), 0)

    def bytes_dot(self, e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
        """``total + Σ unsigned · signed`` over each lane's four bytes.

        Args:
            e: writes the kernel.
            total: from :meth:`nothing` or this; at most eight additions before :meth:`finished`, which is as
                many as 16 bits hold of 15 · 127, or four of at most 24 · 127.
            unsigned: uint8 ``[4 · lanes]``, at most 24.
            signed: int8 ``[4 · lanes]``, at least −127.
        """
        if self.vnni:
            kind = vec(I32, self.lanes)
            return e.intrinsic("llvm.x86.avx512.vpdpbusd.512", kind, total, unsigned, signed)
        if self.name == "avx2":
            return e.pinned(total + e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 2 * self.lanes),
                                                unsigned, signed))
        wide = vec(I32, 4 * self.lanes)
        return total + _fold(unsigned.zext(wide) * signed.sext(wide), 4)

    def finished(self, e: Emitter, total: Value) -> Value:
        """A sum of :meth:`bytes_dot` as int32 ``[lanes]``."""
        if self.sums_int16:
            return self._pairs(e, total, e.const(total.type, 1))
        return total

    @property
    def offset(self) -> int:
        """What :meth:`offset_dot` takes weights with: VNNI multiplies unsigned bytes by signed ones."""
        return 0 if self.name == "avx2" else 128

    def int8_dot(self, e: Emitter, total: Value, weight: Value, x: Value) -> Value:
        """``total + Σ (weight + offset) · x`` over each lane's four bytes, for int8 weights; the rest as for
        :meth:`offset_dot`."""
        return self.offset_dot(e, total, weight ^ -128 if self.offset else weight, x)

    def offset_dot(self, e: Emitter, total: Value, weight: Value, x: Value) -> Value:
        """``total + Σ weight · x`` over each lane's four bytes; total is int32 ``[lanes]``.

        Args:
            e: writes the kernel.
            total: the sum so far, modulo 2³².
            weight: int8 plus :attr:`offset`, ``[4 · lanes]``.
            x: int8 ``[4 · lanes]``, at least −127: two products then just fit the 16 bits in which AVX2 adds
                them.
        """
        if self.offset:
            return self.bytes_dot(e, total, weight, x)
        size, signed = (e.intrinsic("llvm.x86.avx2.psign.b", weight.type, operand, weight)
                        for operand in (weight, x))
        pairs = e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 2 * self.lanes), size, signed)
        return e.pinned(total + self._pairs(e, pairs, e.const(pairs.type, 1)))

    def words_dot(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        """``total + Σ a · b`` over each lane's two 16-bit integers; total is int32 ``[lanes]``."""
        if self.vnni:
            return e.intrinsic("llvm.x86.avx512.vpdpwssd.512", total.type, total,
                               a.bits(vec(I32, self.lanes)), b.bits(vec(I32, self.lanes)))
        sums = total + self._pairs(e, a, b)
        return e.pinned(sums) if self.name == "avx2" else sums

    def bfloat_dot(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        """``total + Σ a · b`` over each lane's two bfloat16 of vectors of 64 bytes; total is float32.
        Only where :attr:`bf16` says so. The second product is added first, and each sum rounded once."""
        pairs = vec(BFLOAT, 2 * self.lanes)
        return e.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, a.bits(pairs),
                           b.bits(pairs))

    def _pairs(self, e: Emitter, a: Value, b: Value) -> Value:
        if self.name == "avx2":
            return e.intrinsic("llvm.x86.avx2.pmadd.wd", vec(I32, self.lanes), a, b)
        wide = vec(I32, a.lanes)
        return _fold(a.sext(wide) * b.sext(wide), 2)

    def lookup(self, e: Emitter, table: tuple[int, ...], index: Value) -> Value:
        """Bytes of a table of 16 by ``index`` uint8 ``[n]``, at most 15."""
        if self.name == "plain":
            result = e.const(index.type, table[0])
            for code in range(1, 16):
                result = e.select(index.equals(code), e.const(index.type, table[code]), result)
            return result
        width = 32 if self.name == "avx2" else 64
        name = {32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[width]
        kind = vec(I8, width)
        entries = e.const(kind, list(table) * (width // 16))
        return e.intrinsic(name, kind, entries, index)

    def lookup_128(self, e: Emitter, table: tuple[int, ...], index: Value) -> Value:
        """Bytes of a table of 128 by the low 7 bits of ``index`` uint8 ``[4 · lanes]``."""
        if self.vbmi:
            low, high = (e.const(index.type, list(table[at:at + 64])) for at in (0, 64))
            return e.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", index.type, low, index, high)
        if self.name == "plain":
            entries, room = e.constants(table), e.room(index.lanes)
            e.store(room, index & 127)
            with e.loop(0, index.lanes) as at:
                e.store(room, e.load(entries + e.load(room, I8, at).zext(I64), I8), at)
            return e.load(room, index.type)
        parts = [self.lookup(e, table[at:at + 16], index & 15) for at in range(0, 128, 16)]
        for bit in (16, 32, 64):
            upper = (index & bit).differs(0)
            parts = [e.select(upper, above, below) for below, above in zip(parts[::2], parts[1::2])]
        return parts[0]

    def bit_fields(self, e: Emitter, words: Value, starts: Sequence[int]) -> Value:
        """Bytes from any place of the 32-bit words that they replace.

        Args:
            e: writes the kernel.
            words: int32 ``[lanes]``.
            starts: for each byte of the result the bit of its word where it begins, at most 24; those of a
                word's bytes differ by the same in all words.
        """
        wide = vec(I8, 4 * self.lanes)
        if self.vbmi:
            control = e.const(wide, [start + at % 8 // 4 * 32 for at, start in enumerate(starts)])
            return e.intrinsic("llvm.x86.avx512.pmultishift.qb.512", wide, control, words.bits(wide))
        first = starts[::4]
        if any(first):
            words = words.shr(e.const(words.type, first))
        result = words & 255
        for place in range(1, 4):
            shift = 8 * place - (starts[place] - starts[0])
            result = result | (words << shift if shift >= 0 else words.shr(-shift)) & 255 << 8 * place
        return result.bits(wide)


PLAIN = Isa("plain", 8)
AVX2 = Isa("avx2", 8, ("avx2", "fma"))
VNNI = Isa("avx512-vnni", 16, ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma"))
VBMI = Isa("avx512-vbmi", 16, (*VNNI.needs, "avx512vbmi"))
BF16 = Isa("avx512-bf16", 16, (*VBMI.needs, "avx512bf16"))
AMX = Isa("amx", 16, (*BF16.needs, "amx-tile", "amx-bf16", "amx-int8"))
ALL = (AMX, BF16, VBMI, VNNI, AVX2, PLAIN)
"""Best first."""


def _fold(x: Value, count: int) -> Value:
    """Neighbors added: ``[n]`` → ``[n / count]``."""
    total = x.shuffle(range(0, x.lanes, count))
    for i in range(1, count):
        total = total + x.shuffle(range(i, x.lanes, count))
    return total


def missing(isa: Isa, features: Mapping[str, bool]) -> list[str]:
    """What a CPU with these features lacks for it."""
    return [name for name in isa.needs if not features.get(name)]


@functools.cache
def host_features() -> dict[str, bool]:
    """The features of this machine's CPU, as LLVM names them; empty where LLVM can't tell."""
    import llvmlite.binding as llvm

    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}
