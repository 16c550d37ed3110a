"""Broken formats, each a correct one with one fault: what ``check_format`` says, and what a run does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import check_fit
from quantkit.formats.level_values import dequantize
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops import packing
from quantkit.plugins.hooks import Register, hookimpl
from quantkit.plugins.manager import current, registry
from quantkit.quantization.run import quantize
from quantkit.support.errors import PluginError, SpecError
from quantkit.testing import check_format, tiny_model
from quantkit.testing.formats import random_codes

SPECS = (QuantSpec(bits=4, granularity=Granularity(strategy="channel")),
         QuantSpec(bits=8, symmetric=False, granularity=Granularity(strategy="group", size=16)))


class Sound:
    """A byte for each level, scales in the model's dtype."""

    name, quant_method = "plain-bytes", "quantkit"

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        if spec.kind != "int" or spec.activations or 0 in shape:
            return "it holds integers"
        size = spec.granularity.size
        return f"groups of {size} don't fit" if size and shape[1] % size else None

    def layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
        check_fit(self, spec, shape, dtype)
        scales = spec.scale_shape(shape)
        tensors = {"weight": (torch.uint8, shape), "weight_scale": (dtype, scales)}
        return tensors if spec.symmetric else tensors | {"weight_zero": (torch.uint8, scales)}

    def pack(self, codes: Codes, dtype: torch.dtype) -> QuantizedTensor:
        spec, shape = resolve(codes.spec, dtype, self), tuple(codes.codes.shape)
        self.layout(spec, shape, dtype)
        tensors = {"weight": codes.codes.clone(), "weight_scale": codes.scale.to(dtype, copy=True)}
        if codes.zero is not None:
            tensors["weight_zero"] = codes.zero.clone()
        return QuantizedTensor(self.name, spec, shape, dtype, tensors)

    def unpack(self, packed: QuantizedTensor) -> Codes:
        parts = packed.tensors
        return Codes(packed.spec, parts["weight"].clone(), parts["weight_scale"].float().clone(),
                     parts.get("weight_zero"))

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        return dequantize(self.unpack(packed))

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        return self.dequantize(packed)[ids]


class NoReason(Sound):
    def reason_against(self, spec, shape):
        return bool(super().reason_against(spec, shape))


class AnyGroup(Sound):
    def reason_against(self, spec, shape):
        return None if spec.kind == "int" and spec.granularity.size else super().reason_against(spec, shape)


class RefusesLate(Sound):
    def layout(self, spec, shape, dtype):
        return {"weight": (torch.uint8, shape), "weight_scale": (dtype, spec.scale_shape(shape))} | (
            {} if spec.symmetric else {"weight_zero": (torch.uint8, spec.scale_shape(shape))})

    def reason_against(self, spec, shape):
        return super().reason_against(spec, shape) or ("7 rows" if shape[0] == 7 else None)


class AnotherName(Sound):
    def layout(self, spec, shape, dtype):
        tensors = super().layout(spec, shape, dtype)
        return {"weight_packed": tensors.pop("weight"), **tensors}


