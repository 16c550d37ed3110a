"""The contract of formats: ``quantkit.formats.base``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from quantkit.formats import e4m3, trellis_code
from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, plain_name, resolve
from quantkit.formats.level_values import codebook, level_table
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.packing import layout, reason_against_packed, reason_against_weight
from quantkit.quantization.methods.random_codes import random_codes as random_codes_from
from quantkit.testing.contract import Contract, same, same_bits

_CHANNEL, _TENSOR = Granularity(strategy="channel"), Granularity(strategy="tensor")
FORMAT_SPECS = (
    *(QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity)
      for bits, symmetric, granularity in itertools.product(
          (2, 3, 4, 8), (True, False), (_CHANNEL, *(Granularity(strategy="group", size=size)
                                                    for size in (16, 32))))),
    *(QuantSpec(bits=bits, granularity=_CHANNEL) for bits in (5, 6, 7)),
    QuantSpec(bits=8, granularity=_TENSOR),
    *(QuantSpec(bits=8, granularity=granularity, activations="token") for granularity in (_CHANNEL, _TENSOR)),
    *(QuantSpec(kind="fp", bits=8, granularity=granularity) for granularity in (_CHANNEL, _TENSOR)),
    *(QuantSpec(kind="fp", bits=8, granularity=granularity, activations="token")
      for granularity in (_CHANNEL, _TENSOR)),
    *(QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=size), nested=nested,
                scale_dtype="float32") for size, nested in itertools.product((32, 64), (False, True))),
    *(QuantSpec(bits=bits, symmetric=False, minimum=True, granularity=Granularity(strategy="group", size=32))
      for bits in (2, 4, 8)),
    *(QuantSpec(bits=bits, signed=True, granularity=Granularity(strategy="group", size=32))
      for bits in (4, 5, 8)),
    QuantSpec(bits=5, symmetric=False, minimum=True, granularity=Granularity(strategy="group", size=32)),
    *(QuantSpec(bits=bits, symmetric=False, minimum=True, superblock=256, scale_bits=6,
                granularity=Granularity(strategy="group", size=32)) for bits in (4, 5)),
    QuantSpec(bits=6, superblock=256, scale_bits=8, granularity=Granularity(strategy="group", size=16)),
    QuantSpec(kind="iq", bits=4, granularity=Granularity(strategy="group", size=32)),
    QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=16), scale_dtype="e4m3"),
    QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=32), scale_dtype="e8m0"),
    QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=16), scale_dtype="e4m3",
              activations="group"),
    QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy="tile", size=128)),
    QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy="tile", size=32), activations="group"),
    *(QuantSpec(kind="trellis", bits=bits, window=window, granularity=_CHANNEL)
      for bits in (2, 3, 4) for window in (8, 12)))
"""What :func:`check_format` asks a format for."""
SHAPES = ((1, 64), (7, 37), (33, 96), (64, 64), (128, 48), (16, 1), (5, 512))
LAST_BITS = 2.0**-22
"""The part of a scale that may be lost: two roundings of float32."""
NESTED = 0.05
"""The part of the largest of nested scales that 8 bits may cost."""


def check_format(form: Format, specs: Iterable[QuantSpec] = FORMAT_SPECS) -> None:
    """Pack and unpack random codes of every spec and shape that a format doesn't refuse, in models of three
    dtypes, and check what ``quantkit.formats.base`` promises: stored tensors as ``layout`` says, byte for
    byte; ``unpack`` as the inverse of ``pack``; ``dequantize`` equal to the formula of ``Codes`` in memory of
    its own; ``rows`` equal to its rows; nothing written to. What it refuses, it must refuse to pack.

    Args:
        specs: the specs that it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec, the shape and the dtype are named.
    """
    contract = Contract(f"format {getattr(form, 'name', form)!r}", "quantkit.formats.base")
    contract.must(isinstance(form, Format) and not isinstance(form, type),
                  "it is no Format: an instance with name, quant_method, reason_against, layout, pack, "
                  "unpack and dequantize")
    taken = 0
    for spec, shape, dtype in itertools.product(specs, SHAPES, FLOATS.values()):
        wanted = resolve(spec, dtype, form)
        case = contract.at(f"{wanted.label()} of {list(shape)} in {plain_name(dtype)}")
        reason = case.reason("reason_against", form.reason_against, wanted, shape)
        size = spec.superblock or spec.granularity.size
        if size and spec.granularity.strategy == "group" and shape[1] % size:
            case.must(reason is not None, f"it takes {shape[1]} columns in groups of {size}, which don't fit",
                      "refuse it with the sizes that do")
        elif reason is None:
            taken += 1
            _check_packing(case, form, random_codes(wanted, shape), dtype)
        else:
            case.check_refusal("pack of a refused weight", form.pack, random_codes(wanted, shape), dtype,
                               accepted=f"pack takes what reason_against doesn't: {reason}",
                               remedy="raise SpecError in layout and pack: quantkit.formats.fit.check_fit")
    contract.must(taken > 0, "it refuses everything that it was asked for")


def _check_packing(case: Contract, form: Format, codes: Codes, dtype: torch.dtype) -> None:
    shape = (codes.codes.shape[0], codes.codes.shape[1])
    case.call("layout", layout, form, codes.spec, shape, dtype)
    before = codes.mapped(torch.Tensor.clone)
    packed = case.call("pack", form.pack, codes, dtype)
    case.must(same(vars(codes), vars(before)), "pack wrote to the codes")
    case.must_not(reason_against_packed(form, packed, codes, dtype))
    case.must(packed.spec == codes.spec, f"pack returned another spec, {packed.spec.label()}")
    stored = {suffix: tensor.clone() for suffix, tensor in packed.tensors.items()}
    back = case.call("unpack", form.unpack, packed)
    _check_inverse(case, codes, back)
    _check_values(case, form, packed, back)
    case.must(same(stored, packed.tensors), "reading a weight writes to its stored tensors")
    again = case.call("pack of what was unpacked", form.pack, back, dtype)
    case.must(codes.spec.nested or same(stored, again.tensors), "packing what was unpacked stores other bits")


def _check_inverse(case: Contract, codes: Codes, back: object) -> None:
    if not isinstance(back, Codes):
        raise case.error(f"unpack returned a {type(back).__name__}, not Codes")
    case.must(back.spec == codes.spec, f"unpack returned another spec, {back.spec.label()}")
    fault = back.fault((codes.codes.shape[0], codes.codes.shape[1]))
    case.must_not(fault and f"unpack returned codes that can't be right: {fault}")
    case.must(torch.equal(back.codes, codes.codes), "unpack returned other codes than those that were packed")
    case.must(same(back.zero, codes.zero), "unpack returned other zero points than those that were packed")
    limit = NESTED * codes.scale.max() if codes.spec.nested else LAST_BITS * codes.scale.abs()
    case.must(bool(((back.scale - codes.scale).abs() <= limit).all()),
              "unpack returned other scales than those that were packed")


def _check_values(case: Contract, form: Format, packed: QuantizedTensor, back: Codes) -> None:
    values = case.call("dequantize", form.dequantize, packed)
    case.must_not(reason_against_weight(packed, values))
    case.must(bool(torch.isfinite(values).all()), "dequantize returned a value that is not finite")
    expected = formula(back)
    case.must(bool(((values - expected).abs() <= LAST_BITS * expected.abs()).all()),
              "dequantize disagrees with the formula of Codes",
              "see quantkit.formats.base.Codes: w = (codes - zero) * scale")
    if (rows := getattr(form, "rows", None)) is not None:
        last = packed.shape[0] - 1
        for ids in ([0], [last, 0, last // 2, last], list(range(last + 1))):
            part = case.call("rows", rows, packed, torch.tensor(ids))
            case.must(isinstance(part, torch.Tensor) and same_bits(part, values[ids]),
                      f"rows disagrees with dequantize at {ids[:4]}")


def random_codes(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> Codes:
    """:func:`quantkit.quantization.methods.random_codes.random_codes` on a CPU."""
    return random_codes_from(spec, shape, torch.Generator().manual_seed(seed))


def formula(codes: Codes) -> torch.Tensor:
    """float32 ``[out, in]``: what :class:`~quantkit.formats.base.Codes` says that they mean, worked out apart
    from every format."""
    spec, shape = codes.spec, codes.codes.shape
    if spec.kind == "nf":
        size = spec.granularity.size or 1
        scale = codes.scale.repeat_interleave(size)[:codes.codes.numel()].reshape(shape)
        return codebook()[codes.codes.long()] * scale
    if spec.kind == "trellis":
        assert spec.window is not None
        return trellis_code.decode(codes.codes, spec.bits, spec.window) * codes.scale
    if spec.granularity.strategy == "tile":
        size = spec.granularity.size or 1
        squares = torch.arange(shape[0])[:, None] // size, torch.arange(shape[1])[None] // size
        return e4m3.decode(codes.codes) * codes.scale[squares]
    columns = shape[1] // codes.scale.shape[1]
    if (table := level_table(spec)) is not None:
        return torch.tensor(table)[codes.codes.long()] * codes.scale.repeat_interleave(columns, dim=1)
    if spec.kind == "fp":
        return e4m3.decode(codes.codes) * codes.scale
    if codes.minimum is not None:
        steps = codes.codes.float() * codes.scale.repeat_interleave(columns, dim=1)
        return steps + codes.minimum.repeat_interleave(columns, dim=1)
    zero: torch.Tensor | int = 2 ** (spec.bits - 1)
    if codes.zero is not None:
        zero = codes.zero.float().repeat_interleave(columns, dim=1)
    return (codes.codes.float() - zero) * codes.scale.repeat_interleave(columns, dim=1)
