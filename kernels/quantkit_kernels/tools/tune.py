"""Measure launch parameters of the matrix products on this machine's GPU, and keep the fastest.

``python -m quantkit_kernels.tools.tune [--folder DIR] [--only TEXT] [--minutes N] [--fresh]``. Writes what
:mod:`quantkit_kernels.tuned` reads, at the shapes of an 8B Llama, after each measurement: that is kept when
it is stopped, and the next run continues there. One row of every product comes first, then more rows.
``--rehearse`` goes through it without a GPU, as :mod:`~quantkit_kernels.tools.bench` does.

A candidate counts if it compiles, spills nothing and computes what the kernel computes without it: with other
segments of K up to rounding, else bit for bit. It is kept if it is faster than the best so far in turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quantkit_kernels import tuned
from quantkit_kernels.tools.bench import Timer, calls_for, clock_timer, graph_timer, machine
from quantkit_kernels.tools.cases import product_cases
from quantkit_kernels.tools.cases.case import LLAMA_8B, REHEARSAL, BenchCase, BenchSetup

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHORTEST = 256
"""Columns of a segment, at least."""
STAGES = (2, 3, 4, 5, 6)
WARPS = (4, 8)
GAIN = 1.02
"""So much faster a candidate must be: less is noise."""
ROUNDS = 9
ROWS = (1, *tuned.BUCKETS[1:])
"""Rows that are measured: the first bucket is for decoding, mostly of one sequence."""
Parameters = dict[str, int]


class TunedCase:
    """The fastest parameters of one case.

    Args:
        case: the case that is run.
        timer: makes the functions that run a case and take the time.
        spills: counts the registers that kernels spill which were compiled since it was last asked.
        deadline: ``time.monotonic()`` after which no candidate is begun.
    """

    def __init__(self, case: BenchCase, timer: Timer, spills: Callable[[], int], deadline: float) -> None:
        self._case, self._timer = case, timer
        self._spills, self._deadline = spills, deadline
        self._calls = calls_for(case.bytes, case.flops, case.copies)
        self.gain = 1.0

    def best(self, base: Parameters, candidates: Iterable[Parameters], exact: bool) -> Parameters:
        """``base``, or what is faster: each candidate is laid over the best so far.

        Raises TimeoutError after the deadline, and whatever ``base`` itself raises.
        """
        wanted = self._result(base)
        best, turn = base, self._turns(base)
        for candidate in candidates:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            self._spills()
            try:
                if not self._same(self._result(best | candidate), wanted, exact) or self._spills():
                    continue
                other = self._turns(best | candidate)
                ratio = median(turn() / other() for _ in range(ROUNDS))
            except Exception:  # it takes more than this GPU has, or the compiler can't: no candidate
                continue
            if ratio > GAIN:
                best, turn = best | candidate, other
                self.gain *= ratio
        return best

    def _result(self, parameters: Parameters) -> torch.Tensor:
        with tuned.trial(parameters):
            return self._case.ours(0)

    def _turns(self, parameters: Parameters) -> Callable[[], float]:
        def run(at: int) -> torch.Tensor:
            with tuned.trial(parameters):
                return self._case.ours(at)

        return self._timer(run, self._case.copies, self._calls)

    def _same(self, got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> bool:
        if exact:
            return torch.equal(got, wanted)
        off = (got.double() - wanted.double()).norm() / wanted.double().norm()
        return float(off) <= self._case.tolerance


def asked_by(case: BenchCase) -> tuple[tuned.ProductKey, int] | None:
    """What a case's kernel asks for, and its rows; ``None`` if it asks for nothing."""
    with tuned.trial({}) as queries:
        case.ours(0)
    return queries.pop() if len(queries) == 1 else None


def cuts(k: int) -> list[Parameters]:
    return [{"segments": segments} for segments in SEGMENTS if segments == 1 or segments * SHORTEST <= k]


