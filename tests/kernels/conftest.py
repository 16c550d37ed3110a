"""Kernels run in Triton's interpreter here, unless there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.triton_interpreter import GPU, interpreted, poisoned

__all__ = ["interpreted", "poisoned"]
FLOATS = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=["interpreter-float16", "interpreter-float32",
                        pytest.param("cuda-bfloat16", marks=pytest.mark.gpu),
                        pytest.param("cuda-float16", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> tuple[torch.device, torch.dtype]:
    """Where a kernel runs and in which dtype: the interpreter is wrong in bfloat16."""
    place, dtype = request.param.split("-")
    if place == "cuda" and not GPU:
        pytest.skip("no GPU")
    if place == "interpreter" and GPU:
        pytest.skip("there is a GPU: kernels are compiled in this process")
    return torch.device("cuda" if place == "cuda" else "cpu"), FLOATS[dtype]


def check_rule(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor,
               terms: torch.Tensor | None = None) -> None:
    """At most twice the error of torch in the same precision, both against float64.

    ``terms``: the sums of the magnitudes of each result's terms. Nothing is required below one rounding of
    the result, nor below one float32 rounding of them: there only the order of summation makes a difference.
    """
    assert got.dtype == plain.dtype and got.shape == plain.shape == exact.shape
    assert torch.isfinite(got).all()
    ours, theirs = (got.double() - exact).norm(), (plain.double() - exact).norm()
    floor = (exact.to(got.dtype).double() - exact).norm()
    if terms is not None:
        floor = max(floor, 2.0**-24 * terms.norm())
    assert ours <= 2 * max(theirs, floor), f"{ours:.3g} against {theirs:.3g}, rounding alone {floor:.3g}"


@pytest.fixture
def obeys_the_rule() -> Callable[..., None]:
    return check_rule


def check_product(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """:func:`check_rule` for ``got [m, n]``, the product of ``x [m, k]`` and a float64 ``weight [n, k]``."""
    weight = weight.to(x.device)
    check_rule(got, x @ weight.to(x.dtype).T, x.double() @ weight.T, x.double().abs() @ weight.abs().T)


@pytest.fixture
def product_obeys_the_rule() -> Callable[..., None]:
    return check_product


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    """``randn(*shape, seed=0, on=(device, dtype))``."""
    def make(*shape: int, seed: int = 0, on: tuple[torch.device, torch.dtype]) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(on[1]).to(on[0])

    return make


@pytest.fixture(scope="session")
def paged_cache() -> ModuleType:
    """``paged_cache.py``; test modules can't import one another."""
    spec = importlib.util.spec_from_file_location("paged_cache", Path(__file__).with_name("paged_cache.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rows_stand_alone() -> Callable[..., None]:
    """``rows_stand_alone(packed, x [16, k])``: each row's bits, alone and beside a spoiled one."""
    def check(packed: Any, x: torch.Tensor, rounded: Callable[..., Any] = lambda x: x) -> None:
        from quantkit_kernels.triton import matmul

        def multiply(x: torch.Tensor, packed: Any) -> torch.Tensor:
            return matmul.multiply(rounded(x), packed)

        whole = multiply(x, packed)
        for row in (0, 7, 15):
            assert torch.equal(multiply(x[row:row + 1], packed)[0], whole[row])
        kept = [row for row in range(16) if row != 3]
        for ruin in (float("nan"), float("inf")):
            spoiled = x.clone()
            spoiled[3] = ruin
            assert torch.equal(multiply(spoiled, packed)[kept], whole[kept])

    return check
