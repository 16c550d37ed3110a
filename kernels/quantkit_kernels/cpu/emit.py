"""A small language for vector kernels: Python runs while the kernel is written, values when it runs.

A Python ``for`` unrolls; :meth:`Emitter.loop` loops. Arithmetic on values emits LLVM instructions, one to
one: nothing is reassociated and nothing fused unless :meth:`Emitter.fma` says so, so a kernel gives the same
bits whatever instruction set it was compiled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from quantkit_kernels.cpu.values import F16, F32, I8, I16, I32, I64, PTR, Type, Value, Var, constant, vec


class Emitter:
    """Writes one function of a module.

    Args:
        module: the module that gets it.
        arguments: the arguments' types.
        result: type of what it returns; ``None``: nothing.
    """

    def __init__(self, module: ir.Module, name: str, arguments: Sequence[Type],
                 result: Type | None = None) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result or ir.VoidType(), arguments), name)
        self.function.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.arguments = [Value(self.b, argument) for argument in self.function.args]

    def const(self, kind: Type, value: Any) -> Value:
        """A number, in every lane of a vector type; a sequence gives the lanes."""
        return constant(self.b, kind, value)

    def var(self, init: Value) -> Var:
        """A variable that begins as ``init``."""
        variable = Var(self.b, init.type)
        variable.set(init)
        return variable

    def room(self, size: int) -> Value:
        """``size`` bytes of memory that belong to this call."""
        with self.b.goto_entry_block():
            memory = self.b.alloca(ir.ArrayType(I8, size))
        memory.align, memory.type = 8, PTR
        return Value(self.b, memory)

    def constants(self, numbers: Sequence[int]) -> Value:
        """Where these bytes, 0 to 255, lie in memory that isn't written."""
        kind = ir.ArrayType(I8, len(numbers))
        memory = ir.GlobalVariable(self.module, kind, self.module.get_unique_name("constants"))
        memory.linkage, memory.global_constant = "private", True
        memory.initializer = ir.Constant(kind, list(numbers))
        return Value(self.b, memory.bitcast(PTR))

    def load(self, pointer: Value, kind: Type, offset: Any = 0) -> Value:
        """Read, at any alignment."""
        where = pointer + offset if not (isinstance(offset, int) and offset == 0) else pointer
        instruction = self.b.load(where.ir, typ=kind)
        instruction.align = 8 if kind in (I64, PTR) else 4 if kind in (I32, F32) else 1
        return Value(self.b, instruction)

    def store(self, pointer: Value, value: Value, offset: Any = 0) -> None:
        """Write, at any alignment."""
        where = pointer + offset if not (isinstance(offset, int) and offset == 0) else pointer
        instruction = self.b.store(value.ir, where.ir)
        instruction.align = 8 if value.type in (I64, PTR) else 4 if value.type in (I32, F32) else 1

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """``for i in range(start, stop, step)`` over int64, at run time."""
        index = self.var(self._i64(start))
        end = self._i64(stop)
        head, body, done = (self.function.append_basic_block(name) for name in ("head", "body", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        now = index.get()
        self.b.cbranch((now < end).ir, body, done)
        self.b.position_at_end(body)
        yield now
        index.set(now + step)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """An endless loop; what it yields leaves it: ``stop(condition)``."""
        body, done = (self.function.append_basic_block(name) for name in ("forever", "left"))
        self.b.branch(body)
        self.b.position_at_end(body)

        def stop(condition: Value) -> None:
            on = self.function.append_basic_block("on")
            self.b.cbranch(condition.ir, done, on)
            self.b.position_at_end(on)

        yield stop
        self.b.branch(body)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        then, done = (self.function.append_basic_block(name) for name in ("then", "endif"))
        self.b.cbranch(condition.ir, then, done)
        self.b.position_at_end(then)
        yield
        if not self.b.block.is_terminated:
            self.b.branch(done)
        self.b.position_at_end(done)

    @contextmanager
    def either(self, condition: Value) -> Iterator[Any]:
        """``if condition: … else: …``; calling what it yields begins the else."""
        then, other, done = (self.function.append_basic_block(name) for name in ("then", "else", "endif"))
        self.b.cbranch(condition.ir, then, other)
        self.b.position_at_end(then)

        def otherwise() -> None:
            self.b.branch(done)
            self.b.position_at_end(other)

        yield otherwise
        self.b.branch(done)
        self.b.position_at_end(done)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """``yes if condition else no``, lane by lane."""
        return Value(self.b, self.b.select(condition.ir, yes.ir, no.ir))

    def intrinsic(self, name: str, result: Type, *arguments: Value) -> Value:
        """Call a named function of LLVM's or of the process."""
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return Value(self.b, self.b.call(function, [a.ir for a in arguments]))

    def call(self, pointer: Value, *arguments: Value, result: Type | None = None) -> Value:
        kind = ir.FunctionType(result or ir.VoidType(), [a.type for a in arguments])
        return Value(self.b, self.b.call(_Callee(pointer.ir, kind), [a.ir for a in arguments]))

    def present(self, pointer: Value) -> Value:
        """Whether a pointer isn't null."""
        return Value(self.b, self.b.icmp_unsigned("!=", pointer.ir, ir.Constant(PTR, None)))

    def prefetch(self, pointer: Value) -> None:
        """Begin to fetch a cache line, which may lie anywhere."""
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), pointer, *(self.const(I32, n) for n in (0, 3, 1)))

    def widened(self, a: Value) -> Value:
        """bfloat16, as int16 lanes → float32."""
        return (a.zext(vec(I32, a.lanes)) << 16).bits(vec(F32, a.lanes))

    def pinned(self, a: Value) -> Value:
        """A vector register that the optimizer must not look into. On x86 sums would else become trees,
        which need more registers than there are."""
        x86 = self.module.triple.startswith("x86")
        kind = ir.FunctionType(a.type, [a.type])
        call = self.b.asm(kind, "", "=x,0" if x86 else "=w,0", [a.ir], False)
        if not x86:
            call.attributes.add("readnone")  # the same of equal values, and loads may pass it
        return Value(self.b, call)

    def narrowed(self, a: Value) -> Value:
        """float32 → bfloat16 as int16, half to even."""
        words = a.bits(vec(I32, a.lanes) if a.lanes > 1 else I32)
        rounded = words + 0x7FFF + (words.shr(16) & 1)
        return rounded.shr(16).trunc(vec(I16, a.lanes) if a.lanes > 1 else I16)

    def half_widened(self, a: Value) -> Value:
        """float16, as int16 lanes → float32; exact."""
        return a.bits(vec(F16, a.lanes))._cast("fpext", vec(F32, a.lanes))

    def half_narrowed(self, a: Value) -> Value:
        """float32 → float16 as int16, half to even; infinity where float16 ends."""
        return a._cast("fptrunc", vec(F16, a.lanes)).bits(vec(I16, a.lanes))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a · b + c``, rounded once."""
        return self.intrinsic(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def max(self, a: Value, b: Value) -> Value:
        """The larger, lane by lane; no NaN may come in."""
        return self.select(a > b, a, b)

    def min(self, a: Value, b: Value) -> Value:
        """The smaller, lane by lane; no NaN may come in."""
        return self.select(a < b, a, b)

    def abs(self, a: Value) -> Value:
        return self.intrinsic(f"llvm.fabs.{_suffix(a.type)}", a.type, a)

    def sqrt(self, a: Value) -> Value:
        """Correctly rounded square root."""
        return self.intrinsic(f"llvm.sqrt.{_suffix(a.type)}", a.type, a)

    def round(self, a: Value) -> Value:
        """Round to the nearest integer, half to even; the result is float32."""
        return self.intrinsic(f"llvm.nearbyint.{_suffix(a.type)}", a.type, a)

    def whole(self, a: Value) -> Value:
        """A whole float32 within int32's range → int32."""
        return a._cast("fptosi", vec(I32, a.lanes) if a.lanes > 1 else I32)

    def sum(self, a: Value) -> Value:
        """The sum of a vector's lanes, halves first: the order is the same on every machine."""
        while a.lanes > 1:
            half = a.lanes // 2
            low, high = a.shuffle(range(half)), a.shuffle(range(half, a.lanes))
            a = low + high
        return a.lane(0)

    def highest(self, a: Value) -> Value:
        """The largest lane."""
        while a.lanes > 1:
            half = a.lanes // 2
            a = self.max(a.shuffle(range(half)), a.shuffle(range(half, a.lanes)))
        return a.lane(0)

    def highest_abs(self, values: Sequence[Value]) -> Value:
        """The largest magnitude in some vectors."""
        largest = self.abs(values[0])
        for value in values[1:]:
            largest = self.max(largest, self.abs(value))
        return self.highest(largest)

    def sums(self, vectors: Sequence[Value]) -> Value:
        """The sums of some vectors of equal length, a power of 2 of them, a lane each, added as by
        :meth:`sum`: halves lie side by side, so that steps are shared."""
        size = vectors[0].lanes  # of the part of a vector that is one's
        while size > 1 or len(vectors) > 1:
            half = max(size // 2, 1)
            lanes = vectors[0].lanes
            lower = [start + i for start in range(0, lanes, size) for i in range(half)]
            upper = [place + half for place in lower]
            if size == 1:
                vectors = [left.shuffle(range(2 * lanes), right)
                           for left, right in zip(vectors[::2], vectors[1::2])]
            elif len(vectors) == 1:
                vectors = [vectors[0].shuffle(lower) + vectors[0].shuffle(upper)]
            else:
                lower, upper = ([*part, *(lanes + place for place in part)] for part in (lower, upper))
                vectors = [left.shuffle(lower, right) + left.shuffle(upper, right)
                           for left, right in zip(vectors[::2], vectors[1::2])]
            size = half
        return vectors[0]

    def ret(self, value: Value | None = None) -> None:
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value.ir)

    def _i64(self, value: Any) -> Value:
        if isinstance(value, Var):
            value = value.get()
        return value if isinstance(value, Value) else self.const(I64, value)



