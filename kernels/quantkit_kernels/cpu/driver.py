"""Runs a program, a list of operations, on all threads at once: claims units, meets at barriers.

An operation is a record of :data:`RECORD` bytes; every kernel is ``void kernel(arguments *, i64 unit, i64
thread)``.
A thread begins with a share of the units that lie side by side, which is what memory is fastest at, and then
helps the others with theirs: one that lost its core delays its own unit only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from llvmlite import ir

from quantkit_kernels.cpu.emit import Emitter
from quantkit_kernels.cpu.values import I32, I64, PTR, Value

RECORD = 384
KERNEL, UNITS, FLAGS, TIMES, ARGUMENTS = 0, 8, 16, 24, 64
"""Offsets in a record. ``TIMES`` has the address of an int64 that an operation before this one wrote: units
are multiplied by it; 0: by nothing."""
NO_BARRIER, EACH = 1, 2
"""Flags: the next operation doesn't need this one's results; every thread does all units for itself."""
SLOTS = (RECORD - ARGUMENTS) // 8
"""Arguments, 8 bytes each: a pointer or an int64."""
MOST = 64
"""Threads: a bit of one word for each."""
RING = 16
"""Operations that may follow each other without a barrier."""
ARRIVED, PASSED, JOB, PROGRAM, LENGTH, THREADS, YIELD, FINISHED, PARKED = (
    0, 64, 128, 192, 200, 208, 216, 224, 256)
CLAIMED = PARKED + 64 * MOST
SHARED = CLAIMED + 64 * MOST * RING
"""Offsets in what threads share, and its size. ``FINISHED`` is the last job that its owner did; ``PARKED``
is an int64 for each thread, ``CLAIMED`` one for each operation and thread: units taken of that
thread's share. All are a cache line apart."""
SPINS, PATIENCE = 2000, 4000
"""Looks before the core is offered to others between them; further ones, some milliseconds, before sleep."""


def begin(module: ir.Module, name: str,
          names: Sequence[str]) -> tuple[Emitter, SimpleNamespace, Value, Value]:
    """Begin a kernel.

    Args:
        module: the module that gets it.
        names: the arguments' names, in the record's order; ``*name`` is a pointer.

    Returns:
        What writes it, its arguments by name, the unit and the thread.
    """
    assert len(names) <= SLOTS
    e, arguments = Emitter(module, name, [PTR, I64, I64]), SimpleNamespace()
    record, unit, thread = e.arguments
    for i, argument in enumerate(names):
        setattr(arguments, argument.lstrip("*"), e.load(record, PTR if argument.startswith("*") else I64,
                                                        8 * i))
    return e, arguments, unit, thread


def emit_run(module: ir.Module) -> None:
    """``void run(shared *, i64 thread)``: this thread's part of the program."""
    e = Emitter(module, "run", [PTR, I64])
    _run(e, *e.arguments)
    e.ret()


def emit_start(module: ir.Module) -> None:
    """``i64 start(shared *)``: let the others begin; a bit is set for each that must be woken."""
    e = Emitter(module, "start", [PTR], I64)
    (shared,) = e.arguments
    atomic(e, "add", shared + JOB, e.const(I64, 1))
    asleep = e.var(e.const(I64, 0))
    with e.loop(1, e.load(shared, I64, THREADS)) as thread:
        was = atomic(e, "xchg", shared + PARKED + thread * 64, e.const(I64, 0))
        asleep.set(asleep.get() | (was << thread))
    e.ret(asleep.get())


def emit_work(module: ir.Module) -> None:
    """``i64 work(shared *, i64 thread, i64 done)``: run jobs after number ``done`` until none has come for
    a while; the number of the last. The thread is marked as parked then."""
    e = Emitter(module, "work", [PTR, I64, I64], I64)
    shared, thread, first = e.arguments
    done, waits = e.var(first), e.var(e.const(I64, 0))
    parked = shared + PARKED + thread * 64
    with e.forever() as leave:
        job = atomic_load(e, shared + JOB)
        with e.either(job.differs(done.get())) as otherwise:
            done.set(job)
            waits.set(0)
            _run(e, shared, thread)
            otherwise()
            waits.set(waits.get() + 1)
            _breathe(e, shared, waits.get())
        waiting = e.var(e.const(I64, 0))
        with e.when(waits.get() > SPINS + PATIENCE):
            atomic(e, "xchg", parked, e.const(I64, 1))
            # a job that came before that mark was seen has nobody to wake this thread
            with e.either(atomic_load(e, shared + JOB).equals(done.get())) as otherwise:
                waiting.set(1)
                otherwise()
                atomic(e, "xchg", parked, e.const(I64, 0))
        leave(waiting.get().equals(1))
    e.ret(done.get())


