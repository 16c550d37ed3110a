"""Kernels run in Triton's interpreter here, unless there is a GPU. It is chosen before triton is imported.

A `conftest.py` whose tests run kernels imports `interpreted` and `poisoned`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import quantkit_kernels.triton

GPU = torch.cuda.is_available()

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


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks again when kernels run."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New memory is filled with NaN: an element that nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
