"""Round to nearest against plain NumPy and, as the oracle, compressed-tensors' quantize."""

import numpy as np
import pytest
import torch

from quantkit.errors import SpecError
from quantkit.formats.pack_quantized import FORMAT
from quantkit.methods.rtn import METHOD, RtnOptions
from quantkit.spec import Granularity, QuantSpec


def spec_of(bits: int, size: int | None, symmetric: bool = True) -> QuantSpec:
    return QuantSpec(bits=bits, symmetric=symmetric, scale_dtype="bfloat16",
                     granularity=Granularity(strategy="channel" if size is None else "group", size=size))


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
    codes = METHOD.run(weight, None, spec_of(bits, size, symmetric), RtnOptions())
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


def test_eight_bits_is_close_and_fewer_bits_are_worse() -> None:
    weight, last = weight_of(16, 64), 0.0
    for bits in range(8, 1, -1):
        packed = FORMAT.pack(METHOD.run(weight, None, spec_of(bits, 32), RtnOptions()), torch.bfloat16)
        error = float((FORMAT.dequantize(packed) - weight).square().mean() / weight.square().mean())
        assert last < error < 3 * 4.0**-bits * 4
        last = error


def test_clip_search_is_off_by_default_and_lowers_the_error() -> None:
    weight = weight_of(16, 64) ** 3

    def error(**options: bool) -> float:
        codes = METHOD.run(weight, None, spec_of(3, 32), RtnOptions(**options))
        return float((FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16)) - weight).square().sum())

    assert error() == error(clip_search=False)
    assert error(clip_search=True) < error()


def test_refuses_nf_and_a_damaged_weight() -> None:
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert "not nf" in str(METHOD.refuses(nf))
    for bad in (float("nan"), float("inf")):
        weight = weight_of(2, 32)
        weight[0, 3] = bad
        with pytest.raises(SpecError, match="NaN or infinite"):
            METHOD.run(weight, None, spec_of(4, 32), RtnOptions())


@pytest.mark.oracle
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [None, 16])
def test_equals_compressed_tensors(bits: int, size: int | None) -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight, spec = weight_of(9, 64, bits), spec_of(bits, size)
    codes = METHOD.run(weight, None, spec, RtnOptions())
    args = quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=True, group_size=size,
                                         strategy=spec.granularity.strategy)
    theirs = forward.quantize(x=weight, scale=codes.scale, zero_point=torch.zeros_like(codes.scale),
                              args=args, dtype=torch.int8)
    assert torch.equal(codes.codes.to(torch.int16) - 2 ** (bits - 1), theirs.to(torch.int16))
