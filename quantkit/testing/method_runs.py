"""One run of a method and what must not change it; see :func:`~quantkit.testing.methods.check_method`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from quantkit.formats.base import TENSORS, Codes
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import GROUP_SCALES, QuantSpec
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.base import LayerStats, Method, MethodOptions
from quantkit.quantization.methods.grid import rounded_scale
from quantkit.quantization.recipe import default_format
from quantkit.testing.contract import Contract, global_generators, same_bits, threads
from quantkit.testing.method_weights import WITH_FORMAT, layer_stats, method_weights
from quantkit.testing.watched import STATISTICS, WatchedStats

MARGIN = 1.05
"""Times the loss that ``quantize_batch`` may have: sums in another order decide some levels otherwise."""

SMALLEST_SCALE = 2.0**-23
"""Of float16, with some room: a table of levels may have no zero, so that zeros become one of its levels."""
NOTHING = 1e-30
"""A squared error that no float32 weight notices: a trellis has no zero, but a tiny scale."""


def check_run(contract: Contract, method: Method, spec: QuantSpec, weight: torch.Tensor,
              options: MethodOptions) -> None:
    """Run a method on one weight and check what it returns."""
    stats, before = layer_stats(weight.shape[1], method.needs), weight.clone()
    fresh = layer_stats(weight.shape[1], method.needs)
    with global_generators(contract):
        result = contract.call("quantize", method.run, weight, stats, spec, options)
    contract.must(same_bits(weight, before) and _same_stats(stats, fresh), "it wrote to an argument",
                  "work on weight.clone()")
    _check_tensors(contract, result)
    contract.must(_rounded(result), f"scales are not rounded to {spec.scale_dtype}",
                  "round them before the levels are chosen, as quantkit.quantization.methods.grid"
                  ".find_grid does")
    if spec.kind != "iq" and not spec.signed and not (spec.superblock and spec.symmetric):
        contract.must(bool((result.scale >= 0).all() if spec.kind == "nf" else (result.scale > 0).all()),
                      "a scale is not above 0")
    values = dequantized(contract, result)
    contract.must(bool(torch.isfinite(values).all()), "a dequantized weight is not finite")
    _must_be_closer_than_zeros(contract, values, weight)


def _rounded(result: Codes) -> bool:
    """Whether scales and minima are what the spec says that is stored."""
    spec, outer = result.spec, result.outer
    if spec.scale_dtype in GROUP_SCALES:
        inner = result.scale if outer is None else result.scale / outer
        again = rounded_scale(inner, spec, torch.ones(1, 1))
        return bool(torch.allclose(again, inner, rtol=1e-6, atol=0))
    pairs = [(result.scale, outer), (result.minimum, result.outer_minimum)]
    for values, number in pairs:
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


def _check_tensors(contract: Contract, result: Codes) -> None:
    for name in TENSORS:
        tensor = getattr(result, name)
        if tensor is not None:
            contract.must(not tensor.requires_grad, f"{name} still requires a gradient",
                          "return tensor.detach(), or work under torch.no_grad()")
            contract.must(not tensor.is_inference(), f"{name} was made in inference mode: nothing can write "
                          "to it outside of it", "use torch.no_grad() in place of torch.inference_mode()")
            contract.must(tensor.is_contiguous(), f"{name} is not contiguous", "return tensor.contiguous()")


def check_statistics(contract: Contract, method: Method, spec: QuantSpec, weight: torch.Tensor,
                     options: MethodOptions) -> None:
    """A method reads the statistics that it declares and no other; and it can do without any tokens."""
    full = layer_stats(weight.shape[1], STATISTICS)
    assert full is not None
    watched = WatchedStats(full)
    with contextlib.suppress(Exception):  # a run with what it declares shows the error itself
        method.quantize(weight, watched, spec, options)
    undeclared = sorted(watched.reads - set(method.needs))
    names = " and ".join(f"stats.{name}" for name in undeclared)
    needs = ", ".join(repr(name) for name in sorted({*method.needs, *undeclared}))
    contract.must(not undeclared, f"it reads {names} without declaring it in needs",
                  f"add it: needs=frozenset({{{needs}}})")
    if method.needs:
        empty = layer_stats(weight.shape[1], method.needs, tokens=0)
        unreached = contract.at("statistics of an expert that no token reached")
        result = unreached.call("quantize", method.run, weight, empty, spec, options)
        values = dequantized(unreached, result)
        _must_be_closer_than_zeros(unreached, values, weight)


def check_equal_runs(contract: Contract, method: Method, spec: QuantSpec, weight: torch.Tensor,
                     options: MethodOptions) -> None:
    """The same result after other weights, with another seed and with other strides."""
    def run(weight: torch.Tensor = weight) -> Codes:
        return contract.call("quantize", method.run, weight, layer_stats(weight.shape[1], method.needs), spec,
                             options)

    before, attributes = run(), vars(method).copy()
    contract.must(same_codes(run(), before), "two runs differ")
    run(weight.flip(0) * 3)
    strided = torch.empty(weight.shape[1], weight.shape[0]).T.copy_(weight)
    with _other_seed():
        again = run(strided)
    contract.must(vars(method) == attributes, "a run changes the method itself")
    if same_codes(again, before):
        return
    contract.must(same_codes(run(), before), "its result depends on earlier calls",
                  "keep nothing between calls")
    with _other_seed():
        contract.must(same_codes(run(), before), "its result depends on the global random generator")
    raise contract.error("a weight that is not contiguous gives another result")


def check_threads(contract: Contract, method: Method, spec: QuantSpec, options: MethodOptions) -> None:
    """The same result with one and with two threads, of a weight so small that torch uses one anyway."""
    weight, results = method_weights(spec)["one row"], []
    for count in (1, 2):
        with threads(count):
            results.append(contract.call("quantize", method.run, weight,
                                         layer_stats(weight.shape[1], method.needs), spec, options))
    contract.must(same_codes(*results), "its result depends on the number of threads")


@contextlib.contextmanager
def _other_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        yield


def check_batch(contract: Contract, method: Method, spec: QuantSpec, options: MethodOptions) -> None:
    """``quantize_batch`` gives each weight what ``quantize`` would, in the same order."""
    normal = method_weights(spec)["normal"]
    weights = [normal, normal.flip(0) * 2, normal.flip(1)]
    stats = [layer_stats(normal.shape[1], method.needs, seed=seed) for seed in (1, 2, 3)]
    results = contract.call("quantize_batch", method.run_batch, weights, stats, spec, options)
    for number, (weight, known, result) in enumerate(zip(weights, stats, results)):
        alone = contract.call("quantize", method.run, weight, known, spec, options)
        losses = [_loss(dequantized(contract, codes) - weight, known) for codes in (result, alone)]
        contract.must(losses[0] <= MARGIN * losses[1] + 1e-12,
                      f"quantize_batch disagrees with quantize: weight {number} of {len(weights)} has a loss "
                      f"of {losses[0]:.3g}, alone {losses[1]:.3g}",
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


def same_codes(first: Codes, second: Codes) -> bool:
    """Equal to the last bit, notes included."""
    tensors = [(first.codes, second.codes), (first.scale, second.scale)]
    if first.zero is not None and second.zero is not None:
        tensors.append((first.zero, second.zero))
    return (first.zero is None) == (second.zero is None) and first.notes == second.notes and all(
        same_bits(*pair) for pair in tensors)


def _same_stats(first: LayerStats | None, second: LayerStats | None) -> bool:
    if first is None or second is None:
        return first is second
    pairs = [(getattr(first, name), getattr(second, name)) for name in STATISTICS]
    return all(one_side is None if other is None else same_bits(one_side, other) for one_side, other in pairs)


def _must_be_closer_than_zeros(contract: Contract, values: torch.Tensor, weight: torch.Tensor) -> None:
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
