"""Measure every kernel on this machine's GPU, beside torch and beside the GPU's own copy bandwidth.

``python -m quantkit_kernels.bench [--json FILE] [--quick] [--only TEXT]``. Needs torch and triton only.

The two sides take turns in one process; each is captured in a CUDA graph, so that launches cost nothing, as
in a decode loop. Printed are medians, of times and of the ratios of neighbouring turns. A row whose result
differs from torch's says so and makes the exit code 1. A row is on disk as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from quantkit_kernels.bench_cases import LLAMA_8B, QUICK, Case, Run, cases

COPY = 1 << 30
"""Bytes of the copy that is the ceiling."""
TURN = 1e-3
"""Seconds that one turn of a kernel takes, about."""
MOST_CALLS = 500


@dataclass(frozen=True)
class Row:
    """What was measured. Times in microseconds, medians; ratios with their quartiles.

    ``of_copy``: bytes a second that the kernel must move, over those of the copy; ``None`` if they lie in a
    cache.
    """

    kernel: str
    shape: str
    baseline: str
    ours_us: float | None = None
    theirs_us: float | None = None
    speedup: tuple[float, float, float] | None = None
    of_copy: float | None = None
    their_of_copy: float | None = None
    tflops: float | None = None
    difference: float | None = None
    fault: str | None = None


class Timer(Protocol):
    """Makes functions that run something ``calls`` times and return the seconds of one."""

    def __call__(self, run: Run, copies: int, calls: int) -> Callable[[], float]:
        """``run`` is given 0 to ``copies − 1`` in turn."""


def graph_timer(run: Run, copies: int, calls: int) -> Callable[[], float]:
    """On the current GPU, by events around a CUDA graph."""
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


def calls_for(size: int, flops: int, copies: int) -> int:
    """So many that a turn takes about :data:`TURN`, and each copy is used as often as the others."""
    one = max(size / 3e12, flops / 4e14, 3e-6)
    return -(-min(MOST_CALLS, max(copies, round(TURN / one))) // copies) * copies


def measure(case: Case, timer: Timer, copy: float, rounds: int) -> Row:
    """Compare the results, then time both sides in turn; ``copy`` in bytes a second."""
    row = partial(Row, case.kernel, case.shape, case.baseline)
    try:
        ours, theirs = case.check() if case.check else (case.ours(0), case.theirs(0))
        difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not difference <= case.tolerance:
            return row(difference=difference if math.isfinite(difference) else None,
                       fault=f"differs from torch's by {difference:.2g}, {case.tolerance} is rounding")
        del ours, theirs
        one = timer(case.ours, case.copies, calls_for(case.bytes, case.flops, case.copies))
        two = timer(case.theirs, case.their_copies,
                    calls_for(case.their_bytes, case.flops, case.their_copies))
        times = [(one(), two()) for _ in range(rounds)]
    except Exception as error:  # a kernel that fails is a result, and the others are still wanted
        first = (str(error).strip().splitlines() or [""])[0]
        return row(fault=f"{type(error).__name__}: {first}")
    mine, other = (median(side) for side in zip(*times))
    ratios = sorted(b / a for a, b in times)
    return row(ours_us=mine * 1e6, theirs_us=other * 1e6,
               speedup=(median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
               of_copy=case.bytes / mine / copy if case.cold else None,
               their_of_copy=case.their_bytes / other / copy if case.cold else None,
               tflops=case.flops / mine / 1e12 if case.flops else None, difference=difference)


def copy_bandwidth(timer: Timer, rounds: int, device: torch.device, size: int = COPY) -> float:
    """Bytes a second, read and written, of a large copy within the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    turn = timer(lambda at: target.copy_(source), 1, 1)
    turn()
    return 2 * size / median(turn() for _ in range(rounds))


HEADER = (f"| {'kernel':<14} | {'shape':<13} | {'µs':>7} | {'torch µs':>8} | {'× torch':>7} | {'of copy':>7} "
          f"|\n|{'-' * 16}|{'-' * 15}|{'-' * 8}:|{'-' * 9}:|{'-' * 8}:|{'-' * 8}:|")


def line(row: Row) -> str:
    """One row of the table, at most 80 columns; a fault in full."""
    head = f"| {row.kernel:<14} | {row.shape:<13} |"
    if row.fault or row.speedup is None:
        return f"{head} {row.fault} |"
    share = "cached" if row.of_copy is None else f"{row.of_copy:.0%}"
    return f"{head} {row.ours_us:>7.1f} | {row.theirs_us:>8.1f} | {row.speedup[0]:>7.2f} | {share:>7} |"


def machine(device: torch.device) -> dict[str, Any]:
    """Which GPU and which versions."""
    import triton

    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"),
                             "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about |= {"gpu": found.name, "memory_bytes": found.total_memory,
                  "multiprocessors": found.multi_processor_count,
                  "cuda": torch.version.cuda, "hip": torch.version.hip}
    return about


def bench(every: Iterable[Case], timer: Timer, copy: float, rounds: int, about: dict[str, Any],
          file: Path | None = None) -> list[Row]:
    """Measure, printing a line and writing the file after each case."""
    print(HEADER, flush=True)
    rows: list[Row] = []
    for row in _rows(every, timer, copy, rounds):
        rows.append(row)
        print(line(rows[-1]), flush=True)
        if file is not None:
            found = {**about, "copy_bytes_per_second": copy, "rounds": rounds,
                     "rows": [asdict(row) for row in rows]}
            part = file.with_name(file.name + ".partial")
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(file)
    return rows


def _rows(every: Iterable[Case], timer: Timer, copy: float, rounds: int) -> Iterator[Row]:
    try:
        for case in every:
            yield measure(case, timer, copy, rounds)
    except Exception as error:  # while a case was made: no memory, or a kernel has broken the GPU's state
        first = (str(error).strip().splitlines() or [""])[0]
        yield Row("all others", "", "", fault=f"not measured: {type(error).__name__}: {first}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quantkit_kernels.bench",
                                     description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name or shape contains TEXT")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("No GPU that torch can use: these kernels run on CUDA and ROCm only. Without one,\n"
              "`python -m quantkit_kernels.aot` compiles and checks them.", file=sys.stderr)
        return 2
    if chosen.json is not None and not chosen.json.parent.is_dir():
        print(f"No folder {chosen.json.parent}: make it, or give --json another path.", file=sys.stderr)
        return 2
    device, rounds = torch.device("cuda"), 9 if chosen.quick else 25
    torch.manual_seed(0)
    about = machine(device)
    copy = copy_bandwidth(graph_timer, rounds, device)
    print(f"{about['gpu']}, {about['date'][:10]}, torch {about['torch']}, triton {about['triton']}\n"
          f"copy: {copy / 1e12:.2f} TB/s read and written\n")
    every = (case for case in cases(QUICK if chosen.quick else LLAMA_8B, device, torch.bfloat16)
             if chosen.only in f"{case.kernel} {case.shape}")
    try:
        rows = bench(every, graph_timer, copy, rounds, about, chosen.json)
    except KeyboardInterrupt:
        print("\nStopped; what was measured is above" + (f" and in {chosen.json}." if chosen.json else "."),
              file=sys.stderr)
        return 130
    return 1 if not rows or any(row.fault for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
