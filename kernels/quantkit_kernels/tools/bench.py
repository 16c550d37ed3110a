"""Measure every kernel on this machine's GPU, beside torch, other libraries and the GPU's own read bandwidth.

``python -m quantkit_kernels.tools.bench [--json FILE] [--markdown FILE] [--minutes N] [--quick] [--pdl]
[--only TEXT,…] [--rows LIST] [--contexts LIST]``.
Needs torch and triton only; the libraries of :mod:`~quantkit_kernels.tools.bench_peers` are measured where
they are installed.

All sides take turns in one process; each is captured in a CUDA graph, so that launches cost nothing, as in a
decode loop. Printed are medians, of times and of the ratios of neighboring turns. A row whose result differs
from torch's says so and makes the exit code 1. A row is on disk as soon as it is measured, the most important
rows are first, and what doesn't fit into ``--minutes`` isn't measured. ``--rehearse`` goes through all of it
without a GPU, at tiny shapes in Triton's interpreter: set ``TRITON_INTERPRET=1``; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from quantkit_kernels import tuned
from quantkit_kernels.tools.bench_peers import TOLERANCE, Peers
from quantkit_kernels.tools.cases import bench_cases
from quantkit_kernels.tools.cases.case import LLAMA_8B, QUICK, REHEARSAL, BenchCase, BenchSetup, Run
from quantkit_kernels.triton.read import read

COPY, READ = 1 << 30, 4 << 30
"""Bytes of the copy and of the read that are the ceilings."""
SQUARE = 8192
"""Rows, columns and depth of the product of plain matrices that is the ceiling of arithmetic."""
TURN = 1e-3
"""Seconds that one turn of a kernel takes, about."""
MOST_CALLS = 500


@dataclass(frozen=True)
class BenchRow:
    """What was measured. Times in microseconds, medians; ratios with their quartiles.

    ``of_read`` and ``of_copy``: bytes a second that the kernel must move, over those of a read and a copy;
    ``None`` if they lie in a cache. ``peers``: of other libraries by name the time, and how many times ours
    that is.
    """

    kernel: str
    shape: str
    baseline: str
    ours_us: float | None = None
    theirs_us: float | None = None
    speedup: tuple[float, float, float] | None = None
    of_read: float | None = None
    of_copy: float | None = None
    their_of_copy: float | None = None
    tflops: float | None = None
    difference: float | None = None
    fault: str | None = None
    peers: dict[str, tuple[float, float]] = field(default_factory=dict)


class Timer(Protocol):
    """Makes functions that run something ``calls`` times and return the seconds of one."""

    def __call__(self, run: Run, copies: int, calls: int) -> Callable[[], float]:
        """``run`` is given 0 to ``copies − 1`` in turn."""


def graph_timer(run: Run, copies: int, calls: int) -> Callable[[], float]:
    """Times calls on the current GPU with events around a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for at in range(min(copies, 3)):
            run(at)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(calls):
            run(at % copies)
    graph.replay()

    def turn() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # while it runs the next is launched: that takes the host longer than some kernels
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    return turn


def clock_timer(run: Run, copies: int, calls: int) -> Callable[[], float]:
    """Anywhere, by the clock, one call a turn: for a rehearsal."""
    def turn() -> float:
        begin = time.perf_counter()
        run(0)
        return time.perf_counter() - begin

    return turn


