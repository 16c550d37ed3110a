"""The products of the built-in kernels are right, and a run finds out if a plugin's kernel isn't."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.cpu_machine import reason_against_kernels
from quantkit.ops.dispatch import DECODE_ROWS, KernelQuery
from quantkit.ops.reference import dense
from quantkit.ops.stored_weight import QuantizedWeight, probe, reason_against_product
from quantkit.plugins.hooks import Register, hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.support.errors import PluginError, SpecError
from quantkit.testing import FORMAT_SPECS
from quantkit.testing.formats import random_codes

SPEC = QuantSpec(bits=4, granularity=Granularity(strategy="channel"))


class Sound:
    """Dequantizes 4-bit weights of ``pack-quantized`` and multiplies a row at a time."""

    name, order = "by-rows", 1

    def reason_against(self, query):
        if query.op != "linear" or query.device != "cpu" or query.format != "pack-quantized":
            return "multiplies pack-quantized on a CPU"
        return None if query.spec.kind == "int" and query.spec.bits == 4 else "multiplies 4 bits"

    def prepare(self, weight):
        return registry("formats").get(weight.format).dequantize(weight)

    def run(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        return torch.cat([dense(row.float(), prepared) for row in x.split(1)]).to(x.dtype)


class NoReason(Sound):
    def reason_against(self, query):
        return super().reason_against(query) is not None


class RaisesForOthers(Sound):
    def reason_against(self, query):
        return super().reason_against(query) if query.capability is None else f"needs {query.capability[2]}"


class Wrong(Sound):
    def run(self, x, prepared):
        return super().run(x, prepared * 1.1)


class LastColumn(Sound):
    def run(self, x, prepared):
        return super().run(x[:, :-1], prepared[:, :-1])


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


FAULTS = {
    "is wrong": (Wrong(), "its product has an error of"),
    "leaves out a column": (LastColumn(), "its product has an error of"),
    "another dtype": (Wide(), "run returned float32"),
    "another shape": (Flat(), "run returned .* not"),
    "returns nothing": (Nothing(), "run returned a NoneType"),
    "writes to its input": (WritesInput(), "run wrote to its input"),
}
FEW = [spec for spec in FORMAT_SPECS[::2] if spec.kind != "int" or spec.bits == 8 or spec.granularity.size]
"""For the reference, which takes every weight of every format: some of each kind."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in registry("kernels") if not name.startswith("triton")])
def test_a_builtin_kernel_multiplies_every_weight_that_it_takes(name: str) -> None:
    kernel, formats, taken = registry("kernels").get(name), registry("formats"), 0
    for spec, dtype in itertools.product(FEW if name == "reference" else FORMAT_SPECS,
                                         (torch.bfloat16, torch.float32)):
        for form in (form for _, form in formats.usable() if form.reason_against(spec, (64, 512)) is None):
            weight = form.pack(random_codes(resolve(spec, dtype, form), (64, 512)), dtype)
            for phase, rows in (("decode", 1), ("prefill", DECODE_ROWS + 3)):
                query = KernelQuery("linear", "cpu", None, dtype, 64, 512, form.name, weight.spec, phase)
                if kernel.reason_against(query) is None:
                    taken += 1
                    x = probe(512, rows, dtype, torch.device("cpu"))
                    prepared = kernel.prepare(weight)
                    assert reason_against_product(x, kernel.run(x.clone(), prepared), weight) is None, query
    assert taken or (name.startswith("cpu-") and reason_against_kernels() is not None)


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stranger_s_kernel_is_checked_when_it_prepares_a_weight(multiply, fault: str) -> None:
    kernel, message = FAULTS[fault]
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
        kernel.reason_against = lambda query: query.capability[2]
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
