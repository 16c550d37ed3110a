"""What holds for every layout of integers and of 8-bit floats: codes come back exactly, and tensors are as
its layout says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.base import Codes, Format
from quantkit.formats.spec import QuantSpec
from quantkit.plugins.manager import registry
from tests.helpers.quantized import integer_spec, quant_spec, random_codes


def integers(bits: int, size: int | None, symmetric: bool, dtype: str) -> QuantSpec:
    return integer_spec(bits, size, symmetric, dtype)


def minima(bits: int, size: int | None, symmetric: bool, dtype: str) -> QuantSpec:
    return integer_spec(bits, size, symmetric, dtype).model_copy(update={"minimum": not symmetric})


def a_byte(kind: str, activations: str = "token") -> Callable[..., QuantSpec]:
    def spec(bits: int, size: int | None, symmetric: bool, dtype: str) -> QuantSpec:
        strategy = {None: "channel", 0: "tensor"}.get(size, "tile")
        return quant_spec(kind, 8, strategy, size or None, scale_dtype=dtype,
                          activations="group" if strategy == "tile" else activations)

    return spec


@dataclass(frozen=True)
class Layout:
    """What a format is tried with; columns are a multiple of ``width`` where a row shares its scale."""

    quant_method: str
    bits: Sequence[int]
    rows: Sequence[int]
    sizes: Sequence[int | None]
    width: int
    spec: Callable[..., QuantSpec] = integers
    symmetric: Sequence[bool] = (False, True)
    dtype: str = "bfloat16"
    lowest_zero: int = 0


FEW, ODD = (1, 2, 7, 33), (1, 2, 7, 11, 32, 33)
LAYOUTS = {
    "pack-quantized": Layout("compressed-tensors", range(2, 9), ODD, (None, 2, 3, 13, 32), 7),
    "gptq": Layout("gptq", (2, 3, 4, 8), (32, 64, 96), (None, 32, 64), 32, dtype="float16", lowest_zero=1),
    "gptq-v2": Layout("gptq", (2, 3, 4, 8), (32, 64, 96), (None, 32, 64), 32, dtype="float16", lowest_zero=1),
    "awq": Layout("awq", (4,), (8, 16, 72), (None, 3, 32), 7, symmetric=(False,), dtype="float16"),
    "mlx": Layout("mlx", (2, 3, 4, 5, 6, 8), FEW, (32, 64, 128), 1, minima),
    "int-quantized": Layout("compressed-tensors", (8,), FEW, (None, 0), 5, a_byte("int"), (True,)),
    "float-quantized": Layout("compressed-tensors", (8,), FEW, (None, 0, 2, 16, 128), 5, a_byte("fp"),
                              (True,)),
    "fine-grained-fp8": Layout("fp8", (8,), FEW, (2, 16, 128), 5, a_byte("fp"), (True,), "float32")}


def drawn(layout: Layout, data: st.DataObject) -> Codes:
    size = data.draw(st.sampled_from(layout.sizes))
    tile = size if layout.spec is not integers and layout.spec is not minima and size else None
    spec = layout.spec(data.draw(st.sampled_from(layout.bits)), size,
                       data.draw(st.sampled_from(layout.symmetric)), layout.dtype)
    groups, rows = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(layout.rows))
    seed = data.draw(st.integers(0, 999))
    columns = data.draw(st.integers(1, 200)) if tile else groups * (size or layout.width)
    codes = random_codes(without_minimum(spec), rows, columns, seed, layout.lowest_zero)
    if not spec.minimum:
        return codes
    random = torch.Generator().manual_seed(seed + 1)  # minima on both sides of zero, half the scales negative
    sign = torch.randint(0, 2, codes.scale.shape, generator=random) * 2 - 1
    low = torch.randn(codes.scale.shape, generator=random).to(getattr(torch, layout.dtype)).float()
    return replace(codes, spec=spec, scale=codes.scale * sign, minimum=low)


def without_minimum(spec: QuantSpec) -> QuantSpec:
    return spec.model_copy(update={"minimum": False, "symmetric": True}) if spec.minimum else spec


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_come_back_exactly(name: str) -> None:
    form, layout = registry("formats").get(name), LAYOUTS[name]
    assert isinstance(form, Format) and (form.name, form.quant_method) == (name, layout.quant_method)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        codes = drawn(layout, data)
        packed = form.pack(codes, torch.bfloat16)
        assert {suffix: (part.dtype, tuple(part.shape)) for suffix, part in packed.tensors.items()} == (
            form.layout(codes.spec, packed.shape, torch.bfloat16))
        assert all(part.is_contiguous() for part in packed.tensors.values())
        back = form.unpack(packed)
        assert back.spec == codes.spec
        for part in ("codes", "scale", "zero", "minimum"):
            mine, its = getattr(back, part), getattr(codes, part)
            assert (mine is None) == (its is None) and (mine is None or torch.equal(mine, its)), part
        again = form.pack(back, torch.bfloat16)
        for suffix, part in packed.tensors.items():  # torch doesn't compare fp8
            assert torch.equal(*(one.flatten().view(torch.uint8) for one in (again.tensors[suffix], part)))
        ids = torch.tensor([len(codes.codes) - 1, 0, len(codes.codes) - 1])
        if hasattr(form, "rows"):
            assert torch.equal(form.rows(packed, ids), form.dequantize(packed)[ids])

    holds()
