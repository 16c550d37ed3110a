"""Instruction sets: how many lanes a vector has, and how small integers are multiplied.

Products of integers are exact and everything else goes through :mod:`emit`: all of them give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import BFLOAT, F32, I8, I16, I32, I64, Type, Value, vec


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
        """Whether instructions multiply bfloat16 and add the products to float32."""
        return "avx512bf16" in self.needs or "bf16" in self.needs

    @property
    def neon(self) -> bool:
        """Whether it is ARM's, whose vectors have 128 bits: longer ones are several."""
        return "dotprod" in self.needs

    @property
    def i8mm(self) -> bool:
        """Whether one instruction multiplies two rows of eight bytes by two others."""
        return "i8mm" in self.needs

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
        if self.neon:
            return _by_128_bits(e, "sdot.v4i32.v16i8", total.type, total, unsigned, signed)
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
        return 0 if self.name == "avx2" or self.neon else 128

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
        if self.offset or self.neon:  # bytes_dot's are both signed there
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
        if self.neon:  # multiplies neighbors and adds the products without moving them
            for first in range(2):
                left, right = (operand.shuffle(range(first, operand.lanes, 2)) for operand in (a, b))
                # codes that are seen to be positive would be widened, and multiplied as 32 bits
                total = total + e.pinned(left).sext(total.type) * right.sext(total.type)
            return total
        sums = total + self._pairs(e, a, b)
        return e.pinned(sums) if self.name == "avx2" else sums

    def matrix_dot(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        """Products of pairs of rows of ``a`` int8 ``[lanes, 8]`` by two rows ``b`` int8 ``[2, 8]``, added to
        int32 ``[lanes, 2]``. Only where :attr:`i8mm` says so."""
        every = b.shuffle([*range(16)] * (a.lanes // 16))
        return _by_128_bits(e, "smmla.v4i32.v16i8", total.type, total, a, every)

    def bfloat_dot(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        """``total + Σ a · b`` over each lane's two bfloat16; total is float32 ``[16]``, or less on ARM.
        Only where :attr:`bf16` says so. The second product is added first, and each sum rounded once."""
        pairs = vec(BFLOAT, 2 * total.lanes)
        if self.neon:
            for name in ("bfmlalt", "bfmlalb"):
                total = _by_128_bits(e, name, total.type, total, a.bits(pairs), b.bits(pairs))
            return total
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
        if self.neon:
            entries = e.const(index.type, list(table) * (index.lanes // 16))
            return _by_128_bits(e, "tbl1.v16i8", index.type, entries, index)
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
        if self.neon:  # looks up in 64, and gives 0 beyond them
            places = range(0, 64, 16)
            halves = [_by_128_bits(e, "tbl4.v16i8", index.type,
                                   *(e.const(index.type, list(table[first + at:first + at + 16]) * (
                                       index.lanes // 16)) for at in places), (index & 127) - first)
                      for first in (0, 64)]
            return halves[0] | halves[1]
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
AMX = Isa("amx", 16, (*BF16.needs, "amx-tile", "amx-bf16"))
NEON = Isa("neon-dotprod", 8, ("dotprod",))
NEON_BF16 = Isa("neon-bf16", 8, (*NEON.needs, "i8mm", "bf16"))
ALL = (AMX, BF16, VBMI, VNNI, AVX2, NEON_BF16, NEON, PLAIN)
"""Best first."""


ARM_FEATURES = {"dotprod": ("DotProd", 16, 20), "i8mm": ("I8MM", 26, 13), "bf16": ("BF16", 26, 14)}
"""Of LLVM's names: macOS's, and the entry of Linux's auxiliary vector and the bit in it."""


def _fold(x: Value, count: int) -> Value:
    """Neighbors added: ``[n]`` → ``[n / count]``."""
    total = x.shuffle(range(0, x.lanes, count))
    for i in range(1, count):
        total = total + x.shuffle(range(i, x.lanes, count))
    return total


def _by_128_bits(e: Emitter, name: str, result: Type, *operands: Value) -> Value:
    """One of ARM's instructions for each 128 bits of longer vectors; ``result`` is the first one's type."""
    count = result.count * (32 if result.element == F32 else result.element.width) // 128
    part = vec(result.element, result.count // count)
    pieces = []
    for i in range(count):
        spans = [range(i * operand.lanes // count, (i + 1) * operand.lanes // count) for operand in operands]
        pieces.append(e.intrinsic(f"llvm.aarch64.neon.{name}", part,
                                  *(operand.shuffle(span) for operand, span in zip(operands, spans))))
    while len(pieces) > 1:
        pieces = [first.shuffle(range(2 * first.lanes), second)
                  for first, second in zip(pieces[::2], pieces[1::2])]
    return pieces[0]


def missing(isa: Isa, features: Mapping[str, bool]) -> list[str]:
    """What a CPU with these features lacks for it."""
    return [name for name in isa.needs if not features.get(name)]


@functools.cache
def host_features() -> dict[str, bool]:
    """The features of this machine's CPU, as LLVM names them; empty where LLVM can't tell."""
    import llvmlite.binding as llvm

    try:
        return {**llvm.get_host_cpu_features(), **_arm_features()}
    except RuntimeError:
        return _arm_features()


def _arm_features() -> dict[str, bool]:
    """Features of ARM that LLVM doesn't ask Linux or macOS for; empty on other CPUs."""
    if platform.machine() not in ("aarch64", "arm64") or sys.platform not in ("linux", "darwin"):
        return {}
    system = ctypes.CDLL(None)
    present: dict[str, bool] = {}
    for name, (capability, entry, bit) in ARM_FEATURES.items():
        if sys.platform == "darwin":
            value = ctypes.c_int()
            size = ctypes.c_size_t(4)
            system.sysctlbyname(f"hw.optional.arm.FEAT_{capability}".encode(), ctypes.byref(value),
                                ctypes.byref(size), None, 0)
            present[name] = bool(value.value)
        else:
            system.getauxval.argtypes, system.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
            present[name] = bool(system.getauxval(entry) >> bit & 1)
    return present
