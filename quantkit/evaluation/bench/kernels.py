"""Matrix products of the CPU kernels by format and number of rows, beside what memory allows and torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Literal, cast

import torch

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.roofline.ceilings import packed_weight
from quantkit.formats.base import Format
from quantkit.formats.spec import Granularity, QuantSpec, ScaleDtype
from quantkit.ops import cpu_machine
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuProduct, CpuWeight
from quantkit.ops.dispatch import KernelQuery, choose
from quantkit.plugins.manager import registry
from quantkit.quantization.recipe import default_format
from quantkit.support.errors import UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent


def _int4(group: int, symmetric: bool = True) -> QuantSpec:
    return QuantSpec(bits=4, symmetric=symmetric, granularity=Granularity(strategy="group", size=group),
                     scale_dtype="bfloat16")


def _four_bits(kind: Literal["int", "fp", "iq"], group: int, scale: ScaleDtype, **more: Any) -> QuantSpec:
    return QuantSpec(kind=kind, bits=4, granularity=Granularity(strategy="group", size=group),
                     scale_dtype=scale, **more)


def _eight(kind: Literal["int", "fp"], activations: Literal["token"] | None = None) -> QuantSpec:
    return QuantSpec(kind=kind, bits=8, granularity=Granularity(strategy="channel"), scale_dtype="bfloat16",
                     activations=activations)


SPECS = {
    "bf16": None, "int8": _eight("int"), "int8 a8": _eight("int", "token"), "fp8": _eight("fp"),
    "fp8 a8": _eight("fp", "token"),
    "int4 g32": _int4(32), "int4 g64": _int4(64), "int4 g64 asym": _int4(64, False), "int4 g128": _int4(128),
    "nf4 b64": QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64),
                         scale_dtype="float32"),
    "nvfp4": _four_bits("fp", 16, "e4m3"), "mxfp4": _four_bits("fp", 32, "e8m0"),
    "iq4_nl": _four_bits("iq", 32, "float16"),
    "q4_k": _four_bits("int", 32, "float16", symmetric=False, minimum=True, superblock=256, scale_bits=6),
    "q6_k": QuantSpec(bits=6, granularity=Granularity(strategy="group", size=16), scale_dtype="float16",
                      superblock=256, scale_bits=8),
    "mlx g64": _four_bits("int", 64, "bfloat16", symmetric=False, minimum=True),
    "fp8 tiles": QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy="tile", size=128),
                           scale_dtype="bfloat16"),
}
BUDGET = 1 << 28
"""Bytes of weights that a run reads, so that they come from memory and not from a cache."""


def bench_kernels(shapes: Sequence[tuple[int, int]], rows: Sequence[int], repeats: int = 5,
                  progress: Listener = silent) -> dict[str, Any]:
    """Measure every format.

    Args:
        shapes: ``(out, in)`` of weights.
        rows: the numbers of rows of activations.
        repeats: timed runs; read bandwidth is measured before each.
        progress: told of every case.

    Returns:
        ``machine``, ``cases``: format, kernel, shape, rows, seconds, weights' bytes a second and
        their share of the read bandwidth, multiplications a second; ``left_out``: format, shape and why
        such weights don't exist.

    Raises:
        UsageError: there are no CPU kernels here.
    """
    if (reason := cpu_machine.reason_against_kernels()) is not None:
        raise UsageError("there are no CPU kernels to measure", why=reason, next="pip install llvmlite")
    from quantkit_kernels.cpu.bandwidth import Bandwidth

    memory = Bandwidth(cpu_machine.pool(), cpu_machine.isa())
    reasons = {(shape, label): _reason_against(shape, spec)
               for shape in shapes for label, spec in SPECS.items()}
    possible = [case for case, reason in reasons.items() if reason is None]
    total, results = len(possible) * len(rows), []
    for shape, label in possible:
        weights = _weights(shape, SPECS[label])
        for count in rows:
            x = torch.randn(count, shape[1]).to(torch.bfloat16)
            products = [CpuProduct(weight, count) for weight in weights]
            for product in products:
                product(x)
            times, reads = [], []
            for _ in range(repeats):
                reads.append(memory.measure())
                begin = time.perf_counter()
                for product in products:
                    product.run()
                times.append((time.perf_counter() - begin) / len(weights))
            spent, read = median(times), median(reads)
            results.append({"format": label, "kernel": weights[0].name, "shape": list(shape), "rows": count,
                            "seconds": spent, "bytes_s": weights[0].nbytes / spent, "read_bytes_s": read,
                            "of_read": weights[0].nbytes / spent / read,
                            "mac_s": count * shape[0] * shape[1] / spent})
            progress(ProgressEvent(len(results), total, f"{label}, {count} rows"))
    return {"machine": machine(), "cases": results,
            "left_out": [{"format": label, "shape": list(shape), "why": reason}
                         for (shape, label), reason in reasons.items() if reason is not None]}


def _reason_against(shape: tuple[int, int], spec: QuantSpec | None) -> str | None:
    """Why there are no such weights, or no kernel of this package multiplies them."""
    if spec is None:
        return None
    name = default_format(spec)
    if (reason := cast(Format, registry("formats").get(name)).reason_against(spec, shape)) is not None:
        return reason
    kernel = choose(KernelQuery("linear", "cpu", None, torch.bfloat16, *shape, name, spec, "decode")).kernel
    return None if isinstance(kernel, CpuKernel) else f"{kernel.name} multiplies it"


def _weights(shape: tuple[int, int], spec: QuantSpec | None) -> list[CpuWeight]:
    """Random weights, as many as the caches don't hold."""
    first = packed_weight(shape, spec)
    return [first, *(packed_weight(shape, spec) for _ in range(min(63, BUDGET // max(first.nbytes, 1))))]


def lines(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A table's rows: format, shape, rows, GB/s, share of the read bandwidth, billions of multiplications."""
    for case in report["cases"]:
        yield (case["format"], "x".join(map(str, case["shape"])), str(case["rows"]),
               f"{case['bytes_s'] / 1e9:.1f}", f"{case['of_read']:.0%}", f"{case['mac_s'] / 1e9:.0f}")
