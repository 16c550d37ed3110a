"""Round to nearest against plain NumPy and, as the oracle, compressed-tensors' quantize."""

import numpy as np
import pytest
import torch

from quantkit.formats.eight_bit import FLOAT as FLOATS
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.rounding import RTN as METHOD
from quantkit.quantization.methods.rounding import RtnOptions
from quantkit.support.errors import SpecError
from tests.helpers.quantized import integer_spec


def weight_of(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.05


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even in NumPy, by the bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_against_numpy(bits: int, size: int | None, symmetric: bool) -> None:
    weight = weight_of(7, 48, bits)
    codes = METHOD.run(weight, None, integer_spec(bits, size, symmetric), RtnOptions())
    groups = weight.numpy().reshape(7, -1, size or 48)
    top = 2**bits - 1
    if symmetric:
        scale = bfloat16(np.abs(groups).max(-1) / np.float32(top / 2))
        zero = np.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = bfloat16(high / np.float32(top) - low / np.float32(top))
        zero = np.clip(np.round(-low / scale), 0, top)
    levels = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, top)
    np.testing.assert_array_equal(codes.scale.numpy(), scale)
    np.testing.assert_array_equal(codes.codes.numpy(), levels.reshape(7, 48))
    assert (codes.zero is None) == symmetric
    if codes.zero is not None:
        np.testing.assert_array_equal(codes.zero.numpy(), zero)


def fp8(strategy: str = "channel", dtype: str = "bfloat16") -> QuantSpec:
    return QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy=strategy), scale_dtype=dtype)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_floats_against_numpy(strategy: str) -> None:
    weight = weight_of(7, 48)
    codes = METHOD.run(weight, None, fp8(strategy), RtnOptions())
    most = weight.abs().numpy().max(None if strategy == "tensor" else 1, keepdims=True)
    np.testing.assert_array_equal(codes.scale.numpy(), bfloat16(most / np.float32(448)))
    x = weight.numpy().astype(np.float64) / codes.scale.numpy()
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(x))), -6) - 3)
    nearest = np.clip(np.round(x / step) * step, -448, 448)
    np.testing.assert_array_equal(FLOATS.dequantize(FLOATS.pack(codes, torch.bfloat16)).numpy(),
                                  (nearest * codes.scale.numpy()).astype(np.float32))


def test_a_search_lowers_the_error_of_floats_in_every_row() -> None:
    weight = weight_of(64, 576)

    def error(**options: bool) -> torch.Tensor:
        codes = METHOD.run(weight, None, fp8(), RtnOptions(**options))
        return (FLOATS.dequantize(FLOATS.pack(codes, torch.bfloat16)) - weight).square().sum(1)

    assert bool((error(clip_search=True) <= error()).all())
    assert error(clip_search=True).sum() < 0.97 * error().sum()


@pytest.mark.parametrize("weight", [torch.zeros(2, 8), torch.full((2, 8), 1e-41), torch.full((2, 8), 65504.0),
                                    torch.tensor([[0.0] * 7 + [1e3]] * 2), torch.full((2, 8), -3e38)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_awkward_weights_become_finite_floats(weight: torch.Tensor, dtype: str) -> None:
    if dtype == "float16" and weight.abs().max() > 65504:
        with pytest.raises(SpecError, match="range"):
            METHOD.run(weight, None, fp8(dtype=dtype), RtnOptions())
        return
    for search in (False, True):
        codes = METHOD.run(weight, None, fp8(dtype=dtype), RtnOptions(clip_search=search))
        found = FLOATS.dequantize(FLOATS.pack(codes, getattr(torch, dtype)))
        assert torch.isfinite(found.to(getattr(torch, dtype))).all()
        assert (found - weight).abs().max() <= weight.abs().max() / 15 + torch.finfo(torch.float32).tiny


def test_refuses_nf_and_a_damaged_weight() -> None:
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert "not nf" in str(METHOD.reason_against(nf))
    for bad in (float("nan"), float("inf")):
        weight = weight_of(2, 32)
        weight[0, 3] = bad
        with pytest.raises(SpecError, match="NaN or infinite"):
            METHOD.run(weight, None, integer_spec(4, 32), RtnOptions())


@pytest.mark.oracle
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [None, 16])
def test_equals_compressed_tensors(bits: int, size: int | None) -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight, spec = weight_of(9, 64, bits), integer_spec(bits, size)
    codes = METHOD.run(weight, None, spec, RtnOptions())
    args = quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=True, group_size=size,
                                         strategy=spec.granularity.strategy)
    theirs = forward.quantize(x=weight, scale=codes.scale, zero_point=torch.zeros_like(codes.scale),
                              args=args, dtype=torch.int8)
    assert torch.equal(codes.codes.to(torch.int16) - 2 ** (bits - 1), theirs.to(torch.int16))


@pytest.mark.oracle
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_floats_equal_compressed_tensors(strategy: str) -> None:
    """Its scale, in the scale's dtype, and its codes."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    weight, spec = weight_of(9, 64), fp8(strategy, "float32")
    codes = METHOD.run(weight, None, spec, RtnOptions())
    args = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
    low, high = (torch.aminmax(weight) if strategy == "tensor" else
                 (weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)))
    scale, zero = helpers.calculate_qparams(low, high, args)
    assert torch.equal(scale.reshape(codes.scale.shape), codes.scale)
    theirs = forward.quantize(x=weight, scale=scale, zero_point=zero, args=args, dtype=torch.float8_e4m3fn)
    assert torch.equal(theirs.float(), codes.codes.view(torch.float8_e4m3fn).float())
