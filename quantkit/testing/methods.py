"""The contract of methods: ``quantkit.quantization.methods.base``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable

import torch

from quantkit.formats.base import Codes
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import GRIDS, GROUP_SCALES, Granularity, QuantSpec
from quantkit.formats.trellis_code import RING
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions, options_type
from quantkit.quantization.methods.stored_scales import (
    rounded_scale,
)
from quantkit.quantization.recipe import default_format
from quantkit.testing.contract import Contract

CHANNEL = Granularity(strategy="channel")
TENSOR = Granularity(strategy="tensor")
GROUP = Granularity(strategy="group", size=16)
METHOD_SPECS = (
    *(QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity, scale_dtype="bfloat16")
      for bits, symmetric, granularity in itertools.product((4, 8), (True, False), (CHANNEL, GROUP))),
    QuantSpec(bits=8, granularity=TENSOR, scale_dtype="float16"),
    *(QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64), nested=nested,
                scale_dtype="float32") for nested in (False, True)),
    *(QuantSpec(kind="fp", bits=8, granularity=granularity, scale_dtype="bfloat16")
      for granularity in (TENSOR, CHANNEL)),
    *(QuantSpec(bits=bits, symmetric=False, minimum=True, granularity=GROUP, scale_dtype="bfloat16")
      for bits in (4, 8)),
    QuantSpec(bits=4, signed=True, granularity=GROUP, scale_dtype="float16"),
    QuantSpec(bits=4, symmetric=False, minimum=True, superblock=32, scale_bits=6, granularity=GROUP,
              scale_dtype="float16"),
    QuantSpec(bits=6, superblock=32, scale_bits=8, granularity=GROUP, scale_dtype="float16"),
    QuantSpec(kind="iq", bits=4, granularity=GROUP, scale_dtype="float16"),
    QuantSpec(kind="fp", bits=4, granularity=GROUP, scale_dtype="e4m3"),
    QuantSpec(kind="fp", bits=4, granularity=GROUP, scale_dtype="e8m0"),
    QuantSpec(kind="trellis", bits=3, window=10, granularity=CHANNEL, scale_dtype="bfloat16"))
"""What :func:`check_method` asks a method for, unless told otherwise."""
STATISTICS = ("hessian", "largest", "drift")
"""What a method may need."""
SHAPES = ((5, 96), (3, 128), (200, 48), (2, 32))
"""Besides those of 64 columns: more columns, more rows than columns, two groups a row."""
WITH_FORMAT = ("int", "nf", "fp", "trellis")
"""Grids whose standard format takes groups of any size."""
MARGIN = 1.05
"""Times the loss that ``quantize_batch`` may have: sums in another order decide some levels otherwise."""
SMALLEST_SCALE = 2.0**-23
"""The smallest scale of float16, with some room: in a table of levels without zero, zeros become one of its
levels."""
NOTHING = 1e-30
"""A squared error that no float32 weight notices: a trellis has no zero, but a tiny scale."""


def check_method(method: Method, specs: Iterable[QuantSpec] = METHOD_SPECS) -> None:
    """Run a method as quantkit would and check every promise of ``quantkit.quantization.methods.base``.

    For each spec that the method doesn't refuse, and for ordinary and awkward weights of several shapes: what
    every run checks, rounded scales, writing to no argument, no global random generator, the same result
    twice, and a result closer to the weight than zeros. Weights with NaN or infinity must be refused, an
    expert that no token reached must not, ``quick`` must be options, and ``quantize_batch`` must agree with
    ``quantize``.

    Args:
        method: the method, with default options.
        specs: the specs that it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec and the weight are named.
    """
    contract = Contract(f"method {getattr(method, 'name', method)!r}", "quantkit.quantization.methods.base")
    contract.must(isinstance(method, Method), f"it is a {type(method).__name__}, not a Method")
    options = _check_description(contract, method)
    taken = 0
    for spec in specs:
        if contract.reason(f"check({spec.label()})", method.reason_against, spec) is None:
            taken += 1
            _check_spec(contract.at(spec.label()), method, spec, options)
    contract.must(taken > 0, "it refuses every spec that it was asked for")


def _check_description(contract: Contract, method: Method) -> MethodOptions:
    """Check what a method says of itself; its default options."""
    contract.must(isinstance(method.paper, str) and method.paper.startswith(("https://", "http://")),
                  f"paper is {method.paper!r}; it must be a link")
    for name, known in (("needs", set(STATISTICS)), ("kinds", set(GRIDS))):
        values = getattr(method, name)
        contract.must(not isinstance(values, str) and set(values) <= known,
                      f"{name} is {values!r}; it must be a frozenset of {', '.join(sorted(known))}")
    kind = contract.call("options", options_type, method)
    unknown = set(method.quick) - set(kind.model_fields)
    contract.must(not unknown, f"quick names {', '.join(sorted(unknown))}, which is no option of it")
    options = contract.call("making its options with nothing given", kind)
    contract.call("making its options with what quick says", kind, **method.quick)
    return options


def _check_spec(contract: Contract, method: Method, spec: QuantSpec, options: MethodOptions) -> None:
    weights = method_weights(spec)
    for name, weight in weights.items():
        _check_run(contract.at(f"weight {name!r}"), method, spec, weight, options)
    weight = weights["normal"]
    if method.needs:
        unreached = contract.at("statistics of an expert that no token reached")
        stats = layer_stats(weight.shape[1], method.needs, tokens=0)
        result = unreached.call("quantize", method.run, weight, stats, spec, options)
        _check_closer_than_zeros(unreached, dequantized(unreached, result), weight)
    if method.quantize_batch is not None:
        _check_batch(contract, method, spec, options)
    stats = layer_stats(weight.shape[1], method.needs)
    if method.quick:
        contract.call("quantize with the options that quick says", method.run, weight, stats, spec,
                      method.options(**method.quick))
    for name, value in (("NaN", float("nan")), ("infinity", float("inf"))):
        spoiled = weight.clone()
        spoiled[0, 3] = value
        contract.check_refusal(f"quantize of a weight with {name}", method.run, spoiled, stats, spec, options,
                               accepted=f"it accepts a weight of {name}, which no engine can run",
                               remedy="raise SpecError, as quantkit.quantization.methods.grid.check_finite "
                                      "does")


def _check_run(contract: Contract, method: Method, spec: QuantSpec, weight: torch.Tensor,
               options: MethodOptions) -> None:
    """Run a method twice on one weight and check what it returns."""
    stats = layer_stats(weight.shape[1], method.needs)
    given = {name: tensor for name in STATISTICS if (tensor := getattr(stats, name, None)) is not None}
    results: list[Codes] = []

    def run() -> dict[str, object]:
        results.append(method.run(weight, stats, spec, options))
        return vars(results[-1])

    contract.pure("quantize", run, {"weight": weight, **given})
    result = results[0]
    for name, tensor in (("codes", result.codes), ("scale", result.scale)):
        contract.must(not tensor.requires_grad and not tensor.is_inference(),
                      f"{name} still requires a gradient or was made in inference mode",
                      "work under torch.no_grad()")
    contract.must(_is_rounded(result), f"scales are not rounded to {spec.scale_dtype}",
                  "round them before the levels are chosen, as quantkit.quantization.methods.grid"
                  ".find_grid does")
    if spec.kind != "iq" and not spec.signed and not (spec.superblock and spec.symmetric):
        contract.must(bool((result.scale >= 0).all() if spec.kind == "nf" else (result.scale > 0).all()),
                      "a scale is not above 0")
    values = dequantized(contract, result)
    contract.must(bool(torch.isfinite(values).all()), "a dequantized weight is not finite")
    _check_closer_than_zeros(contract, values, weight)


def _is_rounded(result: Codes) -> bool:
    """Whether scales and minima are what the spec says that is stored."""
    spec, outer = result.spec, result.outer
    if spec.scale_dtype in GROUP_SCALES:
        inner = result.scale if outer is None else result.scale / outer
        again = rounded_scale(inner, spec, torch.ones(1, 1))
        return bool(torch.allclose(again, inner, rtol=1e-6, atol=0))
    for values, number in ((result.scale, outer), (result.minimum, result.outer_minimum)):
        if values is None:
            continue
        stored = values if number is None else number
        if not torch.equal(stored, stored.to(FLOATS[spec.scale_dtype]).float()):
            return False
        if number is not None:
            counts = values / number.repeat_interleave(values.shape[1] // number.shape[1], dim=1)
            if not torch.equal(counts, counts.round()):
                return False
    return True


def _check_batch(contract: Contract, method: Method, spec: QuantSpec, options: MethodOptions) -> None:
    """``quantize_batch`` gives each weight what ``quantize`` would, in the same order."""
    normal = method_weights(spec)["normal"]
    weights = [normal, normal.flip(0) * 2, normal.flip(1)]
    stats = [layer_stats(normal.shape[1], method.needs, seed=seed) for seed in (1, 2, 3)]
    results = contract.call("quantize_batch", method.run_batch, weights, stats, spec, options)
    for number, (weight, known, result) in enumerate(zip(weights, stats, results)):
        alone = contract.call("quantize", method.run, weight, known, spec, options)
        losses = [_loss(dequantized(contract, codes) - weight, known) for codes in (result, alone)]
        contract.must(losses[0] <= MARGIN * losses[1] + 1e-12,
                      f"quantize_batch disagrees with quantize: weight {number} of {len(weights)} has a "
                      f"loss of {losses[0]:.3g}, alone {losses[1]:.3g}",
                      "return the results in the weights' order")


def dequantized(contract: Contract, codes: Codes) -> torch.Tensor:
    """float32 ``[out, in]``: what the standard format makes of the codes. Raises PluginError if it can't."""
    if codes.spec.grid not in WITH_FORMAT or codes.spec.signed:
        return dequantize(codes)
    layout = registry("formats").get(default_format(codes.spec))

    def stored() -> torch.Tensor:
        values: torch.Tensor = layout.dequantize(layout.pack(codes, FLOATS[codes.spec.scale_dtype]))
        return values

    return contract.call(f"packing its codes in {layout.name}", stored)


