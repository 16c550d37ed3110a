"""What a format must store and give back, checked whenever a weight is packed: a format may be a stranger's.

The checks compare names, dtypes and shapes; they read no value of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.formats.base import Codes, Format, QuantizedTensor
from quantkit.formats.dtypes import plain_name
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.manager import describe_entry, registry
from quantkit.support.errors import PluginError

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def layout(form: Format, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
    """:meth:`~quantkit.formats.base.Format.layout`: dtype and shape by suffix.

    Raises:
        PluginError: it isn't that.
        QuantkitError: the format refuses the weight.
    """
    stored: object = form.layout(spec, shape, dtype)
    if not isinstance(stored, dict) or not all(
            isinstance(suffix, str) and isinstance(about, tuple) and len(about) == 2
            and isinstance(about[0], torch.dtype) and isinstance(about[1], tuple)
            for suffix, about in stored.items()):
        raise _broken(form, f"layout returned {str(stored)[:80]}, not a dictionary of suffixes to dtype and "
                            "shape")
    return stored


def pack(form: Format, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
    """:meth:`~quantkit.formats.base.Format.pack`, and its result is as the format's layout says.

    Raises:
        PluginError: it isn't.
        SpecError: the format refuses the weight.
    """
    packed = form.pack(codes, dtype)
    if (fault := reason_against_packed(form, packed, codes, dtype)) is not None:
        raise _broken(form, fault)
    return packed


def dequantize(form: Format, packed: QuantizedTensor) -> torch.Tensor:
    """:meth:`~quantkit.formats.base.Format.dequantize`: float32 of the weight's shape, in memory of its own.
    Raises PluginError if it isn't."""
    values = form.dequantize(packed)
    if (fault := reason_against_weight(packed, values)) is not None:
        raise _broken(form, fault)
    return values


def check_finite_error(form: Format, error: float) -> None:
    """Raises PluginError if the error of a finite weight isn't: then the format gave back what isn't."""
    if not math.isfinite(error):
        raise _broken(form, "dequantize returned a value that is not finite, of codes and scales that are")


def reason_against_packed(form: Format, packed: object, codes: Codes, dtype: torch.dtype) -> str | None:
    """What is wrong with what :meth:`pack` returned; ``None`` if nothing."""
    if not isinstance(packed, QuantizedTensor):
        return f"pack returned a {type(packed).__name__}, not a QuantizedTensor"
    shape = tuple(codes.codes.shape)
    wanted = {"format": form.name, "shape": shape, "dtype": dtype}
    for name, value in wanted.items():
        if (returned := getattr(packed, name)) != value:
            return f"pack returned a QuantizedTensor whose {name} is {returned!r}, not {value!r}"
    claimed_layout = layout(form, packed.spec, packed.shape, dtype)
    if packed.tensors.keys() != claimed_layout.keys():
        return (f"pack stores {', '.join(sorted(packed.tensors)) or 'nothing'}, but layout says "
                f"{', '.join(sorted(claimed_layout)) or 'nothing'}")
    for suffix, (stored_dtype, stored_shape) in claimed_layout.items():
        tensor = packed.tensors[suffix]
        if not isinstance(tensor, torch.Tensor):
            return f"pack stores {suffix} as a {type(tensor).__name__}, not as a tensor"
        if tensor.dtype != stored_dtype or tuple(tensor.shape) != tuple(stored_shape):
            claimed = stored_dtype.itemsize * math.prod(stored_shape)
            return (f"pack stores {suffix} as {plain_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"{tensor.nbytes} bytes; layout says {plain_name(stored_dtype)} {list(stored_shape)}, "
                    f"{claimed} bytes")
    return None


def reason_against_weight(packed: QuantizedTensor, values: object) -> str | None:
    """What is wrong with what :meth:`dequantize` returned; ``None`` if nothing."""
    if not isinstance(values, torch.Tensor):
        return f"dequantize returned a {type(values).__name__}, not a tensor"
    if values.dtype != torch.float32 or tuple(values.shape) != packed.shape:
        return (f"dequantize returned {plain_name(values.dtype)} {list(values.shape)}, "
                f"not float32 {list(packed.shape)}")
    storage = values.untyped_storage().data_ptr()
    if storage and any(storage == tensor.untyped_storage().data_ptr() for tensor in packed.tensors.values()):
        return "dequantize returned memory of the stored tensors, not memory of its own"
    return None


def _broken(form: Format, fault: str) -> PluginError:
    return PluginError(f"{describe_entry('formats', form.name)}: {fault}",
                       why="quantkit.formats.base says what a format promises",
                       next="correct the format: quantkit.testing.check_format finds such errors")


def with_one_outer(weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """Weights whose e4m3 scales are multiples of one number each, under the largest of these numbers; as they
    were if one would lose by it, or has none.

    Engines fuse Linears that see the same input, such as q, k and v, and their kernels multiply all of a
    fused weight by one number. A number that is a power of 2 can be moved: the scales beside it are divided
    by what it grows by, which loses nothing as long as they stay normal e4m3 numbers.

    Args:
        weights: some have e4m3 scales, others may have any.

    Raises:
        PluginError: a format breaks its promises.
    """
    unchanged = list(weights)
    if len(weights) < 2 or any(weight.spec.scale_dtype != "e4m3" for weight in weights):
        return unchanged
    forms: list[Format] = [registry("formats").get(weight.format) for weight in weights]
    all_codes: list[Codes] = [form.unpack(weight) for form, weight in zip(forms, weights, strict=True)]
    outer = torch.stack([codes.outer for codes in all_codes if codes.outer is not None]).amax(dim=0)
    moved = []
    for form, weight, codes in zip(forms, weights, all_codes, strict=True):
        if codes.outer is not None and not torch.equal(codes.outer, outer):
            weight = pack(form, replace(codes, outer=outer), weight.dtype)
            if not torch.equal(form.unpack(weight).scale, codes.scale):
                return unchanged
        moved.append(weight)
    return moved
