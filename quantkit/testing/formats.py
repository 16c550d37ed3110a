"""The contract of formats: ``quantkit.formats.base``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load, save

from quantkit.formats.base import TENSORS, Codes, Format, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, plain_name, resolve
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops.packing import packed_fault, weight_fault
from quantkit.testing.codes import formula, random_codes
from quantkit.testing.contract import Contract, check_name, check_reason, same_bits, same_tensors

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
    *(QuantSpec(kind="trellis", bits=bits, window=12, granularity=_CHANNEL) for bits in (2, 3, 4)))
"""What :func:`check_format` asks a format for."""
SHAPES = ((1, 64), (7, 37), (33, 96), (64, 64), (128, 48), (16, 1), (5, 512))
LAST_BITS = 2.0**-22
"""What may be lost of a scale relative to it: two roundings of float32."""
NESTED = 0.05
"""What 8 bits may cost of nested scales, relative to the largest."""


def check_format(form: Format, specs: Iterable[QuantSpec] = FORMAT_SPECS) -> None:
    """Pack and unpack random codes of every spec and shape that a format doesn't refuse, in models of three
    dtypes, and check what ``quantkit.formats.base`` promises: stored tensors as ``layout`` says, byte for
    byte; ``unpack`` as the inverse of ``pack``; ``dequantize`` equal to the formula of ``Codes`` in memory of
    its own; ``rows`` equal to its rows; nothing written to, nothing kept; the same after tensors were saved
    and loaded. What it refuses, it must refuse to pack.

    Args:
        form: the format.
        specs: what it is asked for; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the spec, the shape and the dtype are named.
    """
    contract = Contract(f"format {getattr(form, 'name', form)!r}", "quantkit.formats.base")
    _check_attributes(contract, form)
    taken = 0
    for spec, shape, dtype in itertools.product(specs, SHAPES, FLOATS.values()):
        wanted = resolve(spec, dtype, form)
        case = contract.at(f"{wanted.label()} of {list(shape)} in {plain_name(dtype)}")
        reason = check_reason(case, "refuses", case.call("refuses", form.refuses, wanted, shape))
        size = spec.superblock or spec.granularity.size
        if size and spec.granularity.strategy == "group" and shape[1] % size:
            case.must(reason is not None, f"it takes {shape[1]} columns in groups of {size}, which don't fit",
                      "refuse it with the sizes that do")
        elif reason is None:
            taken += 1
            _check_packing(case, form, random_codes(wanted, shape), dtype)
        else:
            case.refuses("pack of a refused weight", form.pack, random_codes(wanted, shape), dtype,
                         accepted=f"pack takes what refuses doesn't: {reason}",
                         remedy="raise SpecError in layout and pack: quantkit.formats.fit.require_fit")
    contract.must(bool(taken), "it refuses everything that it was asked for")
    empty = [check_reason(contract, "refuses", contract.call("refuses", form.refuses, spec, (0, 64)))
             for spec in specs]
    contract.must(all(empty), "it takes a weight without rows", "refuse it")


def _check_attributes(contract: Contract, form: Format) -> None:
    contract.must(isinstance(form, Format) and not isinstance(form, type),
                  "it is no Format: an instance with name, quant_method, refuses, layout, pack, unpack and "
                  "dequantize")
    check_name(contract, "formats", form, form.name)
    contract.must(isinstance(form.quant_method, str) and form.quant_method != "",
                  f"quant_method is {form.quant_method!r}; without a standard it is 'quantkit'")
    scales = getattr(form, "scales", None)
    contract.must(scales is None or scales in FLOATS, f"scales is {scales!r}, not one of {', '.join(FLOATS)}")
    contract.must(isinstance(getattr(form, "alone", False), bool), "alone is neither True nor False")


def _check_packing(case: Contract, form: Format, codes: Codes, dtype: torch.dtype) -> None:
    shape = (codes.codes.shape[0], codes.codes.shape[1])
    _check_layout(case, form, codes.spec, shape, dtype)
    before, kept = _copied(codes), _attributes(form)
    packed = case.call("pack", form.pack, codes, dtype)
    case.must(_equal(codes, before), "pack wrote to the codes")
    fault = packed_fault(form, packed, codes, dtype)
    case.must(fault is None, fault or "")
    case.must(packed.spec == codes.spec, f"pack returned another spec, {packed.spec.label()}")
    for suffix, tensor in packed.tensors.items():
        case.must(tensor.is_contiguous(), f"{suffix} is not contiguous: it can't be saved")
    stored = {suffix: tensor.clone() for suffix, tensor in packed.tensors.items()}
    case.must(same_tensors(stored, case.call("pack", form.pack, codes, dtype).tensors),
              "pack gives something else the second time")
    back = case.call("unpack", form.unpack, packed)
    _check_inverse(case, codes, back)
    case.must(same_tensors(stored, case.call("pack of what was unpacked", form.pack, back, dtype).tensors)
              or codes.spec.nested, "packing what was unpacked stores other bits")
    _check_values(case, form, packed, back)
    other = random_codes(codes.spec, shape, seed=1)
    case.call("pack", form.pack, other, dtype)
    case.must(_equal(case.call("unpack", form.unpack, packed), back) and _attributes(form) == kept,
              "it keeps something between calls")
    case.must(same_tensors(stored, packed.tensors), "reading a weight writes to its stored tensors")
    _check_saved(case, form, packed, back)


def _check_layout(case: Contract, form: Format, spec: QuantSpec, shape: tuple[int, int],
                  dtype: torch.dtype) -> None:
    layout: Any = case.call("layout", form.layout, spec, shape, dtype)
    case.must(isinstance(layout, dict) and all(
        isinstance(suffix, str) and isinstance(entry, tuple) and len(entry) == 2
        and isinstance(entry[0], torch.dtype) and isinstance(entry[1], tuple)
        and all(isinstance(size, int) for size in entry[1]) for suffix, entry in layout.items()),
        "layout must return {suffix: (dtype, shape)}")
    case.must(all(suffix and "/" not in suffix and suffix == suffix.strip() for suffix in layout),
              "a suffix is no name")


def _check_inverse(case: Contract, codes: Codes, back: object) -> None:
    if not isinstance(back, Codes):
        raise case.error(f"unpack returned a {type(back).__name__}, not Codes")
    case.must(back.spec == codes.spec, f"unpack returned another spec, {back.spec.label()}")
    case.must(back.codes.dtype == torch.uint8 and back.codes.shape == codes.codes.shape,
              f"unpack returned codes {back.codes.dtype} {list(back.codes.shape)}")
    case.must(torch.equal(back.codes, codes.codes), "unpack returned other codes than those that were packed")
    case.must((back.zero is None) == (codes.zero is None) and (
        back.zero is None or (codes.zero is not None and same_bits(back.zero, codes.zero))),
        "unpack returned other zero points than those that were packed")
    case.must(back.scale.dtype == torch.float32 and back.scale.shape == codes.scale.shape,
              f"unpack returned scales {back.scale.dtype} {list(back.scale.shape)}")
    limit = NESTED * codes.scale.max() if codes.spec.nested else LAST_BITS * codes.scale.abs()
    case.must(bool(((back.scale - codes.scale).abs() <= limit).all()),
              "unpack returned other scales than those that were packed")


def _check_values(case: Contract, form: Format, packed: QuantizedTensor, back: Codes) -> None:
    values = case.call("dequantize", form.dequantize, packed)
    fault = weight_fault(packed, values)
    case.must(fault is None, fault or "")
    case.must(bool(torch.isfinite(values).all()), "dequantize returned a value that is not finite")
    expected = formula(back)
    case.must(bool(((values - expected).abs() <= LAST_BITS * expected.abs()).all()),
              "dequantize disagrees with the formula of Codes",
              "see quantkit.formats.base.Codes: w = (codes - zero) * scale")
    exact = values.clone()
    values.zero_()
    again = case.call("dequantize", form.dequantize, packed)
    case.must(same_bits(again, exact), "dequantize returned memory that it uses again")
    rows: Any = getattr(form, "rows", None)
    if rows is not None:
        last = packed.shape[0] - 1
        for ids in ([0], [last, 0, last // 2, last], list(range(last + 1))):
            part = case.call("rows", rows, packed, torch.tensor(ids))
            case.must(isinstance(part, torch.Tensor) and same_bits(part, exact[ids]),
                      f"rows disagrees with dequantize at {ids[:4]}")


def _check_saved(case: Contract, form: Format, packed: QuantizedTensor, back: Codes) -> None:
    try:
        loaded = load(save(dict(packed.tensors)))
    except Exception as error:  # of safetensors, for tensors that share memory and the like
        raise case.error(f"safetensors can't save its tensors: {str(error)[:200]}") from error
    again = QuantizedTensor(packed.format, packed.spec, packed.shape, packed.dtype, loaded)
    case.must(_equal(case.call("unpack of what was saved", form.unpack, again), back),
              "unpack gives something else after the tensors were saved and loaded")


def _copied(codes: Codes) -> Codes:
    return codes.mapped(torch.Tensor.clone)


def _equal(first: Codes, second: Codes) -> bool:
    def same(name: str) -> bool:
        tensor, other = getattr(first, name), getattr(second, name)
        return (tensor is None) == (other is None) and (tensor is None or same_bits(tensor, other))

    return all(map(same, TENSORS))


def _attributes(form: Format) -> dict[str, str]:
    return {name: repr(value) for name, value in getattr(form, "__dict__", {}).items()}
