"""The contract of kernels: ``quantkit.ops.dispatch.LinearKernel``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import FLOATS, plain_name, resolve
from quantkit.formats.spec import QuantSpec
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery, LinearKernel, Phase
from quantkit.ops.kernel_contract import probe, product_fault
from quantkit.ops.linear import query_for
from quantkit.plugins.manager import registry
from quantkit.testing.codes import random_codes
from quantkit.testing.contract import (
    Contract,
    check_name,
    check_reason,
    poisoned_memory,
    same_bits,
    same_tensors,
)
from quantkit.testing.formats import FORMAT_SPECS

ROWS = (1, 2, 7, 16, 17, 64)
"""Rows of activations; up to ``DECODE_ROWS`` they are sequences that decode side by side."""
SHAPES = ((1, 64), (7, 37), (33, 96), (64, 192))
PHASES: tuple[Phase, ...] = ("decode", "prefill")


def check_kernel(kernel: LinearKernel, specs: Iterable[QuantSpec] = FORMAT_SPECS,
                 device: torch.device | str = "cpu") -> int:
    """Multiply by every weight that a kernel takes, of all formats, in three dtypes and odd shapes, and check
    what ``quantkit.ops.dispatch.LinearKernel`` promises: a result within the error rule of
    ``quantkit.ops.kernel_contract``, of the right dtype and shape, written whole and in memory of its own; a
    row that doesn't depend on the others; an input and a weight that nobody writes to; the same after
    preparing again. What it declines, it must decline with a reason and without raising.

    Args:
        kernel: the kernel.
        specs: of the weights.
        device: where it is tried.

    Returns:
        How many weights it took. 0: it declines everything on this machine, and nothing but that was checked.

    Raises:
        PluginError: a promise is broken; the format, spec, shape and dtype are named.
    """
    contract = Contract(f"kernel {getattr(kernel, 'name', kernel)!r}", "quantkit.ops.dispatch.LinearKernel")
    contract.must(isinstance(kernel, LinearKernel) and not isinstance(kernel, type),
                  "it is no LinearKernel: an instance with name, order, declines, prepare and run")
    check_name(contract, "kernels", kernel, kernel.name)
    contract.must(isinstance(kernel.order, int), f"order is {kernel.order!r}, not a whole number")
    device, taken = torch.device(device), 0
    for weight, dtype in _weights(specs, device):
        query = query_for(weight, dtype, device, "decode")
        case = contract.at(f"{weight.format} {weight.spec.label()} {list(weight.shape)} by "
                           f"{plain_name(dtype)}")
        _check_other_queries(case, kernel, query)
        phases = [phase for phase in PHASES
                  if _reason(case, kernel, dataclasses.replace(query, phase=phase)) is None]
        if phases:
            taken += 1
            _check_products(case, kernel, weight, dtype, phases)
    return taken


def _weights(specs: Iterable[QuantSpec],
             device: torch.device) -> Iterator[tuple[QuantizedTensor, torch.dtype]]:
    """Random weights of every format, and the dtypes of activations; fewer shapes for more than one size."""
    formats = registry("formats")
    for name, spec, dtype in itertools.product(sorted(formats), specs, FLOATS.values()):
        form = formats.get(name)
        wanted = resolve(spec, dtype, form)
        for shape in SHAPES:
            if form.refuses(wanted, shape) is None:
                yield form.pack(random_codes(wanted, shape), dtype).to(device), dtype


def _reason(case: Contract, kernel: LinearKernel, query: KernelQuery) -> str | None:
    return check_reason(case, "declines", case.call("declines", kernel.declines, query))


def _check_other_queries(case: Contract, kernel: LinearKernel, query: KernelQuery) -> None:
    """Another operation is declined; another device and an unknown format don't make it raise."""
    other = dataclasses.replace(query, op="convolution")
    case.must(_reason(case, kernel, other) is not None, "it doesn't decline another operation than linear",
              'return a reason where query.op != "linear"')
    for changes in ({"device": "meta"}, {"device": "cuda", "capability": (7, 0)}, {"format": "unknown"},
                    {"dtype": torch.float64}):
        _reason(case, kernel, dataclasses.replace(query, **changes))


def _check_products(case: Contract, kernel: LinearKernel, weight: QuantizedTensor, dtype: torch.dtype,
                    phases: list[Phase]) -> None:
    stored = {suffix: tensor.clone() for suffix, tensor in weight.tensors.items()}
    device = next(iter(stored.values())).device
    prepared = case.call("prepare", kernel.prepare, weight)
    again = case.call("prepare", kernel.prepare, weight)
    case.must(same_tensors(stored, weight.tensors), "prepare wrote to the weight")
    rows = [count for count in ROWS if ("decode" if count <= DECODE_ROWS else "prefill") in phases]
    x = probe(weight.shape[1], max(rows), dtype, device)
    results = {}
    for count in rows:
        part, given = x[:count].clone(), x[:count].clone()
        with poisoned_memory():
            y = case.call(f"run of {count} rows", kernel.run, part, prepared)
        at = case.at(f"{count} rows")
        at.must(same_bits(part, given), "run wrote to its input")
        fault = product_fault(part, y, weight)
        at.must(fault is None, fault or "")
        results[count] = y, y.clone()
    for count in rows:
        case.call("run", kernel.run, -x[:count], prepared)
    case.must(all(same_bits(*pair) for pair in results.values()),
              "run returned memory that a later call writes to", "return a tensor of its own")
    count = rows[0]
    case.must(same_bits(case.call("run", kernel.run, x[:count].clone(), again), results[count][1]),
              "preparing a weight twice gives another product")
    case.must(same_bits(case.call("run", kernel.run, x[:count].clone(), prepared), results[count][1]),
              "its result depends on earlier calls")
    case.must(same_tensors(stored, weight.tensors), "run wrote to the weight")
    _check_rows(case, kernel, prepared, x, {number: pair[1] for number, pair in results.items()})


def _check_rows(case: Contract, kernel: LinearKernel, prepared: object, x: torch.Tensor,
                results: dict[int, torch.Tensor]) -> None:
    """A row is the same to the last bit whatever other rows there are, up to ``DECODE_ROWS`` of them."""
    side_by_side = [count for count in results if 1 < count <= DECODE_ROWS]
    if 1 not in results or not side_by_side:
        return
    longest = max(side_by_side)
    alone = torch.cat([case.call("run of 1 row", kernel.run, row.clone(), prepared).clone()
                       for row in x[:longest].split(1)])
    for count in side_by_side:
        case.at(f"{count} rows").must(same_bits(results[count], alone[:count]),
                                      "a row's result depends on how many rows there are",
                                      "sum every row in the same order, whatever their number")
