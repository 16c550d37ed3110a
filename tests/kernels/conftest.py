"""Kernels run in Triton's interpreter here, unless there is a GPU: chosen before triton is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import quantkit_kernels.triton

GPU = torch.cuda.is_available()
FLOATS = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}

if not GPU:
    assert "triton" not in sys.modules, "something imported triton before the interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"
for module in pkgutil.walk_packages(quantkit_kernels.triton.__path__, "quantkit_kernels.triton."):
    importlib.import_module(module.name)
os.environ.pop("TRITON_INTERPRET", None)  # what was decorated stays so; other tests don't inherit it


if not GPU:
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    def _dot(builder: object, a: Any, b: Any, d: Any, input_precision: object, imprecise: object) -> Any:
        """A product of tiles as a tensor core makes it: exact products, summed up alike in tiles of any size.
        NumPy's float32 products are summed up in other orders for other sizes, on some CPUs."""
        parts = [interpreter._convert_float(one.data, one.dtype, language.float16, None).view(np.float16)
                 if one.dtype.primitive_bitwidth == 8 and one.dtype.is_floating() else one.data
                 for one in (a, b)]
        with np.errstate(invalid="ignore"):  # a spoiled row
            whole = parts[0].astype(np.float64) @ parts[1].astype(np.float64)
        return interpreter.TensorHandle(whole.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot

    def _called(function: Any, *args: Any, **named: Any) -> Any:
        """A device function, within a kernel. The interpreter looks through all of Triton's language before
        each call, which takes longer than most of them; here only if that hasn't been done yet."""
        seen = {id(one) for one in function.fn.__globals__.values()}
        if any(core.is_builtin(one.arange) for one in (language, core) if id(one) in seen):
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **named)

    interpreter.InterpretedFunction.__call__ = _called


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


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again when kernels run."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """New memory is filled with NaN: an element that nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


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
