"""What a method must return, checked on every run: a method may be a stranger's."""

from __future__ import annotations

import torch

from quantkit.formats import e4m3
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import plain_name
from quantkit.formats.spec import QuantSpec


def codes_fault(result: object, shape: tuple[int, int], spec: QuantSpec) -> tuple[str, str] | None:
    """What is wrong with a method's result, and what it should have been; ``None`` if nothing.

    Args:
        result: the value that the method returned.
        shape: the shape of the weight, ``(out, in)``.
        spec: the spec that the method was asked for.
    """
    if not isinstance(result, Codes):
        return type_fault(result)
    return (_spec_fault(result, spec) or _tensor_fault("codes", result.codes, torch.uint8, shape)
            or _scale_fault(result.scale, spec.scale_shape(shape), spec)
            or _zero_fault(result, spec) or _beside_fault(result, shape, spec) or _value_fault(result))


def type_fault(result: object) -> tuple[str, str]:
    """For a result that isn't :class:`~quantkit.formats.base.Codes` at all."""
    if result is None:
        return "returned None", "it must return Codes; is a return statement missing?"
    hint = {QuantizedTensor: "packing is the format's work: return the codes before they are packed",
            tuple: "put them into Codes(spec, codes, scale, zero, notes)",
            torch.Tensor: "codes alone don't say their scales: return Codes(spec, codes, scale, zero)"}
    why = next((text for kind, text in hint.items() if isinstance(result, kind)), "it must return Codes")
    return f"returned a {type(result).__name__} in place of Codes", why


def _spec_fault(result: Codes, spec: QuantSpec) -> tuple[str, str] | None:
    if not isinstance(result.spec, QuantSpec):
        return (f"returned codes whose spec is a {type(result.spec).__name__}",
                "it must be the QuantSpec that was asked for")
    wanted = spec if spec.scale_dtype != "model" else spec.model_copy(
        update={"scale_dtype": result.spec.scale_dtype})  # it may say which
    if result.spec != wanted:
        labels = [f"{each.label()} with scales in {each.scale_dtype}" for each in (result.spec, spec)]
        return f"returned codes of another spec, {labels[0]}", f"it was asked for {labels[1]}"
    notes = result.notes
    if not isinstance(notes, tuple) or not all(isinstance(note, str) for note in notes):
        return f"returned notes that are no tuple of strings: {notes!r:.80}", "each note is one sentence"
    return None


def _tensor_fault(name: str, tensor: object, dtype: torch.dtype,
                  shape: tuple[int, ...]) -> tuple[str, str] | None:
    why = f"{name} must be {plain_name(dtype)} of shape {tuple(shape)}"
    if not isinstance(tensor, torch.Tensor):
        return f"returned {name} as a {type(tensor).__name__}, not as a tensor", why
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        returned = f"{plain_name(tensor.dtype)} of shape {tuple(tensor.shape)}"
        return f"returned {name} {returned}", why
    return None


def _scale_fault(scale: object, shape: tuple[int, ...], spec: QuantSpec) -> tuple[str, str] | None:
    if (fault := _tensor_fault("scales", scale, torch.float32, shape)) is not None:
        return fault[0], f"{fault[1]} for {spec.label()}, rounded to {spec.scale_dtype}"
    assert isinstance(scale, torch.Tensor)
    if not bool(torch.isfinite(scale).all()):
        return "returned a scale that is not finite", "no engine can run this layer"
    return None


def _zero_fault(result: Codes, spec: QuantSpec) -> tuple[str, str] | None:
    if spec.symmetric or spec.minimum or spec.kind != "int":
        return None if result.zero is None else (
            "returned zero points where the spec has none", f"zero must be None for {spec.label()}")
    if result.zero is None:
        return "returned no zero points", f"{spec.label()} has them: uint8 of the scales' shape"
    fault = _tensor_fault("zero points", result.zero, torch.uint8, tuple(result.scale.shape))
    if fault is None and result.zero.numel() and int(result.zero.max()) >= 2**spec.bits:
        fault = f"returned a zero point above {2**spec.bits - 1}", f"{spec.bits} bits have no such level"
    return fault


def _beside_fault(result: Codes, shape: tuple[int, int], spec: QuantSpec) -> tuple[str, str] | None:
    """Minima, and what scales are multiples of."""
    outer = spec.outer_shape(shape)
    wanted = {"minimum": spec.scale_shape(shape) if spec.minimum else None, "outer": outer,
              "outer_minimum": outer if spec.minimum else None}
    for name, stored_shape in wanted.items():
        tensor = getattr(result, name)
        if stored_shape is None:
            if tensor is not None:
                return f"returned {name} where the spec has none", f"it must be None for {spec.label()}"
        elif (fault := _tensor_fault(name, tensor, torch.float32, stored_shape)) is not None:
            return fault[0], f"{fault[1]} for {spec.label()}"
        elif not bool(torch.isfinite(tensor).all()):
            return f"returned a value of {name} that is not finite", "no engine can run this layer"
    return None


def _value_fault(result: Codes) -> tuple[str, str] | None:
    levels, spec = result.codes, result.spec
    if levels.numel() and int(levels.max()) >= 2**spec.bits:
        return f"returned a code above {2**spec.bits - 1}", f"{spec.bits} bits have no such level"
    if spec.kind == "fp" and spec.bits == 8 and e4m3.has_nan(levels):
        return "returned the code of a NaN", "no engine can run this layer"
    return None
