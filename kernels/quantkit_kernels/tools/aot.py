"""Compile every Triton kernel for every target, without a GPU, and check what came out.

``python -m quantkit_kernels.tools.aot [--json] [--only TEXT] [--target NAME]``. Exit code 1 if a kernel fails
to compile, spills registers, needs more shared memory than the target has, loads weights or KV pages in less
than 128 bits or copies them so, lacks the tensor-core instructions that are meant, needs more instructions a
weight than its limit, overwrites registers that Hopper's tensor cores still read, or if ptxas warns of
anything.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit_kernels.tools.cases.case import AotCase

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_90", "sm_100", "gfx942")
NOTE = ("regs: a thread; load: bits of the widest;\n"
        "mma: tensor-core instructions; ins/w: instructions a weight in the loop;\n"
        "loads: in the loop, copies to shared memory below 128 bits + loads of 128 bits")


@dataclass(frozen=True)
class AotRow:
    """A kernel on a target: the facts of :class:`~quantkit_kernels.tools.assembly.KernelFacts`, and what is
    wrong."""

    kernel: str
    target: str
    registers: int | None
    spills: int | None
    shared: int | None
    widest: int | None
    matrix: bool | None
    per_weight: float | None
    faults: tuple[str, ...]
    loads: tuple[int, int] | None = None


def compile_one(name: str, target: str) -> AotRow:
    """Compile one case and judge it."""
    from quantkit_kernels.tools.cases import aot_cases

    return judge(next(case for case in aot_cases(target) if case.name == name), target)


def judge(case: AotCase, target: str) -> AotRow:
    """Compile a kernel for a target, whether or not that was done before, and say what is wrong with it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantkit_kernels.tools.assembly import complaints, read
    from quantkit_kernels.tools.cases.case import SHARED

    nvidia = target.startswith("sm_")
    where = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    names = case.kernel.arg_names
    aligned = [key for key, kind in case.signature.items() if kind.startswith("*") or key in case.multiples]
    source = ASTSource(
        fn=case.kernel, signature={key: case.signature.get(key, "constexpr") for key in names},
        constexprs=case.constants, attrs={(names.index(key),): [["tt.divisibility", 16]] for key in aligned})
    try:
        compiled, log = _compile(source, where, dict(case.options))
        facts, warnings = read(compiled), complaints(log) if nvidia else ()
    except Exception as error:  # whatever the compiler raises is this row's result
        reason = (str(error.__cause__ or error).strip().splitlines() or [""])[-1]  # above it is the source
        failed = f"{type(error).__name__}: {reason}"
        return AotRow(case.name, target, None, None, None, None, None, None, (failed,))
    per_weight = facts.loop / case.weights if facts.loop and case.weights else None
    faults = [f"ptxas: {warning}" for warning in warnings]
    if facts.hazards:
        faults.append(f"{len(facts.hazards)} instructions touch registers that the tensor cores still use, "
                      f"the first: {facts.hazards[0]}")
    if facts.spills:
        faults.append(f"{facts.spills} spills")
    if facts.shared > SHARED[target]:
        faults.append(f"{facts.shared} bytes of shared memory, the limit is {SHARED[target]}")
    if facts.wide_loads < case.wide_loads:
        faults.append(f"{facts.wide_loads} loads of 128 bits, {case.wide_loads} are meant")
    if case.narrow is not None and facts.narrow > case.narrow:
        faults.append(f"{facts.narrow} copies of less than 128 bits, {case.narrow} are allowed")
    if case.matrix and not facts.matrix:
        faults.append("no tensor-core instructions")
    faults += [f"no {word} in the PTX" for word in case.ptx if word not in compiled.asm["ptx"]]
    if case.most is not None and per_weight is not None and target == "sm_90" and per_weight > case.most:
        faults.append(f"{per_weight:.2f} instructions a weight, the limit is {case.most}")
    return AotRow(case.name, target, facts.registers, facts.spills, facts.shared, facts.widest, facts.matrix,
                  per_weight, tuple(faults), (facts.narrow, facts.wide_loads) if nvidia else None)


def _compile(source: Any, target: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """What Triton makes of a kernel, and the assembler's log, which it prints if told so and doesn't keep."""
    import triton
    from triton import knobs

    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        return triton.compile(source, target=target, options=options), log.getvalue()


def compile_all(targets: Iterable[str] = TARGETS, only: str = "",
                report: Callable[[int, int, str], None] | None = None) -> list[AotRow]:
    """Every case whose name contains ``only``, on as many processes as there are cores.

    ``report`` is told how many are done, of how many, and the name of the last.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # in the interpreter there is nothing to compile
    from quantkit_kernels.tools.cases import aot_cases

    wanted = [(case.name, target) for target in targets for case in aot_cases(target) if only in case.name]
    order = {name: at for at, (name, _) in reversed(list(enumerate(wanted)))}
    workers = min(len(os.sched_getaffinity(0)), 16, max(1, len(wanted)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = []
        for row in pool.map(compile_one, *zip(*wanted), chunksize=4) if wanted else ():
            rows.append(row)
            if report is not None:
                report(len(rows), len(wanted), row.kernel)
    return sorted(rows, key=lambda row: (order[row.kernel], TARGETS.index(row.target)))


def table(rows: Iterable[AotRow]) -> str:
    """At most 80 columns."""
    lines = [f"{'kernel':<28} {'target':<6} {'regs':>4} {'spills':>6} {'shared':>6} {'load':>4} {'mma':>3} "
             f"{'ins/w':>5} {'loads':>6}"]
    for row in rows:
        if row.registers is None:
            lines.append(f"{row.kernel:<28} {row.target:<6} failed")
        else:
            per = "" if row.per_weight is None else f"{row.per_weight:.2f}"
            matrix = "yes" if row.matrix else "no"
            loads = "" if row.loads is None else "{}+{}".format(*row.loads)
            lines.append(f"{row.kernel:<28} {row.target:<6} {row.registers:>4} {row.spills:>6} "
                         f"{row.shared:>6} {row.widest:>4} {matrix:>3} {per:>5} {loads:>6}".rstrip())
        lines += [f"  ! {fault}"[:80] for fault in row.faults]
    return "\n".join(lines)


def verdict(rows: Sequence[AotRow]) -> str:
    """How many are as they should be, and what is wrong with the others: the end of a long log says all."""
    bad = [row for row in rows if row.faults]
    lines = [f"{row.kernel} on {row.target}: {'; '.join(row.faults)}" for row in bad]
    return "\n".join([f"{len(rows)} compiled, {len(bad)} with faults. {NOTE}", *lines])


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quantkit_kernels.tools.aot",
                                     description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains TEXT")
    parser.add_argument("--target", action="append", choices=TARGETS, help="by default all; may be repeated")
    chosen = parser.parse_args(arguments)
    rows = compile_all(chosen.target or TARGETS, chosen.only)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(table(rows))
        print(verdict(rows))
    return 1 if any(row.faults for row in rows) or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
