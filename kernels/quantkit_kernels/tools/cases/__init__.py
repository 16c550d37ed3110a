"""Every kernel of the package as cases: what is compiled ahead of time, and what is measured beside torch.

A module has one kind of kernels, for both. Compile-time arguments come from the functions that launch the
kernels, so that what is compiled ahead of time is what runs. What is measured has the shapes of an 8B Llama:
weights, keys and values exist in enough copies that a GPU's cache holds nothing of one when it is read again,
as when a whole model is run, and both sides compute the same numbers, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit_kernels.tools.cases import attention, experts, kv_write, products, rows
from quantkit_kernels.tools.cases.case import FAMILIES, AotCase, BenchCase, BenchSetup

FIRST = (1, 16, 64, 4, 256)
"""Rows of activations by importance: one sequence, then batches."""


def bench_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    """Every kernel, the most important first: products of one row, decoding attention, products of more rows,
    what is between, prompts. What a case needs is made when its turn comes."""
    by_rank = sorted(setup.shapes.rows, key=lambda m: (FIRST.index(m) if m in FIRST else len(FIRST), m))
    few = [m for m in by_rank if m <= max(FIRST)]
    for number, m in enumerate(few):
        yield from products.bench_cases(setup.with_rows(m))
        if number == 0:
            yield from attention.bench_cases(setup)
    yield from kv_write.bench_cases(setup)
    yield from rows.bench_cases(setup)
    yield from products.bench_cases(setup.with_rows(*(m for m in by_rank if m not in few)))


def product_cases(setup: BenchSetup) -> Iterator[BenchCase]:
    """Products of every shape and format by one row, then by more: what is stopped has served decoding."""
    for m in setup.shapes.rows:
        yield from products.bench_cases(setup.with_rows(m))


def aot_cases(target: str) -> Iterator[AotCase]:
    """Everything that ships for one of :data:`~quantkit_kernels.tools.cases.case.FAMILIES`."""
    for part in (products, experts, rows, kv_write, attention):
        yield from part.aot_cases(FAMILIES[target])