def _run(e: Emitter, shared: Value, thread: Value) -> None:
    program, length = e.load(shared, PTR, PROGRAM), e.load(shared, I64, LENGTH)
    threads = e.load(shared, I64, THREADS)
    place = e.var(e.const(I64, 0))  # in the ring
    first = e.var(e.const(I64, 0))  # the first place that isn't reset yet
    with e.loop(0, length) as index:
        record = program + index * RECORD
        kernel, count = e.load(record, PTR, KERNEL), e.var(e.load(record, I64, UNITS))
        flags, times = e.load(record, I64, FLAGS), e.load(record, PTR, TIMES)
        with e.when(e.present(times)):
            count.set(count.get() * e.load(times, I64))
        units = count.get()
        with e.when(units > 0):
            with e.either((flags & EACH).differs(0)) as otherwise:
                with e.loop(0, units) as unit:
                    e.call(kernel, record + ARGUMENTS, unit, thread)
                otherwise()
                with e.loop(0, threads) as step:
                    whose = (thread + step) % threads
                    begin, end = units * whose // threads, units * (whose + 1) // threads
                    claimed = _claimed(shared, place.get(), whose)
                    with e.forever() as leave:
                        unit = begin + atomic(e, "add", claimed, e.const(I64, 1))
                        leave(unit >= end)
                        e.call(kernel, record + ARGUMENTS, unit, thread)
                place.set(place.get() + 1)
            with e.when((flags & NO_BARRIER).equals(0)):
                _barrier(e, shared, threads, first.get(), place.get())
                first.set(place.get())
    # nobody may look at the program after its owner has it back
    _barrier(e, shared, threads, first.get(), place.get())
    with e.when(thread.equals(0)):
        e.store(shared, atomic_load(e, shared + JOB), FINISHED)


def _claimed(shared: Value, place: Value, thread: Value) -> Value:
    return shared + CLAIMED + ((place & (RING - 1)) * MOST + thread) * 64


def _barrier(e: Emitter, shared: Value, threads: Value, first: Value, end: Value) -> None:
    """Wait for all; the last to come resets the places ``[first, end)`` of the ring."""
    now = atomic_load(e, shared + PASSED)
    arrived = atomic(e, "add", shared + ARRIVED, e.const(I64, 1))
    with e.either((arrived + 1).equals(threads)) as otherwise:
        e.store(shared, e.const(I64, 0), ARRIVED)
        with e.loop(first, end) as place, e.loop(0, threads) as thread:
            e.store(_claimed(shared, place, thread), e.const(I64, 0))
        atomic(e, "add", shared + PASSED, e.const(I64, 1))
        otherwise()
        waits = e.var(e.const(I64, 0))
        with e.forever() as leave:
            leave(atomic_load(e, shared + PASSED).differs(now))
            waits.set(waits.get() + 1)
            _breathe(e, shared, waits.get())


def _breathe(e: Emitter, shared: Value, waits: Value) -> None:
    """Wait a moment: first in place, then by offering the core to whoever wants it."""
    with e.either(waits < SPINS) as otherwise:
        pause(e)
        otherwise()
        e.call(e.load(shared, PTR, YIELD), result=I32)


def pause(e: Emitter) -> None:
    """Tell the CPU that this is a spin loop, where it can be told."""
    if e.module.triple.startswith("x86_64"):
        e.intrinsic("llvm.x86.sse2.pause", ir.VoidType())


def atomic(e: Emitter, op: str, where: Value, value: Value) -> Value:
    """``add`` or ``xchg``, sequentially consistent; what was there before."""
    return Value(e.b, e.b.atomic_rmw(op, where.ir, value.ir, "seq_cst"))


def atomic_load(e: Emitter, where: Value) -> Value:
    """int64, sequentially consistent."""
    return Value(e.b, e.b.load_atomic(where.ir, "seq_cst", 8, typ=I64))
