"""Types and values of kernels that are being written; see :mod:`~quantkit_kernels.cpu.emit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
PTR = ir.PointerType()


class _BFloat(ir.Type):
    """bfloat16, which the library has no name for; only instructions that take it need it."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
Type: TypeAlias = Any
"""One of LLVM's types."""


def vec(element: Type, lanes: int) -> ir.VectorType:
    """A vector type."""
    return ir.VectorType(element, lanes)


class Value:
    """A number, vector or pointer that the kernel computes. Integers are signed unless a name says otherwise.

    ``pointer + n`` moves by n bytes. A Python number beside a value takes its type.
    """

    __slots__ = ("builder", "ir")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.ir = builder, value

    @property
    def type(self) -> Type:
        return self.ir.type

    @property
    def _float(self) -> bool:
        return getattr(self.type, "element", self.type) == F32

    def _other(self, other: Any) -> ir.Value:
        if isinstance(other, Var):
            other = other.get()
        return other.ir if isinstance(other, Value) else constant(self.builder, self.type, other).ir

    def _two(self, other: Any, integer: str, real: str) -> Value:
        name = real if self._float else integer
        return Value(self.builder, getattr(self.builder, name)(self.ir, self._other(other)))

    def __add__(self, other: Any) -> Value:
        if self.type == PTR:
            offset = other.get() if isinstance(other, Var) else other
            offset = offset.ir if isinstance(offset, Value) else I64(offset)
            return Value(self.builder, self.builder.gep(self.ir, [offset], inbounds=True, source_etype=I8))
        return self._two(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        return self._two(other, "sub", "fsub")

    def __mul__(self, other: Any) -> Value:
        return self._two(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Value:
        return self._two(other, "", "fdiv")

    def __floordiv__(self, other: Any) -> Value:
        return self._two(other, "sdiv", "")

    def __mod__(self, other: Any) -> Value:
        return self._two(other, "srem", "")

    def __and__(self, other: Any) -> Value:
        return self._two(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._two(other, "or_", "")

    def __xor__(self, other: Any) -> Value:
        return self._two(other, "xor", "")

    def __lshift__(self, other: Any) -> Value:
        return self._two(other, "shl", "")

    def __rshift__(self, other: Any) -> Value:
        return self._two(other, "ashr", "")

    def shr(self, other: Any) -> Value:
        """Logical shift right."""
        return self._two(other, "lshr", "")

    def __neg__(self) -> Value:
        if self._float:
            return Value(self.builder, self.builder.fneg(self.ir))
        return constant(self.builder, self.type, 0) - self

    def _compare(self, sign: str, other: Any) -> Value:
        make = self.builder.fcmp_ordered if self._float else self.builder.icmp_signed
        return Value(self.builder, make(sign, self.ir, self._other(other)))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Value:
        """``==``, which Python needs for itself."""
        return self._compare("==", other)

    def differs(self, other: Any) -> Value:
        """``!=``."""
        return self._compare("!=", other)

    def _cast(self, name: str, to: Type) -> Value:
        return Value(self.builder, getattr(self.builder, name)(self.ir, to))

    def sext(self, to: Type) -> Value:
        """Widen a signed integer."""
        return self._cast("sext", to)

    def zext(self, to: Type) -> Value:
        """Widen an unsigned integer."""
        return self._cast("zext", to)

    def trunc(self, to: Type) -> Value:
        """Drop an integer's high bits."""
        return self._cast("trunc", to)

    def bits(self, to: Type) -> Value:
        """The same bits as another type."""
        return self._cast("bitcast", to)

    def real(self) -> Value:
        """Signed integer → float32, lane by lane."""
        return self._cast("sitofp", vec(F32, self.type.count) if self.lanes > 1 else F32)

    @property
    def lanes(self) -> int:
        """The number of lanes of a vector; 1 for anything else."""
        return self.type.count if isinstance(self.type, ir.VectorType) else 1

    def lane(self, index: int) -> Value:
        return Value(self.builder, self.builder.extract_element(self.ir, I32(index)))

    def shuffle(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Lanes of this vector, then of ``other``, in this order."""
        second = other.ir if other is not None else ir.Constant(self.type, ir.Undefined)
        mask = ir.Constant(vec(I32, len(order)), list(order))
        return Value(self.builder, self.builder.shuffle_vector(self.ir, second, mask))

    def spread(self, lanes: int) -> Value:
        """A scalar in every lane."""
        kind = vec(self.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), self.ir, I32(0))
        return Value(self.builder, self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined),
                                                               ir.Constant(vec(I32, lanes), [0] * lanes)))


class Var:
    """A variable; LLVM makes a register of it."""

    __slots__ = ("_slot", "builder", "type")

    def __init__(self, builder: ir.IRBuilder, kind: Type) -> None:
        self.builder, self.type = builder, kind
        with builder.goto_entry_block():
            self._slot = builder.alloca(kind)

    def get(self) -> Value:
        return Value(self.builder, self.builder.load(self._slot, typ=self.type))

    def set(self, value: Any) -> None:
        value = value if isinstance(value, Value) else constant(self.builder, self.type, value)
        self.builder.store(value.ir, self._slot)


def constant(builder: ir.IRBuilder, kind: Type, value: Any) -> Value:
    """A number, in every lane of a vector type; a sequence gives the lanes."""
    if isinstance(kind, ir.VectorType) and not isinstance(value, list | tuple):
        value = [value] * kind.count
    return Value(builder, ir.Constant(kind, list(value) if isinstance(value, tuple) else value))
