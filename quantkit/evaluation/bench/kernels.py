"""Matrix products of the CPU kernels by format and number of rows, beside what memory allows and torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Literal, cast

import torch

from quantkit.evaluation.protocol import machine
from quantkit.evaluation.roofline.ceilings import arithmetic_of, cpu_ceilings
from quantkit.formats.base import Format
from quantkit.formats.spec import Granularity, QuantSpec, ScaleDtype
from quantkit.ops import cpu_weight
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuProduct, CpuWeight
from quantkit.ops.dispatch import KernelQuery, choose, query_for
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.random_codes import random_codes
from quantkit.quantization.recipe import default_format
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
        ``machine``; ``read_bytes_s`` and ``mac_s``: the ceilings of this run, as
        :class:`~quantkit_kernels.cpu.ceilings.CpuCeilings` measures them, the second by arithmetic;
        ``cases``: format, kernel, shape, rows, arithmetic, seconds, weights' bytes and multiply-adds a second
        and their shares of these ceilings; ``left_out``: format, shape and why such weights don't exist.

    Raises:
        UsageError: there are no CPU kernels here.
    """
    ceilings = cpu_ceilings()
    reasons = {(shape, label): _reason_against(shape, spec)
               for shape in shapes for label, spec in SPECS.items()}
    possible = [case for case, reason in reasons.items() if reason is None]
    total, results = len(possible) * len(rows), list[dict[str, Any]]()
    for shape, label in possible:
        weights = _weights(shape, SPECS[label])
        arithmetic = arithmetic_of(weights[0])
        for count in rows:
            x = torch.randn(count, shape[1]).to(torch.bfloat16)
            products = [CpuProduct(weight, count) for weight in weights]
            for product in products:
                product(x)
            times = []
            for _ in range(repeats):
                ceilings.multiply(arithmetic)
                ceilings.read()
                begin = time.perf_counter()
                for product in products:
                    product.run()
                times.append((time.perf_counter() - begin) / len(weights))
            spent = median(times)
            results.append({"format": label, "kernel": weights[0].name, "shape": list(shape), "rows": count,
                            "arithmetic": arithmetic, "seconds": spent,
                            "bytes_s": weights[0].nbytes / spent,
                            "mac_s": count * shape[0] * shape[1] / spent})
            progress(ProgressEvent(len(results), total, f"{label}, {count} rows"))
    read = ceilings.bandwidth()
    mac_s = {name: ceilings.products(name) for name in ceilings.rates}
    for case in results:
        case |= {"of_read": case["bytes_s"] / read, "of_products": case["mac_s"] / mac_s[case["arithmetic"]]}
    return {"machine": machine(), "read_bytes_s": read, "mac_s": mac_s, "cases": results,
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


def packed_weight(shape: tuple[int, int], spec: QuantSpec | None) -> CpuWeight:
    """A weight ``(out, in)`` of random codes as a CPU kernel reads it; ``None``: of plain bf16 numbers."""
    if spec is None:
        return cpu_weight.pack_plain(torch.randn(shape).to(torch.bfloat16))
    codes = random_codes(spec, shape, torch.Generator())
    weight = registry("formats").get(default_format(spec)).pack(codes, torch.bfloat16)
    kernel = choose(query_for(weight, torch.bfloat16, torch.device("cpu"), "decode")).kernel
    packed: CpuWeight = kernel.prepare(weight)
    return packed


def lines(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A table's rows: format, shape, rows, GB/s, share of the read bandwidth, billions of multiply-adds,
    their share of the ceiling of such products."""
    for case in report["cases"]:
        yield (case["format"], "x".join(map(str, case["shape"])), str(case["rows"]),
               f"{case['bytes_s'] / 1e9:.1f}", f"{case['of_read']:.0%}", f"{case['mac_s'] / 1e9:.0f}",
               f"{case['of_products']:.0%}")
