"""The contract of methods: ``quantkit.methods.base``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from quantkit.errors import PluginError, QuantkitError
from quantkit.methods.base import LayerStats, Method
from quantkit.plugins import registry
from quantkit.recipe import default_format
from quantkit.spec import Granularity, QuantSpec

METHOD_SPECS = tuple(
    QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity, scale_dtype="bfloat16")
    for bits, symmetric, granularity in itertools.product(
        (4, 8), (True, False), (Granularity(strategy="channel"), Granularity(strategy="group", size=16)))
) + tuple(QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64), nested=nested,
                    scale_dtype="float32") for nested in (False, True)) + tuple(
    QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy=strategy), scale_dtype="bfloat16")
    for strategy in ("tensor", "channel")) + (
    QuantSpec(kind="trellis", bits=3, window=10, granularity=Granularity(strategy="channel"),
              scale_dtype="bfloat16"),)
"""What :func:`check_method` asks a method for, unless told otherwise."""


def check_method(method: Method, specs: Iterable[QuantSpec] = METHOD_SPECS) -> None:
    """Run a method as quantkit would and check every promise of ``quantkit.methods.base``.

    For each spec that the method doesn't refuse, and for ordinary and awkward weights: shapes and
    dtypes, finite and rounded scales, writing to no argument, leaving the global generator alone,
    the same result twice, and a result closer to the weight than nothing. NaN must be refused.

    Args:
        method: the method, with default options.
        specs: what it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec and the weight are named.
    """
    taken = [spec for spec in specs if method.refuses(spec) is None]
    if not taken:
        raise PluginError(f"method {method.name!r} refuses every spec that it was asked for")
    for spec in taken:
        rows = 64 if spec.kind == "trellis" else 1
        for name, weight in _method_weights(rows).items():
            _check_run(method, spec, weight, f"method {method.name!r} at {spec.label()}, weight {name!r}")
        weight = torch.full((64, 64), float("nan"))
        try:
            method.run(weight, _method_stats(), spec, method.options())
        except QuantkitError:
            continue
        raise PluginError(f"method {method.name!r} at {spec.label()} accepts a weight of NaN",
                          why="no engine can run this layer", next="raise quantkit.errors.SpecError")


def _method_weights(multiple: int) -> dict[str, torch.Tensor]:
    """Ordinary and awkward weights whose number of rows is a multiple of ``multiple``."""
    normal = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    outlier = normal.clone()
    outlier[3, 5] = 50.0
    weights = {"normal": normal, "one row": normal[:1].clone(), "zeros": torch.zeros(4, 64),
               "outlier": outlier, "equal": torch.full((4, 64), 0.25), "denormal": normal * 1e-39}
    return {name: weight.repeat(multiple // math.gcd(len(weight), multiple), 1)
            for name, weight in weights.items()}


def _method_stats() -> LayerStats:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    return LayerStats(256, x.T @ x / 256)


def _check_run(method: Method, spec: QuantSpec, weight: torch.Tensor, where: str) -> None:
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}", why="quantkit.methods.base says what a method promises")

    stats, fresh, before, random = _method_stats(), _method_stats(), weight.clone(), torch.get_rng_state()
    result = method.run(weight, stats, spec, method.options())
    assert stats.hessian is not None and fresh.hessian is not None
    must(torch.equal(weight, before) and torch.equal(stats.hessian, fresh.hessian),
         "it wrote to an argument")
    must(torch.equal(random, torch.get_rng_state()), "it used the global random generator")
    two = method.run(weight, stats, spec, method.options())
    must(torch.equal(result.codes, two.codes) and torch.equal(result.scale, two.scale), "two runs differ")
    must((result.zero is None) == (spec.symmetric or spec.kind != "int"),
         "zero points where the spec has none")
    must(result.zero is None or (result.zero.dtype == torch.uint8
                                 and result.zero.shape == result.scale.shape),
         "zero points must be uint8 of the scales' shape")
    dtype = getattr(torch, spec.scale_dtype)
    must(torch.equal(result.scale, result.scale.to(dtype).float()),
         f"scales are not rounded to {spec.scale_dtype}")
    must(spec.kind == "nf" or bool((result.scale > 0).all()), "a scale is not above 0")
    layout = registry("formats").get(default_format(spec))
    values = layout.dequantize(layout.pack(result, dtype))
    must(bool(torch.isfinite(values).all()), "a dequantized weight is not finite")
    must(float((values - weight).square().sum()) <= float(weight.square().sum()), "zeros would be closer")
