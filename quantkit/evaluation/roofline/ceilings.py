"""The limits of the device that a run is measured on: one value for each in a run, measured in one way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from quantkit.evaluation.speed.results import Spread
from quantkit.ops import cpu_machine
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit_kernels.cpu.ceilings import CpuCeilings, Operands

REPEATS, SIZE = 3, 1 << 30
"""Of a GPU's reads, whose median is one, and their bytes."""
ARITHMETIC: dict[str, Operands] = {"bytes": "int8", "int8": "int8", "words": "int16", "bf16": "bf16",
                                   "rounded": "float32", "floats": "float32", "e4m3": "float32"}
"""What the kernels of each family multiply. Weights of 4 bits meet activations of 8; int8 and NF4 weights
meet activations of 14 bits in 16; fp16 and fp8 weights are widened, as those of bfloat16 are where no
instruction multiplies it."""


def arithmetic_of(weight: CpuWeight) -> Operands:
    """Which product's ceiling a kernel is below."""
    return ARITHMETIC[weight.kernel.decoder.family.name]


def cpu_ceilings() -> CpuCeilings:
    """What measures this CPU; a gigabyte is taken for it.

    Raises:
        UsageError: there are no CPU kernels here.
    """
    if (reason := cpu_machine.reason_against_kernels()) is not None:
        raise UsageError("this machine's ceilings can't be measured", why=reason,
                         next="pip install llvmlite, or give --bandwidth and --flops")
    from quantkit_kernels.cpu.ceilings import CpuCeilings

    return CpuCeilings(cpu_machine.pool(), cpu_machine.isa())


class DeviceCeilings:
    """What one run measures of its device, :class:`~quantkit_kernels.cpu.ceilings.CpuCeilings` says how.

    Args:
        device: the device. Of a GPU only reads are measured; of a CPU without kernels nothing is.

    Attributes:
        cpu: what measures a CPU.
        reads: bytes a second of every read so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        kernels = device.type == "cpu" and cpu_machine.reason_against_kernels() is None
        self.cpu = cpu_ceilings() if kernels else None
        self.reads: list[float] = [] if self.cpu is None else self.cpu.reads

    def read(self) -> None:
        """Read memory, after which caches have something else."""
        if self.cpu is not None:
            self.cpu.read()
        elif self._device.type == "cuda":
            from quantkit_kernels.tools.bench import graph_timer, read_bandwidth

            self.reads.append(read_bandwidth(graph_timer, REPEATS, self._device, SIZE))

    def multiply(self, packed: Iterable[CpuWeight]) -> None:
        """Multiply as products by such weights do, without their memory."""
        if self.cpu is not None:
            for arithmetic in {arithmetic_of(weight) for weight in packed}:
                self.cpu.multiply(arithmetic)

    def least_seconds(self, packed: Iterable[CpuWeight]) -> float:
        """Seconds that the products of one row by these weights take at least, if memory takes none."""
        return sum(math.prod(weight.shape) / self.cpu.products(arithmetic_of(weight))
                   for weight in packed) if self.cpu is not None else 0.0

    @property
    def mac_s(self) -> dict[str, float]:
        """Arithmetic → multiply-adds a second at most, of all that was measured in this run."""
        return {name: self.cpu.products(name) for name in self.cpu.rates} if self.cpu is not None else {}

    @property
    def read_bytes_s(self) -> Spread | None:
        """The run's read bandwidth, as the median of all its reads; ``None``: there are none."""
        return Spread.of(self.reads) if self.reads else None
