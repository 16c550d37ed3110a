"""Every registered method keeps the promises of ``methods/base.py``; the kit itself notices a broken one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.errors import PluginError, SpecError
from quantkit.formats.base import Codes
from quantkit.methods.base import LayerStats, Method, MethodOptions
from quantkit.methods.rtn import METHOD as RTN
from quantkit.methods.rtn import RtnOptions
from quantkit.plugins import registry
from quantkit.spec import QuantSpec
from quantkit.testing import check_method


@pytest.mark.parametrize("name", sorted(registry("methods")))
def test_registered_methods(name: str) -> None:
    method = registry("methods").get(name)
    assert method.name == name and method.paper.startswith("https://")
    check_method(method)


def broken(change: Callable[[torch.Tensor, Codes], Codes]) -> Method:
    def quantize(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
                 options: MethodOptions) -> Codes:
        return change(weight, RTN.quantize(weight, stats, spec, RtnOptions()))

    return Method(name="broken", paper="https://example.org", quantize=quantize)


def draws_random_numbers(weight: torch.Tensor, codes: Codes) -> Codes:
    torch.rand(1)
    return codes


def negative_scale(weight: torch.Tensor, codes: Codes) -> Codes:
    return replace(codes, scale=-codes.scale)


def unrounded_scale(weight: torch.Tensor, codes: Codes) -> Codes:
    return replace(codes, scale=codes.scale * 1.0001)


def far_off(weight: torch.Tensor, codes: Codes) -> Codes:
    return replace(codes, codes=(2**codes.spec.bits - 1) - codes.codes)


def missing_zero(weight: torch.Tensor, codes: Codes) -> Codes:
    return replace(codes, zero=None)


def in_place(weight: torch.Tensor, codes: Codes) -> Codes:
    weight.mul_(0.5)
    return codes


@pytest.mark.parametrize(("change", "said"), [
    (draws_random_numbers, "global random generator"), (negative_scale, "not above 0"),
    (unrounded_scale, "not rounded"), (far_off, "zeros would be closer"), (missing_zero, "zero points"),
    (in_place, "wrote to an argument")])
def test_the_kit_notices(change: Callable[[torch.Tensor, Codes], Codes], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        check_method(broken(change))


def test_the_kit_notices_a_method_that_refuses_everything_and_one_that_takes_nan() -> None:
    with pytest.raises(PluginError, match="refuses every spec"):
        check_method(replace(RTN, check=lambda spec: "no"))

    def careless(weight: torch.Tensor, stats: LayerStats | None, spec: QuantSpec,
                 options: MethodOptions) -> Codes:
        return RTN.quantize(weight.nan_to_num(), stats, spec, RtnOptions())

    with pytest.raises(PluginError, match="accepts a weight of NaN"):
        check_method(replace(RTN, quantize=careless))


@pytest.mark.parametrize(("change", "said"), [
    (lambda codes: replace(codes, codes=codes.codes.int()), "uint8"),
    (lambda codes: replace(codes, scale=codes.scale.T), "returned scales"),
    (lambda codes: replace(codes, scale=codes.scale * float("inf")), "not finite"),
    (lambda codes: replace(codes, codes=codes.codes + 16), "code above 15")])
def test_a_contract_is_checked_on_every_run(change: Callable[[Codes], Codes], said: str) -> None:
    method = broken(lambda weight, codes: change(codes))
    spec = QuantSpec.model_validate({"bits": 4, "granularity": {"strategy": "group", "size": 16}})
    with pytest.raises(SpecError, match=said):
        method.run(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), None, spec,
                   MethodOptions())