class _Callee(ir.Value):
    """An address and the type of the function there, which an opaque pointer doesn't know."""

    def __init__(self, pointer: ir.Value, kind: ir.FunctionType) -> None:
        self.pointer, self.type, self.function_type = pointer, PTR, kind

    def get_reference(self) -> str:
        return str(self.pointer.get_reference())


def _suffix(kind: Type) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


LOWEST, HIGHEST = -87.0, 88.0
"""Below, the result is that of LOWEST (1.6e-38); above, that of HIGHEST (1.7e38)."""
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
              5.0000001201e-1)
"""Of Cephes' expf: (exp(r) - 1 - r) / r² for |r| ≤ ln(2) / 2; at most 2 units in the last place in all."""


def exp(e: Emitter, x: Value) -> Value:
    """``exp(x)``, lane by lane; x is finite."""
    kind = x.type
    x = e.max(e.min(x, e.const(kind, HIGHEST)), e.const(kind, LOWEST))
    exponent = e.round(x * LOG2E)
    rest = e.fma(exponent, e.const(kind, -LN2_LOW), e.fma(exponent, e.const(kind, -LN2_HIGH), x))
    result = e.const(kind, POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        result = e.fma(result, rest, e.const(kind, factor))
    result = e.fma(result, rest * rest, rest + 1.0)
    words = vec(I32, x.lanes) if x.lanes > 1 else I32
    return (result.bits(words) + (e.whole(exponent) << 23)).bits(vec(F32, x.lanes) if x.lanes > 1 else F32)