class FewerBytes(Sound):
    def layout(self, spec, shape, dtype):
        return super().layout(spec, shape, dtype) | {"weight": (torch.uint8, (shape[0], -(-shape[1] // 2)))}


class LayoutOfLists(Sound):
    def layout(self, spec, shape, dtype):
        return {name: list(entry) for name, entry in super().layout(spec, shape, dtype).items()}


class PacksCodes(Sound):
    def pack(self, codes, dtype):
        super().pack(codes, dtype)
        return codes


class OtherFormat(Sound):
    def pack(self, codes, dtype):
        return dataclasses.replace(super().pack(codes, dtype), format="pack-quantized")


class WritesCodes(Sound):
    def pack(self, codes, dtype):
        packed = super().pack(codes, dtype)
        codes.codes.zero_()
        return packed


class Counting(Sound):
    calls = 0

    def pack(self, codes, dtype):
        self.calls += 1
        packed = super().pack(codes, dtype)
        packed.tensors["weight_scale"].mul_(1 + self.calls / 8)
        return packed


class LosesBits(Sound):
    def unpack(self, packed):
        codes = super().unpack(packed)
        return dataclasses.replace(codes, codes=codes.codes & 14)


class LosesZeros(Sound):
    def unpack(self, packed):
        return dataclasses.replace(super().unpack(packed), zero=None)


class RoundsScales(Sound):
    def unpack(self, packed):
        codes = super().unpack(packed)
        return dataclasses.replace(codes, scale=codes.scale.half().float() * 1.001)


class DoubleScales(Sound):
    def unpack(self, packed):
        codes = super().unpack(packed)
        return dataclasses.replace(codes, scale=codes.scale.double())


class UnpacksTensors(Sound):
    def unpack(self, packed):
        return packed.tensors["weight"]

    def dequantize(self, packed):
        return dequantize(Sound().unpack(packed))


class OtherFormula(Sound):
    def dequantize(self, packed):
        return super().dequantize(packed) * 1.01


class HalfPrecision(Sound):
    def dequantize(self, packed):
        return super().dequantize(packed).bfloat16()


class NotFinite(Sound):
    def dequantize(self, packed):
        return super().dequantize(packed) / 0


class OtherRows(Sound):
    def rows(self, packed, ids):
        return self.dequantize(packed)[ids.sort().values]


class Raises(Sound):
    def pack(self, codes, dtype):
        return super().pack(codes, dtype) if codes.codes.shape[0] > 1 else [][0]


class View(Sound):
    """Stores float32, and gives it back."""

    def layout(self, spec, shape, dtype):
        return super().layout(spec, shape, dtype) | {"plain": (torch.float32, shape)}

    def pack(self, codes, dtype):
        plain = dequantize(codes)
        packed = QuantizedTensor(self.name, codes.spec, tuple(codes.codes.shape), dtype, {
            **Sound().pack(codes, dtype).tensors, "plain": plain})
        return packed

    def dequantize(self, packed):
        return packed.tensors["plain"]


ZOO = {
    "refuses without a reason": (NoReason(), "the reason as a sentence"),
    "takes groups that don't fit": (AnyGroup(), "which don't fit"),
    "packs what it refuses": (RefusesLate(), "pack takes what reason_against doesn't: 7 rows"),
    "stores other names": (AnotherName(), "but layout says weight_packed"),
    "stores more bytes": (FewerBytes(), "64 bytes; layout says uint8 .* 32 bytes"),
    "a layout of lists": (LayoutOfLists(), "layout returned"),
    "packs codes": (PacksCodes(), "pack returned a Codes, not a QuantizedTensor"),
    "another format": (OtherFormat(), "whose format is 'pack-quantized'"),
    "writes to codes": (WritesCodes(), "pack wrote to the codes"),
    "counts": (Counting(), "other scales|other bits"),
    "loses bits": (LosesBits(), "other codes than those that were packed"),
    "loses zero points": (LosesZeros(), "there is no zero"),
    "rounds scales": (RoundsScales(), "other scales than"),
    "scales of float64": (DoubleScales(), "scale is float64"),
    "unpacks tensors": (UnpacksTensors(), "unpack returned a Tensor, not Codes"),
    "another formula": (OtherFormula(), "disagrees with the formula of Codes"),
    "half precision": (HalfPrecision(), "dequantize returned bfloat16"),
    "not finite": (NotFinite(), "not finite"),
    "sorts rows": (OtherRows(), "rows disagrees with dequantize"),
    "gives back what it stores": (View(), "memory of the stored tensors"),
    "raises": (Raises(), "pack raises IndexError"),
    "a class": (Sound, "an instance with name"),
}


@pytest.mark.parametrize("fault", ZOO)
def test_a_broken_format_is_caught(fault: str) -> None:
    form, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_format(form, SPECS)


def test_a_sound_format_passes() -> None:
    check_format(Sound(), SPECS)


@pytest.mark.parametrize("fault", ["stores other names", "stores more bytes", "packs codes",
                                   "another format"])
def test_a_run_refuses_what_is_packed_otherwise_than_announced(fault: str) -> None:
    form, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        packing.pack(form, random_codes(resolve(SPECS[0], torch.bfloat16), (1, 64)), torch.bfloat16)


@pytest.mark.parametrize(("form", "message"), [(HalfPrecision(), "returned bfloat16"),
                                               (View(), "memory of the stored tensors")],
                         ids=["half precision", "a view"])
def test_a_run_refuses_weights_that_it_can_not_use(form: Sound, message: str) -> None:
    packed = form.pack(random_codes(resolve(SPECS[0], torch.float32), (4, 64)), torch.float32)
    with pytest.raises(PluginError, match=message):
        packing.dequantize(form, packed)


def test_refusing_stays_a_spec_error() -> None:
    with pytest.raises(SpecError, match="can't hold"):
        packing.pack(Sound(), random_codes(QuantSpec(kind="fp", bits=8, granularity=Granularity(
            strategy="channel"), scale_dtype="bfloat16"), (4, 64)), torch.bfloat16)


RECIPE = """
rules:
  - match: "*.k_proj"
    method: rtn
    format: plain-bytes
    spec: {bits: 4, granularity: {strategy: channel}}
"""


@pytest.mark.parametrize(("form", "message"), [
    (AnotherName(), "pack stores weight, weight_scale, but layout says weight_packed, weight_scale"),
    (FewerBytes(), "layout says uint8"), (NotFinite(), "not finite"), (HalfPrecision(), "returned bfloat16")],
    ids=lambda given: type(given).__name__)
def test_quantizing_names_the_layer_and_the_plugin(tmp_path, form: Sound, message: str) -> None:
    current.cache_clear()

    class Plugin:
        @hookimpl
        def register_formats(self, register: Register) -> None:
            register("plain-bytes", form)

    try:
        current().add(Plugin(), "quantkit-bytes")
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        with pytest.raises(PluginError, match="k_proj: format 'plain-bytes' of quantkit-bytes") as caught:
            quantize(str(tiny_model(tmp_path / "model")), str(tmp_path / "recipe.yaml"), tmp_path / "out")
        assert message in caught.value.what
    finally:
        current.cache_clear()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(registry("formats")))
def test_registered_formats(name: str) -> None:
    check_format(registry("formats").get(name))
