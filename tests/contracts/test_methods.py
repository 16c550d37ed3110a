"""Every registered method keeps the promises of ``methods/base.py``; what one returns is checked."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.formats.base import Codes
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.hooks import Register, hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.quantization.methods.autoround import AutoRoundOptions
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import PluginError
from quantkit.testing import check_method

SPEC = QuantSpec.model_validate({"bits": 4, "granularity": {"strategy": "group", "size": 16}})


class FewSteps(AutoRoundOptions):
    """As many steps as the promises need; the result is worse, as it may be."""

    steps: int = 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(registry("methods")))
def test_registered_methods(name: str) -> None:
    method = registry("methods").get(name)
    assert method.name == name and method.paper.startswith("https://")
    check_method(replace(method, options=FewSteps) if name == "autoround" else method)


@pytest.mark.parametrize(("result", "message"), [
    (None, "returned None"), ((1, 2), "a tuple in place of Codes"), (torch.ones(3), "a Tensor in place")])
def test_a_result_of_another_type_is_said_plainly(result: object, message: str) -> None:
    method = replace(RTN, name="odd", quantize=lambda weight, stats, spec, options: result)
    with pytest.raises(PluginError, match=f"method 'odd' {message}|method 'odd' returned {message}"):
        method.run(torch.ones(2, 4), None, SPEC, MethodOptions())


@pytest.mark.parametrize(("change", "message"), [
    (lambda codes: replace(codes, codes=codes.codes.int()), "returned codes int32"),
    (lambda codes: replace(codes, scale=codes.scale.T), "returned scales float32 of shape"),
    (lambda codes: replace(codes, scale=codes.scale.double()), "returned scales float64"),
    (lambda codes: replace(codes, scale=codes.scale * float("inf")), "not finite"),
    (lambda codes: replace(codes, zero=torch.zeros(6, 4, dtype=torch.uint8)), "zero points where"),
    (lambda codes: replace(codes, codes=codes.codes + 16), "code above 15")])
def test_a_contract_is_checked_on_every_run(change: Callable[[Codes], Codes], message: str) -> None:
    method = replace(RTN, quantize=lambda *given: change(RTN.quantize(*given)))
    with pytest.raises(PluginError, match=message):
        method.run(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), None, SPEC,
                   RtnOptions())


def test_what_quantize_batch_returns_is_checked() -> None:
    weights = [torch.ones(2, 16)] * 2
    for result, message in (((), "returned a tuple"), ([], "returned a list of 0")):
        method = replace(RTN, quantize_batch=lambda *given, result=result: result)
        with pytest.raises(PluginError, match=message):
            method.run_batch(weights, [None, None], SPEC, RtnOptions())


def test_the_message_names_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    current.cache_clear()

    class Odd:
        @hookimpl
        def register_methods(self, register: Register) -> None:
            register("odd", replace(RTN, name="odd", quantize=lambda *given: None))

    try:
        current().add(Odd(), "quantkit-odd")
        with pytest.raises(PluginError, match="method 'odd' of quantkit-odd returned None"):
            registry("methods").get("odd").run(torch.ones(2, 16), None, SPEC, RtnOptions())
    finally:
        current.cache_clear()
