"""Measures the machine's limits, memory bandwidth and arithmetic, in a second or two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from quantkit.ops import cpu_machine
from quantkit.ops.cpu_weight import CpuProduct, CpuWeight
from quantkit.support.errors import UsageError

ROWS = 512
"""Of activations: as many as go through a model at once, far more than it takes to be bound by compute."""
REPEATS, SECONDS = 3, 0.3
"""Of reads, and for products. The fastest one counts: other programs only ever make it less."""


def read_bandwidth() -> float:
    """Bytes a second at which all threads read memory; a gigabyte is taken for it.

    Raises:
        UsageError: there are no CPU kernels here.
    """
    _require()
    measure = bandwidth(torch.device("cpu"))
    measure()
    return max(measure() for _ in range(REPEATS))


def bandwidth(device: torch.device, size: int = 1 << 30) -> Callable[[], float]:
    """What measures, each time it is called, the bytes a second that a program can have of a device's memory:
    all threads' reads of ``size`` bytes; on a GPU a copy's reads and writes. 0 where nothing can be
    measured."""
    if device.type == "cuda":
        from quantkit_kernels.tools.bench import copy_bandwidth, graph_timer

        return lambda: copy_bandwidth(graph_timer, REPEATS, device)
    if cpu_machine.unavailable() is not None:
        return lambda: 0.0
    from quantkit_kernels.cpu.bandwidth import Bandwidth

    return Bandwidth(cpu_machine.pool(), cpu_machine.isa(), size).measure


def flops(packed: CpuWeight) -> float:
    """Operations a second of the product with such a weight, two for each of its numbers and row.

    Args:
        packed: some rows of it.

    Raises:
        UsageError: there are no CPU kernels here.
    """
    _require()
    product, fastest, begin = CpuProduct(packed, ROWS), math.inf, time.perf_counter()
    product(torch.randn(ROWS, packed.shape[1], generator=torch.Generator().manual_seed(0)))
    while math.isinf(fastest) or time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        product.run()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * ROWS * packed.shape[0] * packed.shape[1] / fastest


def _require() -> None:
    if (reason := cpu_machine.unavailable()) is not None:
        raise UsageError("this machine's ceilings can't be measured", why=reason,
                         next="pip install llvmlite, or give --bandwidth and --flops")