def _check_closer_than_zeros(contract: Contract, values: torch.Tensor, weight: torch.Tensor) -> None:
    tiny = float(weight.abs().max()) < SMALLEST_SCALE
    nothing = weight.numel() * SMALLEST_SCALE**2 if tiny else NOTHING
    contract.must(_squares(values - weight) <= _squares(weight) + nothing,
                  "zeros would be closer to the weight")


def _squares(values: torch.Tensor) -> float:
    return float(values.double().square().sum())


def _loss(error: torch.Tensor, stats: LayerStats | None) -> float:
    """``tr(E H Eᵀ)``; without a Hessian the sum of squares."""
    if stats is None or stats.hessian is None:
        return _squares(error)
    return float(((error @ stats.hessian) * error).double().sum())


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """float32 ``[rows, columns]``, as large as a model's."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def method_weights(spec: QuantSpec) -> dict[str, torch.Tensor]:
    """Ordinary and awkward weights by name, those that the standard format of ``spec`` holds."""
    normal = random_weight(12, 64)
    outlier = normal.clone()
    outlier[3, 5] = 50.0
    weights = {"normal": normal, "one row": normal[:1].clone(), "zeros": torch.zeros(4, 64),
               "outlier": outlier, "equal": torch.full((4, 64), 0.25), "denormal": normal * 1e-39,
               "all positive": normal.abs() + 0.01}
    weights |= {f"{rows} x {columns}": random_weight(rows, columns, rows) for rows, columns in SHAPES}
    multiple = RING if spec.kind == "trellis" else 1
    weights = {name: weight.repeat(multiple // math.gcd(len(weight), multiple), 1)
               for name, weight in weights.items() if len(weight) <= 64 or multiple == 1}
    return {name: weight for name, weight in weights.items()
            if _fits(spec, (weight.shape[0], weight.shape[1]))}


def _fits(spec: QuantSpec, shape: tuple[int, int]) -> bool:
    """Whether the standard format holds such a weight: others are refused before a method sees them."""
    if spec.grid not in WITH_FORMAT or spec.signed:  # formats for them fix the sizes of groups, too
        return shape[1] % (spec.superblock or spec.granularity.size or 1) == 0
    return registry("formats").get(default_format(spec)).reason_against(spec, shape) is None


def layer_stats(columns: int, needs: Collection[str], tokens: int = 256, seed: int = 1) -> LayerStats | None:
    """What calibration hands to a method with these ``needs``; zeros for ``tokens`` 0, as an expert has that
    no token reached; ``None`` for a method without needs."""
    if not needs:
        return None
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    x[:, ::7] *= 4
    hessian, largest = x.T @ x / max(tokens, 1), torch.zeros(columns)
    if tokens:
        largest = x.abs().amax(dim=0)
    # inputs that were a little larger in the original model
    drift = 0.05 * hessian
    return LayerStats(tokens, hessian if "hessian" in needs else None,
                      largest if "largest" in needs else None, drift=drift if "drift" in needs else None)
