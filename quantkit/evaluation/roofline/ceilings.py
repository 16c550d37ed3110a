"""Measures the machine's limits, memory bandwidth and arithmetic, in a second or two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.ops import cpu_machine, cpu_weight
from quantkit.ops.cpu_weight import CpuProduct, CpuWeight
from quantkit.ops.dispatch import choose, query_for
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.random_codes import random_codes
from quantkit.quantization.recipe import default_format
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
    _check_kernels()
    measure = bandwidth(torch.device("cpu"))
    measure()
    return max(measure() for _ in range(REPEATS))


def bandwidth(device: torch.device, size: int = 1 << 30) -> Callable[[], float]:
    """What measures, each time it is called, the bytes a second that a program can have of a device's memory:
    all threads' or a GPU's reads of ``size`` bytes. 0 where nothing can be
    measured."""
    if device.type == "cuda":
        from quantkit_kernels.tools.bench import graph_timer, read_bandwidth

        return lambda: read_bandwidth(graph_timer, REPEATS, device, size)
    if cpu_machine.reason_against_kernels() is not None:
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
    _check_kernels()
    product = CpuProduct(packed, ROWS)
    fastest = math.inf
    begin = time.perf_counter()
    product(torch.randn(ROWS, packed.shape[1], generator=torch.Generator().manual_seed(0)))
    while math.isinf(fastest) or time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        product.run()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * ROWS * packed.shape[0] * packed.shape[1] / fastest


def _check_kernels() -> None:
    if (reason := cpu_machine.reason_against_kernels()) is not None:
        raise UsageError("this machine's ceilings can't be measured", why=reason,
                         next="pip install llvmlite, or give --bandwidth and --flops")


def packed_weight(shape: tuple[int, int], spec: QuantSpec | None) -> CpuWeight:
    """A weight ``(out, in)`` of random codes as a CPU kernel reads it; ``None``: of plain bf16 numbers."""
    if spec is None:
        return cpu_weight.pack_plain(torch.randn(shape).to(torch.bfloat16))
    codes = random_codes(spec, shape, torch.Generator())
    weight = registry("formats").get(default_format(spec)).pack(codes, torch.bfloat16)
    kernel = choose(query_for(weight, torch.bfloat16, torch.device("cpu"), "decode")).kernel
    packed: CpuWeight = kernel.prepare(weight)
    return packed
