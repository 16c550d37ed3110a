"""Broken methods, each a correct one with one fault, and what ``check_method`` says of each."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.autoround import AutoRoundOptions
from quantkit.quantization.methods.base import Method, MethodOptions
from quantkit.quantization.methods.gptq import METHOD as GPTQ
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import PluginError
from quantkit.testing import METHOD_SPECS, check_method

INT4 = QuantSpec(bits=4, granularity=Granularity(strategy="channel"), scale_dtype="bfloat16")


class Required(MethodOptions):
    strength: float


def rounded(weight, stats, spec, options):
    return RTN.quantize(weight, stats, spec, RtnOptions())


SOUND = Method("sound", "https://example.org", rounded)


def changed(change, **fields):
    """A method whose codes ``change(codes, weight)`` alters."""
    return replace(SOUND, quantize=lambda weight, stats, spec, options: change(
        rounded(weight, stats, spec, options), weight), **fields)


def with_codes(**fields):
    return changed(lambda codes, weight: replace(codes, **{name: make(codes) for name, make
                                                           in fields.items()}))


def draws(codes, weight):
    torch.rand(1)
    return codes


def writes(codes, weight):
    weight.mul_(0.5)
    return codes


def writes_stats(weight, stats, spec, options):
    stats.hessian.diagonal().add_(1)
    return rounded(weight, stats, spec, options)


def careless(weight, stats, spec, options):
    return rounded(weight.nan_to_num(), stats, spec, options)


def asserts(weight, stats, spec, options):
    assert torch.isfinite(weight).all(), "not finite"
    return rounded(weight, stats, spec, options)


def counting():
    count = itertools.count()
    return changed(lambda codes, weight: replace(codes, notes=(f"call {next(count)}",)))


def remembering():
    """The first weight of a shape decides what all others of that shape become."""
    seen = {}

    def change(codes, weight):
        return seen.setdefault((tuple(weight.shape), codes.spec), codes)

    return changed(change)


def packs(weight, stats, spec, options):
    return registry("formats").get("pack-quantized").pack(rounded(weight, stats, spec, options),
                                                          torch.bfloat16)


def one_width(weight, stats, spec, options):
    return rounded(weight.reshape(-1, 64).reshape(weight.shape), stats, spec, options)


def inverts(weight, stats, spec, options):
    torch.linalg.cholesky(stats.hessian)
    return rounded(weight, stats, spec, options)


def differentiable(weight, stats, spec, options):
    scale = rounded(weight, stats, spec, options).scale.requires_grad_()
    return replace(rounded(weight, stats, spec, options), scale=scale)


def inferred(weight, stats, spec, options):
    with torch.inference_mode():
        return rounded(weight, stats, spec, options)


def backwards(weights, stats, spec, options):
    return [rounded(weight, None, spec, options) for weight in reversed(weights)]


def mutable(weight, stats, spec, options):
    return dataclasses.astuple(rounded(weight, stats, spec, options))


ZOO = {
    "returns None": (replace(SOUND, quantize=lambda *given: None), "a NoneType in place of Codes"),
    "returns a tuple": (replace(SOUND, quantize=mutable), "a tuple in place of Codes"),
    "returns a tensor": (changed(lambda codes, weight: codes.codes), "a Tensor in place of Codes"),
    "returns a packed weight": (replace(SOUND, quantize=packs), "a QuantizedTensor in place of Codes"),
    "scales of float64": (with_codes(scale=lambda c: c.scale.double()), "scale is float64"),
    "scales not rounded": (with_codes(scale=lambda c: c.scale * 1.0001), "not rounded to bfloat16"),
    "scales below 0": (with_codes(scale=lambda c: -c.scale), "not above 0"),
    "scales of 0": (with_codes(scale=lambda c: c.scale * 0), "not above 0"),
    "scales NaN": (with_codes(scale=lambda c: c.scale * float("nan")), "a scale is not finite"),
    "scales of another shape": (with_codes(scale=lambda c: c.scale.reshape(-1)), "scale is float32"),
    "scales that require a gradient": (replace(SOUND, quantize=differentiable), "requires a gradient"),
    "inference tensors": (replace(SOUND, quantize=inferred), "inference mode"),
    "codes of int32": (with_codes(codes=lambda c: c.codes.int()), "codes is int32"),
    "codes transposed": (with_codes(codes=lambda c: c.codes.T), "codes is uint8"),
    "codes above the range": (with_codes(codes=lambda c: c.codes | 128), "a code is above 15"),
    "codes upside down": (with_codes(codes=lambda c: 2**c.spec.bits - 1 - c.codes), "zeros would be closer"),
    "no zero points": (with_codes(zero=lambda c: None), "there is no zero,"),
    "zero points above the range": (with_codes(zero=lambda c: None if c.zero is None else c.zero + 16),
                                    "a zero point is above 15"),
    "zero points where there are none": (with_codes(zero=lambda c: c.scale.to(torch.uint8)),
                                         "a tensor zero, which"),
    "another spec": (with_codes(spec=lambda c: c.spec.model_copy(update={"scale_dtype": "float32"})),
                     "codes of another spec"),
    "notes in a list": (with_codes(notes=lambda c: ["rounded"]), "no tuple of strings"),
    "a note that is a number": (with_codes(notes=lambda c: (3,)), "no tuple of strings"),
    "draws from torch": (changed(draws), "global random generator"),
    "counts its calls": (counting(), "another result the second time"),
    "returns what it returned before": (remembering(), "zeros would be closer"),
    "writes to the weight": (changed(writes), "quantize writes to (weight|hessian)"),
    "writes to the statistics": (replace(SOUND, quantize=writes_stats, needs=frozenset({"hessian"})),
                                 "quantize writes to (weight|hessian)"),
    "needs what there isn't": (replace(SOUND, needs=frozenset({"hessain"})), "needs is"),
    "needs a string": (replace(SOUND, needs="hessian"), "needs is 'hessian'"),
    "fails for an expert without tokens": (replace(SOUND, quantize=inverts, needs=frozenset({"hessian"})),
                                           "no token reached: quantize raises"),
    "takes one width": (replace(SOUND, quantize=one_width), "weight '(5 x 96|200 x 48|2 x 32)'"),
    "accepts NaN": (replace(SOUND, quantize=careless), "accepts a weight of NaN"),
    "asserts": (replace(SOUND, quantize=asserts), "raises AssertionError: not finite"),
    "an option without a default": (replace(SOUND, options=Required), "with nothing given raises"),
    "options of another type": (replace(SOUND, options=dict), "has options of"),
    "quick names another option": (replace(SOUND, quick={"steps": 1}), "quick names steps"),
    "quantize_batch turns the order": (replace(SOUND, quantize_batch=backwards),
                                       "quantize_batch disagrees with quantize"),
    "quantize_batch returns a tuple": (replace(SOUND, quantize_batch=lambda *given: ()),
                                       "quantize_batch returned a tuple"),
    "no paper": (replace(SOUND, paper=""), "paper is ''"),
    "refuses everything": (replace(SOUND, check=lambda spec: "no"), "refuses every spec"),
    "refuses with True": (replace(SOUND, check=lambda spec: True), "must be the reason as a sentence"),
    "kinds that don't exist": (replace(SOUND, kinds=frozenset({"integer"})), "kinds is"),
    "no method": ("rtn", "it is a str, not a Method"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", ZOO)
def test_a_broken_method_is_caught(fault: str) -> None:
    method, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_method(method)


@pytest.mark.parametrize("method", [SOUND, replace(GPTQ, name="renamed", paper="https://example.org")],
                         ids=["sound", "gptq"])
def test_a_sound_method_passes(method: Method) -> None:
    check_method(method, METHOD_SPECS if method is SOUND else [INT4])


class FewSteps(AutoRoundOptions):
    """As many steps as the promises need; the result is worse, as it may be."""

    steps: int = 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(registry("methods")))
def test_registered_methods(name: str) -> None:
    method = registry("methods").get(name)
    check_method(replace(method, options=FewSteps) if name == "autoround" else method)


@pytest.mark.parametrize("fault", ["returns None", "codes of int32", "scales NaN", "codes above the range",
                                   "zero points where there are none"])
def test_a_run_checks_what_is_returned(fault: str) -> None:
    method, message = ZOO[fault]
    with pytest.raises(PluginError, match=f"method 'sound' returned .*{message}"):
        method.run(torch.arange(384.0).reshape(6, 64).sin(), None, INT4, MethodOptions())


def test_what_quantize_batch_returns_is_checked() -> None:
    for result, message in (((), "returned a tuple"), ([], "returned a list of 0")):
        method = replace(SOUND, quantize_batch=lambda *given, result=result: result)
        with pytest.raises(PluginError, match=message):
            method.run_batch([torch.ones(2, 16)] * 2, [None, None], INT4, MethodOptions())
