"""Broken kernels, each a correct one with one fault: what ``check_kernel`` says, and what a run does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.linear import dense
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.plugins.hooks import Register, hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.support.errors import PluginError, SpecError
from quantkit.testing import check_kernel
from quantkit.testing.codes import random_codes

SPEC = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))


class Sound:
    """Dequantizes 4-bit weights of ``pack-quantized`` and multiplies a row at a time."""

    name, order = "by-rows", 1

    def declines(self, query):
        if query.op != "linear" or query.device != "cpu" or query.format != "pack-quantized":
            return "multiplies pack-quantized on a CPU"
        return None if query.spec.kind == "int" and query.spec.bits == 4 else "multiplies 4 bits"

    def prepare(self, weight):
        return registry("formats").get(weight.format).dequantize(weight)

    def run(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        return torch.cat([dense(row.float(), prepared) for row in x.split(1)]).to(x.dtype)


class TakesAnyOperation(Sound):
    def declines(self, query):
        return None if query.spec.bits == 4 and query.device == "cpu" else "no"


class NoReason(Sound):
    def declines(self, query):
        return super().declines(query) is not None


class RaisesForOthers(Sound):
    def declines(self, query):
        return super().declines(query) if query.capability is None else f"needs {query.capability[2]}"


class Wrong(Sound):
    def run(self, x, prepared):
        return super().run(x, prepared * 1.1)


class LastColumn(Sound):
    def run(self, x, prepared):
        return super().run(x[:, :-1], prepared[:, :-1])


class LastRow(Sound):
    """Leaves the last result as the memory was."""

    def run(self, x, prepared):
        y = torch.empty(x.shape[0], prepared.shape[0], dtype=x.dtype)
        y[:, :-1] = super().run(x, prepared)[:, :-1]
        return y


class Wide(Sound):
    def run(self, x, prepared):
        return super().run(x, prepared).float()


class Flat(Sound):
    def run(self, x, prepared):
        return super().run(x, prepared).reshape(-1)


class Nothing(Sound):
    def run(self, x, prepared):
        return None


class WritesInput(Sound):
    def run(self, x, prepared):
        y = super().run(x, prepared)
        x.mul_(2)
        return y


class WritesWeight(Sound):
    def prepare(self, weight):
        plain = super().prepare(weight)
        weight.tensors["weight_packed"].add_(1)
        return plain


class ByNumber(Sound):
    """Sums in another order where there are more rows."""

    def run(self, x, prepared):
        if len(x) == 1:
            return super().run(x, prepared)
        half = prepared.shape[1] // 2 + 1
        return (super().run(x[:, :half].float(), prepared[:, :half])
                + super().run(x[:, half:].float(), prepared[:, half:]) + 1e-7 * len(x)).to(x.dtype)


class OneBuffer(Sound):
    def __init__(self):
        self.buffers = {}

    def run(self, x, prepared):
        y = super().run(x, prepared)
        new = torch.empty(64, y.shape[1], dtype=y.dtype)
        buffer = self.buffers.setdefault((prepared.shape, x.dtype), new)
        buffer[:len(y)] = y
        return buffer[:len(y)]


class PreparesOnce(Sound):
    def __init__(self):
        self.prepared = set()

    def prepare(self, weight):
        plain = super().prepare(weight)
        key = id(weight)
        scale = 1 + 2.0**-9 if key in self.prepared else 1
        self.prepared.add(key)
        return plain * scale


class Raises(Sound):
    def run(self, x, prepared):
        if len(x) == 7:
            raise ValueError("7 rows")
        return super().run(x, prepared)


class NoOrder(Sound):
    order = "first"


ZOO = {
    "takes any operation": (TakesAnyOperation(), "doesn't decline another operation"),
    "declines without a reason": (NoReason(), "the reason as a sentence"),
    "raises for another device": (RaisesForOthers(), "declines raises IndexError"),
    "is wrong": (Wrong(), "its product has an error of"),
    "leaves out a column": (LastColumn(), "its product has an error of"),
    "leaves out a row": (LastRow(), "not finite"),
    "another dtype": (Wide(), "run returned float32"),
    "another shape": (Flat(), "run returned .* not"),
    "returns nothing": (Nothing(), "run returned a NoneType"),
    "writes to its input": (WritesInput(), "run wrote to its input"),
    "writes to the weight": (WritesWeight(), "prepare wrote to the weight"),
    "rows that depend on others": (ByNumber(), "depends on how many rows there are"),
    "one buffer": (OneBuffer(), "memory that a later call writes to"),
    "another product the second time": (PreparesOnce(), "preparing a weight twice gives another product"),
    "raises": (Raises(), "run of 7 rows raises ValueError: 7 rows"),
    "no order": (NoOrder(), "order is 'first'"),
    "a class": (Sound, "it is no LinearKernel"),
}


@pytest.mark.parametrize("fault", ZOO)
def test_the_kit_notices(fault: str) -> None:
    kernel, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_kernel(kernel, [SPEC])


def test_a_sound_kernel_passes_and_one_that_declines_everything_says_so() -> None:
    assert check_kernel(Sound(), [SPEC]) == 12
    assert check_kernel(Sound(), [SPEC.model_copy(update={"bits": 3})]) == 0


@pytest.fixture
def multiply(monkeypatch: pytest.MonkeyPatch):
    """``multiply(kernel, x)``: by a weight, with the kernel registered as a plugin's."""
    current.cache_clear()

    def run(kernel: Any, x: torch.Tensor) -> torch.Tensor:
        class Plugin:
            @hookimpl
            def register_kernels(self, register: Register) -> None:
                register(kernel.name, kernel)

        current().add(Plugin(), "quantkit-rows")
        form = registry("formats").get("pack-quantized")
        codes = random_codes(resolve(SPEC, torch.bfloat16), (33, 96))
        return QuantizedWeight(form.pack(codes, torch.bfloat16)).multiply(x)

    yield run
    current.cache_clear()


X = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("fault", ["is wrong", "leaves out a column", "another dtype", "another shape",
                                   "returns nothing", "writes to its input"])
def test_a_stranger_s_kernel_is_checked_when_it_prepares_a_weight(multiply, fault: str) -> None:
    kernel, message = ZOO[fault]
    with pytest.raises(PluginError, match=f"kernel 'by-rows' of quantkit-rows: .*{message}") as caught:
        multiply(kernel, X)
    assert "pack-quantized int4 channel sym [33, 96] by bfloat16" in str(caught.value.why)


def test_what_a_kernel_raises_names_it(multiply) -> None:
    class RaisesAlways(Sound):
        def prepare(self, weight):
            raise KeyError("weight")

    with pytest.raises(PluginError, match="kernel 'by-rows' of quantkit-rows raises KeyError"):
        multiply(RaisesAlways(), X)


def test_a_sound_kernel_is_checked_once(multiply) -> None:
    class Counted(Sound):
        runs = 0

        def run(self, x, prepared):
            self.runs += 1
            return super().run(x, prepared)

    kernel = Counted()
    multiply(kernel, X)
    assert kernel.runs == 2  # the check, then the product
    form = registry("formats").get("pack-quantized")
    codes = random_codes(resolve(SPEC, torch.bfloat16), (33, 96), seed=1)
    QuantizedWeight(form.pack(codes, torch.bfloat16)).multiply(X)
    assert kernel.runs == 3


@pytest.mark.parametrize("kernel", [NoReason(), RaisesForOthers()], ids=["no reason", "raises"])
def test_a_kernel_whose_declines_is_broken_costs_itself_only(multiply, kernel) -> None:
    kernel.order = 1
    if isinstance(kernel, RaisesForOthers):
        kernel.declines = lambda query: query.capability[2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = multiply(kernel, X)
    assert torch.isfinite(y).all()
    assert sum("kernel 'by-rows' of quantkit-rows" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("error", [MemoryError("9 GiB"), torch.OutOfMemoryError("9 GiB"), SpecError("odd")])
def test_memory_that_is_exhausted_and_our_own_errors_stay_what_they_are(multiply, error: Exception) -> None:
    class Fails(Sound):
        def prepare(self, weight: QuantizedTensor) -> Any:
            raise error

    with pytest.raises(type(error)) as caught:
        multiply(Fails(), X)
    assert caught.value is error
