"""The contract of methods: ``quantkit.quantization.methods.base``."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable

from quantkit.formats.spec import GRIDS, Granularity, QuantSpec
from quantkit.quantization.methods.base import Method, MethodOptions
from quantkit.testing.contract import Contract, check_name, check_reason
from quantkit.testing.method_runs import (
    check_batch,
    check_equal_runs,
    check_run,
    check_statistics,
    check_threads,
)
from quantkit.testing.method_weights import layer_stats, method_weights
from quantkit.testing.watched import STATISTICS, watched_options

CHANNEL, TENSOR, GROUP = (Granularity(strategy="channel"), Granularity(strategy="tensor"),
                          Granularity(strategy="group", size=16))
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

PROMISES = "quantkit.quantization.methods.base"


def check_method(method: Method, specs: Iterable[QuantSpec] = METHOD_SPECS) -> None:
    """Run a method as quantkit would and check every promise of ``quantkit.quantization.methods.base``.

    For each spec that the method doesn't refuse, and for ordinary and awkward weights of several shapes:
    types, shapes and dtypes, finite and rounded scales, zero points in range, writing to no argument, no
    global random generator, the same result twice, after other weights, with other numbers of threads and of
    a weight with other strides, and a result closer to the weight than zeros. Weights with NaN or infinity
    must be refused. Statistics that are read must be declared in ``needs``, ``quick`` must be options, and
    ``quantize_batch`` must agree with ``quantize``.

    Args:
        method: the method, with default options.
        specs: what it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec and the weight are named.
    """
    specs = tuple(specs)
    contract = Contract(f"method {getattr(method, 'name', method)!r}", PROMISES)
    contract.must(isinstance(method, Method), f"it is a {type(method).__name__}, not a Method")
    options = _check_description(contract, method)
    taken = [spec for spec in specs
             if check_reason(contract, f"check({spec.label()})",
                             contract.call("check", method.refuses, spec)) is None]
    contract.must(bool(taken), "it refuses every spec that it was asked for")
    reads: set[str] = set()
    for spec in taken:
        _check_spec(contract.at(spec.label()), method, spec, watched_options(options, reads))
    check_threads(contract.at(taken[0].label()), method, taken[0], options)
    if specs == METHOD_SPECS:  # of a part of the specs a part of the options may be enough
        _check_reads(contract, method, taken, options, reads)


def _check_description(contract: Contract, method: Method) -> MethodOptions:
    """What a method says of itself; returns its default options."""
    check_name(contract, "methods", method, method.name)
    contract.must(isinstance(method.paper, str) and method.paper.startswith(("https://", "http://")),
                  f"paper is {method.paper!r}; it must be a link")
    contract.must(callable(method.quantize), "quantize is no function")
    contract.must(not isinstance(method.needs, str) and set(method.needs) <= set(STATISTICS),
                  f"needs is {method.needs!r}; it must be a frozenset of {' and '.join(STATISTICS)}")
    known = set(GRIDS)
    contract.must(not isinstance(method.kinds, str) and set() < set(method.kinds) <= known,
                  f"kinds is {method.kinds!r}; it must be a frozenset of {', '.join(sorted(known))}")
    contract.must(isinstance(method.options, type) and issubclass(method.options, MethodOptions),
                  "options is no subclass of MethodOptions")
    options = contract.call("making its options with nothing given", method.options)
    values = {name: getattr(options, name) for name in method.options.model_fields}
    again = contract.call("validating the default options", method.options, **values)
    contract.must(again == options, "its default options don't stay as they are when they are validated")
    unknown = set(method.quick) - set(values)
    contract.must(not unknown, f"quick names {', '.join(sorted(unknown))}, which is no option of it")
    contract.call("making its options with what quick says", method.options, **method.quick)
    return options


def _check_spec(contract: Contract, method: Method, spec: QuantSpec, options: MethodOptions) -> None:
    for name, weight in method_weights(spec).items():
        check_run(contract.at(f"weight {name!r}"), method, spec, weight, options)
    weight = method_weights(spec)["normal"]
    check_statistics(contract, method, spec, weight, options)
    check_equal_runs(contract, method, spec, weight, options)
    if method.quantize_batch is not None:
        check_batch(contract, method, spec, options)
    if method.quick:
        contract.call("quantize with the options that quick says", method.run, weight,
                      layer_stats(weight.shape[1], method.needs), spec, method.options(**method.quick))
    for name, value in (("NaN", float("nan")), ("infinity", float("inf"))):
        spoiled = weight.clone()
        spoiled[0, 3] = value
        contract.refuses(f"quantize of a weight with {name}", method.run, spoiled,
                         layer_stats(weight.shape[1], method.needs), spec, options,
                         accepted=f"it accepts a weight of {name}, which no engine can run",
                         remedy="raise SpecError, as quantkit.quantization.methods.grid.require_finite does")


def _check_reads(contract: Contract, method: Method, specs: list[QuantSpec], options: MethodOptions,
                 reads: set[str]) -> None:
    """An option that is never read changes nothing. Some are read only where another one says so: these are
    tried with each of their values."""
    values = dict(options)
    for name, field in method.options.model_fields.items():
        if set(values) <= reads:
            return
        choices: tuple[object, ...] = (True, False) if field.annotation is bool else ()
        if typing.get_origin(field.annotation) is typing.Literal:
            choices = typing.get_args(field.annotation)
        for choice, spec in itertools.product(choices, specs):
            watched = watched_options(method.options(**{**values, name: choice}), reads)
            weight = method_weights(spec)["normal"]
            contract.call(f"quantize with {name}={choice!r}", method.run, weight,
                          layer_stats(weight.shape[1], method.needs), spec, watched)
    unread = sorted(set(values) - reads)
    contract.must(not unread, f"it never reads its option {', '.join(unread)}",
                  "use it in quantize, or take it out of the options")