def calls_for(size: int, flops: int, copies: int) -> int:
    """The number of calls that take about :data:`TURN` and use every copy equally often."""
    duration = max(size / 3e12, flops / 4e14, 3e-6)
    return -(-min(MOST_CALLS, max(copies, round(TURN / duration))) // copies) * copies


@dataclass(frozen=True)
class GpuCeilings:
    """What a device can do: bytes a second of a large read, and of a large copy, read and written."""

    read: float
    copy: float


def measure(case: BenchCase, timer: Timer, ceilings: GpuCeilings, rounds: int,
            peers: Peers | None = None) -> BenchRow:
    """Compare the results, then time all sides in turn."""
    row = partial(BenchRow, case.kernel, case.shape, case.baseline)
    try:
        ours, theirs = case.check() if case.check else (case.ours(0), case.theirs(0))
        difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not difference <= case.tolerance:
            return row(difference=difference if math.isfinite(difference) else None,
                       fault=f"differs from torch's by {difference:.2g}, {case.tolerance} is rounding")
        del ours, theirs
        timing = timer(case.ours, case.copies, calls_for(case.bytes, case.flops, case.copies))
        two = timer(case.theirs, case.their_copies,
                    calls_for(case.their_bytes, case.flops, case.their_copies))
        others = dict(_beside(case, timer, peers)) if peers is not None else {}
        times = [(timing(), two(), *(other() for other in others.values())) for _ in range(rounds)]
    except Exception as error:  # a kernel that fails is a result, and the others are still wanted
        first = (str(error).strip().splitlines() or [""])[0]
        return row(fault=f"{type(error).__name__}: {first}")
    mine, other, *rest = (median(side) for side in zip(*times))
    ratios = sorted(turn[1] / turn[0] for turn in times)
    beside = {name: (rest[at] * 1e6, median(turn[2 + at] / turn[0] for turn in times))
              for at, name in enumerate(others)}
    return row(ours_us=mine * 1e6, theirs_us=other * 1e6,
               speedup=(median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
               of_read=case.bytes / mine / ceilings.read if case.cold else None,
               of_copy=case.bytes / mine / ceilings.copy if case.cold else None,
               their_of_copy=case.their_bytes / other / ceilings.copy if case.cold else None,
               tflops=case.flops / mine / 1e12 if case.flops else None, difference=difference, peers=beside)


def _beside(case: BenchCase, timer: Timer, peers: Peers) -> Iterator[tuple[str, Callable[[], float]]]:
    """Peers that compute what they should; one that doesn't is no fault of ours."""
    for runner in peers.of(case):
        try:
            got, wanted = runner.check()
            off = float((got.double() - wanted.double()).norm() / wanted.double().norm())
            if not off <= TOLERANCE:
                raise ValueError(f"differs from torch's by {off:.2g}")
            calls = calls_for(runner.nbytes, case.flops, runner.copies)
            yield runner.name, timer(runner.run, runner.copies, calls)
        except Exception as error:
            peers.fails(runner.name, case, error)


def copy_bandwidth(timer: Timer, rounds: int, device: torch.device, size: int = COPY) -> float:
    """Bytes a second, read and written, of a large copy within the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    turn = timer(lambda at: target.copy_(source), 1, 1)
    turn()
    return 2 * size / median(turn() for _ in range(rounds))


def read_bandwidth(timer: Timer, rounds: int, device: torch.device, size: int = COPY) -> float:
    """Bytes a second of a large read."""
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    turn = timer(lambda at: read(source), 1, 1)
    turn()
    return size / median(turn() for _ in range(rounds))


def matmul_flops(timer: Timer, rounds: int, setup: BenchSetup, size: int = SQUARE) -> float:
    """Multiplications and additions a second of torch's product of two square matrices of random numbers."""
    a, b = setup.normal(size, size), setup.normal(size, size)
    turn = timer(lambda at: a @ b, 1, 1)
    turn()
    return 2 * size**3 / median(turn() for _ in range(rounds))


HEADER = (f"| {'kernel':<14} | {'shape':<13} | {'µs':>7} | {'× torch':>7} | {'of read':>7} "
          f"| {'× best peer':>13} |\n|{'-' * 16}|{'-' * 15}|{'-' * 8}:|{'-' * 8}:|{'-' * 8}:|{'-' * 14}:|")


def line(row: BenchRow) -> str:
    """One row of the table, at most 80 columns; a fault in full."""
    head = f"| {row.kernel:<14} | {row.shape:<13} |"
    if row.fault or row.speedup is None:
        return f"{head} {row.fault} |"
    share = "cached" if row.of_read is None else f"{row.of_read:.0%}"
    best = min(row.peers, key=lambda name: row.peers[name][1], default=None)
    peer = "" if best is None else f"{best} {row.peers[best][1]:.3g}"
    return f"{head} {row.ours_us:>7.1f} | {row.speedup[0]:>7.2f} | {share:>7} | {peer:>13} |"


def machine(device: torch.device) -> dict[str, Any]:
    """Which GPU and which versions."""
    import triton

    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"),
                             "torch": torch.__version__, "triton": triton.__version__, "gpu": "no GPU"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "memory_bytes": properties.total_memory,
                  "multiprocessors": properties.multi_processor_count,
                  "cuda": torch.version.cuda, "hip": torch.version.hip}
    return about


@dataclass
class BenchReport:
    """What was measured so far, and where it is kept.

    Attributes:
        about: the machine and the measurement.
        file, markdown: written anew after each row, or ``None``.
        peers: other libraries, if there are any; their absence is a note.
        rows: the rows measured so far.
        notes: further lines of the report.
    """

    about: dict[str, Any]
    file: Path | None = None
    markdown: Path | None = None
    peers: Peers | None = None
    rows: list[BenchRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def title(self) -> str:
        """The machine and its ceilings."""
        about = self.about
        return (f"{about['gpu']}, {about['date'][:10]}, torch {about['torch']}, triton {about['triton']}\n"
                f"read: {about['read_bytes_per_second'] / 1e12:.2f} TB/s, copy: "
                f"{about['copy_bytes_per_second'] / 1e12:.2f} TB/s read and written, product of plain "
                f"matrices: {about['matmul_flops'] / 1e12:.0f} TFLOP/s")

    def said(self) -> list[str]:
        """Peers that are left out, and notes."""
        left_out = self.peers.left_out.items() if self.peers is not None else ()
        return [f"{name} left out: {why}" for name, why in left_out] + self.notes

    def keep(self) -> None:
        if self.file is not None:
            report = {**self.about, "notes": self.said(), "rows": [asdict(row) for row in self.rows]}
            _write(self.file, json.dumps(report, indent=1) + "\n")
        if self.markdown is not None:
            table = "\n".join([HEADER, *map(line, self.rows)])
            notes = "".join(f"\n- {note}" for note in self.said())
            _write(self.markdown, f"{self.title()}\n\n{table}\n" + (f"{notes}\n" if notes else ""))


def _write(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".partial")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def bench(every: Iterable[BenchCase], timer: Timer, ceilings: GpuCeilings, rounds: int, report: BenchReport,
          deadline: float = math.inf) -> list[BenchRow]:
    """Measure until ``time.monotonic()`` reaches the deadline, printing a line and keeping the report after
    each case."""
    print(HEADER, flush=True)
    for row in _rows(every, timer, ceilings, rounds, report, deadline):
        report.rows.append(row)
        print(line(row), flush=True)
        report.keep()
    report.keep()
    return report.rows


def _rows(every: Iterable[BenchCase], timer: Timer, ceilings: GpuCeilings, rounds: int, report: BenchReport,
          deadline: float) -> Iterator[BenchRow]:
    try:
        for case in every:
            if time.monotonic() > deadline:
                report.notes.append(f"out of time: {case.kernel} {case.shape} and what comes after it "
                                    "was not measured")
                return
            yield measure(case, timer, ceilings, rounds, report.peers)
    except Exception as error:  # while a case was made: no memory, or a kernel has broken the GPU's state
        first = (str(error).strip().splitlines() or [""])[0]
        yield BenchRow("all others", "", "", fault=f"not measured: {type(error).__name__}: {first}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quantkit_kernels.tools.bench",
                                     description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="also write the table there; by default beside the JSON")
    parser.add_argument("--minutes", type=float, default=8, metavar="N",
                        help="measure nothing more after this number of minutes (8); 0: no limit")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--pdl", action="store_true",
                        help="products begin before the kernel before them has ended (Hopper and newer)")
    parser.add_argument("--only", default="", metavar="TEXT,…",
                        help="rows whose name and shape contain one of these")
    parser.add_argument("--rows", metavar="LIST", help="numbers of rows of activations: 1,32,256")
    parser.add_argument("--contexts", metavar="LIST",
                        help="sequences that attend, and tokens of each: 1x32768,64x1100")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted, without a GPU")
    chosen = parser.parse_args(arguments)
    begun = time.monotonic()
    if not torch.cuda.is_available() and not chosen.rehearse:
        print("No GPU that torch can use: these kernels run on CUDA and ROCm only. Without one,\n"
              "`python -m quantkit_kernels.tools.aot` compiles and checks them.", file=sys.stderr)
        return 2
    markdown = chosen.markdown or (chosen.json and chosen.json.with_suffix(".md"))
    for option, file in (("--json", chosen.json), ("--markdown", markdown)):
        if file is not None and not file.parent.is_dir():
            print(f"No folder {file.parent}: make it, or give {option} another path.", file=sys.stderr)
            return 2
    setup = BenchSetup(QUICK if chosen.quick else LLAMA_8B, torch.device("cuda"), torch.bfloat16)
    timer, rounds = graph_timer, 9 if chosen.quick else 25
    sizes = READ, COPY, SQUARE
    if chosen.rehearse:  # the interpreter is wrong in bfloat16
        setup = BenchSetup(REHEARSAL, torch.device("cpu"), torch.float16)
        timer, rounds = clock_timer, 1
        sizes = 1 << 18, 1 << 20, 64
    if chosen.rows:
        setup = setup.with_rows(*map(int, chosen.rows.split(",")))
    if chosen.contexts:
        pairs = (pair.split("x") for pair in chosen.contexts.split(","))
        contexts = tuple((int(batch), int(length)) for batch, length in pairs)
        setup = replace(setup, shapes=replace(setup.shapes, contexts=contexts))
    torch.manual_seed(0)
    ceilings = GpuCeilings(read_bandwidth(timer, rounds, setup.device, sizes[0]),
                           copy_bandwidth(timer, rounds, setup.device, sizes[1]))
    report = BenchReport({**machine(setup.device), "read_bytes_per_second": ceilings.read,
                          "copy_bytes_per_second": ceilings.copy,
                          "matmul_flops": matmul_flops(timer, rounds, setup, sizes[2]),
                          "rounds": rounds, "pdl": chosen.pdl},
                         chosen.json, markdown, None if chosen.rehearse else Peers(setup))
    print(report.title(), end="\n\n")
    only = chosen.only.split(",")
    every = (case for case in bench_cases(setup)
             if any(text in f"{case.kernel} {case.shape}" for text in only))
    try:
        with tuned.trial({"pdl": 1}) if chosen.pdl and not chosen.rehearse else nullcontext():
            bench(every, timer, ceilings, rounds, report,
                  begun + 60 * chosen.minutes if chosen.minutes else math.inf)
    except KeyboardInterrupt:
        print("\nStopped; what was measured is above" + (f" and in {chosen.json}." if chosen.json else "."),
              file=sys.stderr)
        return 130
    finally:
        print(*report.said(), sep="\n")
    return 1 if not report.rows or any(row.fault for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