def programs(m: int) -> Iterator[Parameters]:
    """The programs for m rows: rows of a program by warps, loads ahead, whether it begins early."""
    limit = min(max(16, 1 << (m - 1).bit_length()), tuned.ALLOWED["bm"][-1])
    yield from ({"bm": bm, "warps": warps} for bm in tuned.ALLOWED["bm"] if bm <= limit for warps in WARPS)
    yield from ({"stages": stages} for stages in STAGES)
    yield {"pdl": 1}


def tune(cases: Iterable[BenchCase], table: dict[tuned.ProductKey, tuned.TunedEntry], timer: Timer,
         spills: Callable[[], int], deadline: float) -> Iterator[str]:
    """Fill ``table``, and give a line about each case that was measured once it is in there.

    The first number of rows that is measured of a product decides its segments. Stops at the deadline.
    """
    for case in cases:
        queries = asked_by(case)
        if queries is None:
            yield f"{case.kernel} {case.shape}: asks for no parameters"
            continue
        key, m = queries
        if key in table and tuned.bucket(m) in table[key].rows:
            continue
        search = TunedCase(case, timer, spills, deadline)
        try:
            if key not in table:
                segments = search.best({}, cuts(key.k), exact=False).get("segments")
                table[key] = tuned.TunedEntry(segments)
            base = tuned.parameters(tuned.TunedEntry(table[key].segments), m)
            best = search.best(base, programs(m), exact=True)
        except TimeoutError:
            return
        table[key].rows[tuned.bucket(m)] = {name: best[name] for name in tuned.ALLOWED if name in best}
        chosen = ", ".join(f"{name} {value}" for name, value in best.items()) or "nothing better"
        yield f"{case.kernel} {case.shape}: {chosen}, {search.gain:.2f} x"


def spills_of(kernels: Iterable[Any]) -> Callable[[], int]:
    """Registers that the newest compilations of jitted functions spill, for :class:`TunedCase`."""
    kernels, seen = list(kernels), set[int]()

    def newest() -> int:
        compiled = [compiled_kernel for kernel in kernels for caches in kernel.device_caches.values()
                    for compiled_kernel in caches[0].values() if id(compiled_kernel) not in seen]
        seen.update(map(id, compiled))
        return sum(getattr(kernel, "n_spills", 0) or 0 for kernel in compiled)

    return newest


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quantkit_kernels.tools.tune",
                                     description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, metavar="DIR", default=next(tuned.folders()),
                        help="where the file is written; by default where it is looked for first")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="products whose name or shape contains TEXT")
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="stop after N minutes (60)")
    parser.add_argument("--fresh", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted, without a GPU")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not chosen.rehearse:
        print("No GPU that torch can use: there is nothing to measure.", file=sys.stderr)
        return 2
    from quantkit_kernels.triton import matmul

    setup, timer = BenchSetup(LLAMA_8B, torch.device("cuda"), torch.bfloat16).with_rows(*ROWS), graph_timer
    if chosen.rehearse:
        setup, timer = BenchSetup(REHEARSAL, torch.device("cpu"), torch.float16), clock_timer
    about = machine(setup.device)
    name, file = about["gpu"], chosen.folder / tuned.file_name(about["gpu"])
    if not os.access(chosen.folder, os.W_OK):
        print(f"{chosen.folder} can't be written: give --folder another, and name it in {tuned.VARIABLE} "
              "from then on.", file=sys.stderr)
        return 2
    table = tuned.read(file, name) if file.is_file() and not chosen.fresh else {}
    facts = {key: about[key] for key in ("date", "torch", "triton")}
    every = (case for case in product_cases(setup) if chosen.only in f"{case.kernel} {case.shape}")
    spills = spills_of(kernel for kernel in vars(matmul).values() if hasattr(kernel, "device_caches"))
    try:
        for line in tune(every, table, timer, spills, time.monotonic() + 60 * chosen.minutes):
            print(line, flush=True)
            tuned.write(file, name, facts, table)
    except KeyboardInterrupt:
        print(f"\nStopped; what was measured is in {file}.", file=sys.stderr)
        return 130
    if table:  # of a product that was begun the segments may be known
        tuned.write(file, name, facts, table)
    print(f"{len(table)} products in {file}")
    return 0 if table else 1


if __name__ == "__main__":
    sys.exit(main())
