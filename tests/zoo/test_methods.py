"""Broken methods, each a correct one with one fault, and what ``check_method`` says of each."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace
from typing import Literal

import pytest
import torch

from quantkit.formats.base import Codes
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import Method, MethodOptions
from quantkit.quantization.methods.gptq import METHOD as GPTQ
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import PluginError
from quantkit.testing import METHOD_SPECS, check_method

INT4 = QuantSpec(bits=4, granularity=Granularity(strategy="channel"), scale_dtype="bfloat16")


class Unread(MethodOptions):
    strength: float = 0.5


class BadDefault(MethodOptions):
    width: Literal["narrow", "wide"] = "broad"


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


def draws_python(codes, weight):
    random.random()
    return codes


def writes(codes, weight):
    weight.mul_(0.5)
    return codes


def writes_stats(weight, stats, spec, options):
    stats.hessian.diagonal().add_(1)
    return rounded(weight, stats, spec, options)


def reads_hessian(weight, stats, spec, options):
    return rounded(weight * (stats.hessian.diagonal().mean() > 0), stats, spec, options)


def reads_largest(weight, stats, spec, options):
    assert stats.hessian is not None
    return rounded(weight if stats.largest is None else weight * 1.0, stats, spec, options)


def careless(weight, stats, spec, options):
    return rounded(weight.nan_to_num(), stats, spec, options)


def asserts(weight, stats, spec, options):
    assert torch.isfinite(weight).all(), "not finite"
    return rounded(weight, stats, spec, options)


def seeded(weight, stats, spec, options):
    codes = rounded(weight, stats, spec, options)
    return replace(codes, notes=(f"seed {torch.initial_seed()}",))


def threaded(weight, stats, spec, options):
    return replace(rounded(weight, stats, spec, options), notes=(f"{torch.get_num_threads()} threads",))


def strided(weight, stats, spec, options):
    return replace(rounded(weight, stats, spec, options), notes=(str(weight.stride()),))


def counting():
    count = itertools.count()
    return changed(lambda codes, weight: replace(codes, notes=(f"call {next(count)}",)))


def remembering():
    """The first weight of a shape decides what all others of that shape become."""
    seen = {}

    def change(codes, weight):
        return seen.setdefault((tuple(weight.shape), codes.spec), codes)

    return changed(change)


def last_weight():
    """What a call returns depends on the call before it."""
    largest = [0.0, 0.0]

    def change(codes, weight):
        peak = float(weight.abs().max())
        if peak != largest[1]:
            largest[:] = [largest[1], peak]
        return replace(codes, notes=(str(largest[0]),))

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
    "returns None": (replace(SOUND, quantize=lambda *given: None), "returned None"),
    "returns a tuple": (replace(SOUND, quantize=mutable), "a tuple in place of Codes"),
    "returns a tensor": (changed(lambda codes, weight: codes.codes), "a Tensor in place of Codes"),
    "returns a packed weight": (replace(SOUND, quantize=packs), "a QuantizedTensor in place of Codes"),
    "scales of float64": (with_codes(scale=lambda c: c.scale.double()), "scales float64"),
    "scales not rounded": (with_codes(scale=lambda c: c.scale * 1.0001), "not rounded to bfloat16"),
    "scales below 0": (with_codes(scale=lambda c: -c.scale), "not above 0"),
    "scales of 0": (with_codes(scale=lambda c: c.scale * 0), "not above 0"),
    "scales NaN": (with_codes(scale=lambda c: c.scale * float("nan")), "scale that is not finite"),
    "scales of another shape": (with_codes(scale=lambda c: c.scale.reshape(-1)), "scales float32 of shape"),
    "scales that require a gradient": (replace(SOUND, quantize=differentiable), "requires a gradient"),
    "inference tensors": (replace(SOUND, quantize=inferred), "inference mode"),
    "codes of int32": (with_codes(codes=lambda c: c.codes.int()), "codes int32"),
    "codes transposed": (with_codes(codes=lambda c: c.codes.T), "codes uint8 of shape"),
    "codes above the range": (with_codes(codes=lambda c: c.codes | 128), "code above 15"),
    "codes in another order of memory": (
        with_codes(codes=lambda c: c.codes.T.contiguous().T), "codes is not contiguous"),
    "codes upside down": (with_codes(codes=lambda c: 2**c.spec.bits - 1 - c.codes), "zeros would be closer"),
    "no zero points": (with_codes(zero=lambda c: None), "returned no zero points"),
    "zero points above the range": (with_codes(zero=lambda c: None if c.zero is None else c.zero + 16),
                                    "zero point above 15"),
    "zero points where there are none": (with_codes(zero=lambda c: c.scale.to(torch.uint8)),
                                         "zero points where the spec has none"),
    "another spec": (with_codes(spec=lambda c: c.spec.model_copy(update={"scale_dtype": "float32"})),
                     "codes of another spec"),
    "notes in a list": (with_codes(notes=lambda c: ["rounded"]), "no tuple of strings"),
    "a note that is a number": (with_codes(notes=lambda c: (3,)), "no tuple of strings"),
    "draws from torch": (changed(draws), "global random generator"),
    "draws from Python": (changed(draws_python), "global random generator"),
    "depends on the seed": (replace(SOUND, quantize=seeded), "depends on the global random generator"),
    "depends on threads": (replace(SOUND, quantize=threaded), "depends on the number of threads"),
    "depends on strides": (replace(SOUND, quantize=strided), "not contiguous gives another result"),
    "counts its calls": (counting(), "two runs differ"),
    "depends on the last call": (last_weight(), "depends on earlier calls"),
    "returns what it returned before": (remembering(), "zeros would be closer"),
    "writes to the weight": (changed(writes), "wrote to an argument"),
    "writes to the statistics": (replace(SOUND, quantize=writes_stats, needs=frozenset({"hessian"})),
                                 "wrote to an argument"),
    "reads the Hessian": (replace(SOUND, quantize=reads_hessian), "hessian"),
    "reads the largest inputs": (replace(SOUND, quantize=reads_largest, needs=frozenset({"hessian"})),
                                 "reads stats.largest without declaring it in needs"),
    "needs what there isn't": (replace(SOUND, needs=frozenset({"hessain"})), "needs is"),
    "needs a string": (replace(SOUND, needs="hessian"), "needs is 'hessian'"),
    "fails for an expert without tokens": (replace(SOUND, quantize=inverts, needs=frozenset({"hessian"})),
                                           "no token reached: quantize raises"),
    "takes one width": (replace(SOUND, quantize=one_width), "weight '(5 x 96|200 x 48|2 x 32)'"),
    "accepts NaN": (replace(SOUND, quantize=careless), "accepts a weight of NaN"),
    "asserts": (replace(SOUND, quantize=asserts), "raises AssertionError: not finite"),
    "an unread option": (replace(SOUND, options=Unread), "never reads its option strength"),
    "a default that isn't valid": (replace(SOUND, options=BadDefault), "default options raises"),
    "an option without a default": (replace(SOUND, options=Required), "with nothing given raises"),
    "options of another type": (replace(SOUND, options=dict), "no subclass of MethodOptions"),
    "quick names another option": (replace(SOUND, quick={"steps": 1}), "quick names steps"),
    "quantize_batch turns the order": (replace(SOUND, quantize_batch=backwards),
                                       "quantize_batch disagrees with quantize"),
    "quantize_batch returns a tuple": (replace(SOUND, quantize_batch=lambda *given: ()),
                                       "quantize_batch returned a tuple"),
    "no name": (replace(SOUND, name=""), "its name is ''"),
    "no paper": (replace(SOUND, paper=""), "paper is ''"),
    "refuses everything": (replace(SOUND, check=lambda spec: "no"), "refuses every spec"),
    "refuses with True": (replace(SOUND, check=lambda spec: True), "must be the reason as a sentence"),
    "kinds that don't exist": (replace(SOUND, kinds=frozenset({"integer"})), "kinds is"),
    "no method": ("rtn", "it is a str, not a Method"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", ZOO)
def test_the_kit_notices(fault: str) -> None:
    method, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_method(method)


@pytest.mark.parametrize("method", [SOUND, replace(GPTQ, name="renamed", paper="https://example.org")],
                         ids=["sound", "gptq"])
def test_a_sound_method_passes(method: Method) -> None:
    check_method(method, METHOD_SPECS if method is SOUND else [INT4])


def test_the_remedy_for_undeclared_statistics() -> None:
    with pytest.raises(PluginError, match=r"reads stats.hessian without declaring") as caught:
        check_method(replace(SOUND, quantize=lambda weight, stats, spec, options: rounded(
            weight, stats if stats is None else stats.hessian, spec, options)))
    assert caught.value.next == "add it: needs=frozenset({'hessian'})"


def test_a_name_that_is_not_the_registered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = registry("methods")
    method = replace(SOUND, name="other")
    monkeypatch.setitem(table._loaded, "rtn", method)
    with pytest.raises(PluginError, match="registered as 'rtn'"):
        check_method(method)
    assert isinstance(rounded(torch.ones(1, 4), None, INT4, RtnOptions()), Codes)
