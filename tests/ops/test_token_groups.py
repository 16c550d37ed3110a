"""Activations with a scale for each group of a token, beside compressed-tensors to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quantkit.formats.fp4 import MXFP4, NVFP4
from quantkit.ops.reference import REFERENCE
from quantkit.ops.stored_weight import reason_against_product
from quantkit.ops.tokens import round_groups
from quantkit.testing.formats import random_codes
from tests.helpers.quantized import quant_spec

NVFP4_SPEC = quant_spec("fp", 4, "group", 16, scale_dtype="e4m3", activations="group")
MXFP4_SPEC = quant_spec("fp", 4, "group", 32, scale_dtype="e8m0", activations="group")
SQUARES = quant_spec("fp", 8, "tile", 128, activations="group")
SPECS = {"nvfp4": (NVFP4_SPEC, 48.0), "nvfp4, another's number": (NVFP4_SPEC, 77.3),
         "mxfp4": (MXFP4_SPEC, None), "fp8": (SQUARES, None)}


def inputs(columns: int = 256) -> torch.Tensor:
    """Rows of all sizes, with zeros, ties, and values that e4m3's scales can't reach."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, columns, generator=random) * torch.exp(3 * torch.randn(40, columns, generator=random))
    x[0], x[1, :40] = 0, 0
    x[2] *= 1e-30
    x[3] *= 1e30
    x[4] = torch.tensor([1.75, 1.7499, 3.5, 7.0]).repeat(columns // 4)
    x[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(columns // 8)
    return x


def factor_of(number: float | None) -> torch.Tensor | None:
    return None if number is None else torch.tensor([[number]])


@pytest.mark.oracle
@pytest.mark.parametrize("name", SPECS)
def test_as_compressed_tensors_rounds_them(name: str) -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward",
                                  reason="compressed-tensors is not installed (extra: oracle)")
    from compressed_tensors.quantization import QuantizationArgs

    (spec, number), dtypes = SPECS[name], {"e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8}
    args = QuantizationArgs(
        num_bits=spec.bits, type="float", group_size=spec.granularity.size,
        strategy="tensor_group" if number else "group", dynamic="local" if number else True,
        scale_dtype=dtypes.get(spec.scale_dtype), zp_dtype=dtypes.get(spec.scale_dtype))
    theirs = None if number is None else torch.tensor([number])
    scale, zero = forward.compute_dynamic_scales_and_zp(inputs(), args, None, global_scale=theirs)
    expected = forward.fake_quantize(inputs(), scale, zero, args, global_scale=theirs)
    assert torch.equal(round_groups(inputs(), spec, factor_of(number)), expected)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_is_nan_and_no_other(name: str, bad: float) -> None:
    spec, number = SPECS[name]
    size, x = spec.granularity.size or 1, inputs()
    clean = round_groups(x, spec, factor_of(number))
    x[7, 5] = bad
    rounded = round_groups(x, spec, factor_of(number))
    assert bool(rounded[7, :size].isnan().all())
    rounded[7, :size] = clean[7, :size]
    assert torch.equal(rounded, clean)


def test_a_last_group_may_be_cut() -> None:
    rounded = round_groups(inputs()[:, :200], SQUARES)
    assert torch.equal(rounded[:, :128], round_groups(inputs(), SQUARES)[:, :128])
    tail = inputs()[6, 128:200]
    scale = tail.abs().max() / 448
    assert torch.equal(rounded[6, 128:], (tail / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize(("spec", "form"), [(NVFP4_SPEC, NVFP4), (MXFP4_SPEC, MXFP4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_reference_multiplies_rounded_inputs(spec, form, dtype: torch.dtype, rows: int) -> None:
    codes = random_codes(spec, (24, 256))
    packed = form.pack(codes, torch.bfloat16)
    x = inputs()[6:6 + rows].to(dtype)
    product = REFERENCE.run(x, REFERENCE.prepare(packed))
    assert product.dtype == dtype
    expected = round_groups(x, spec, codes.input_factor).double() @ form.dequantize(packed).double().T
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    assert (product.double() - expected).norm() <= bound * expected.norm()
    assert reason_against_product(x, product, packed) is None
    plain = form.pack(dataclasses.replace(codes, spec=spec.model_copy(update={"activations": None})),
                      torch.bfloat16)
    unrounded = REFERENCE.run(x, REFERENCE.prepare(plain))
    assert not torch.equal(product, unrounded)
    assert "has an error" in str(reason_against_product(x, unrounded, packed))
