"""bitsandbytes' int8 layout: exact where scales have 16 bits, and bitsandbytes as the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quantkit.formats.base import Codes, Format
from quantkit.formats.bnb_int8 import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.support.errors import CheckpointError, SpecError

CHANNEL = Granularity(strategy="channel")


def int8_codes(rows: int, cols: int, dtype: str = "bfloat16", seed: int = 0) -> Codes:
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(rows, 1, generator=random) * 10.0 ** torch.randint(-6, 3, (rows, 1), generator=random)
    return Codes(QuantSpec(bits=8, granularity=CHANNEL, scale_dtype=dtype),
                 torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=random),
                 scale.to(getattr(torch, dtype)).float().clamp(min=1e-7))


def test_is_a_format() -> None:
    assert isinstance(FORMAT, Format)
    assert (FORMAT.name, FORMAT.quant_method) == ("bnb-int8", "bitsandbytes")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_16_bits_come_back_exactly(dtype) -> None:
    every = torch.arange(1, 0x7C00 if dtype == "float16" else 0x7E00, dtype=torch.int16)
    scale = every.view(getattr(torch, dtype)).float()
    scale = scale[(scale > 1e-37) & (scale < 2e36)].unsqueeze(1)
    spec = QuantSpec(bits=8, granularity=CHANNEL, scale_dtype=dtype)
    codes = Codes(spec, torch.full((len(scale), 2), 3, dtype=torch.uint8), scale)
    packed = FORMAT.pack(codes, torch.bfloat16)
    assert torch.equal(FORMAT.unpack(packed).scale, scale)


def test_other_scales_come_back_as_a_neighbor() -> None:
    codes = int8_codes(4096, 2, "float32")
    back = FORMAT.unpack(FORMAT.pack(codes, torch.bfloat16)).scale
    assert 0.9 < (back == codes.scale).float().mean() < 1.0
    assert ((back - codes.scale).abs() <= codes.scale * 2**-23).all()


def test_layout_and_numpy() -> None:
    codes = int8_codes(5, 7)
    packed = FORMAT.pack(codes, torch.float16)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} == FORMAT.layout(
        codes.spec, (5, 7), torch.float16)
    signed = codes.codes.numpy().astype(np.int16) - 128
    np.testing.assert_array_equal(packed.tensors["weight"].numpy(), signed)
    np.testing.assert_array_equal(packed.tensors["SCB"].numpy(), codes.scale.numpy()[:, 0] * np.float32(127))
    expected = signed.astype(np.float64) * codes.scale.numpy().astype(np.float64)
    np.testing.assert_allclose(FORMAT.dequantize(packed).numpy(), expected, rtol=2**-22)
    assert torch.equal(FORMAT.unpack(packed).codes, codes.codes)


def test_refusals() -> None:
    group = Granularity(strategy="group", size=4)
    assert "channel" in str(FORMAT.reason_against(QuantSpec(bits=8, granularity=group), (4, 8)))
    assert "holds 8 bits" in str(FORMAT.reason_against(QuantSpec(bits=4, granularity=CHANNEL), (4, 8)))
    assert "zero points" in str(FORMAT.reason_against(QuantSpec(bits=8, symmetric=False, granularity=CHANNEL),
                                               (4, 8)))
    with pytest.raises(SpecError, match="overflow"):
        FORMAT.pack(replace(int8_codes(2, 2, "float32"), scale=torch.full((2, 1), 3e38)), torch.float32)


def test_tiled_rows_are_not_read() -> None:
    packed = FORMAT.pack(int8_codes(2, 2), torch.float16)
    tiled = replace(packed, tensors={**packed.tensors, "weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="weight_format"):
        FORMAT.unpack(tiled)


@pytest.mark.oracle
def test_bitsandbytes_dequantizes_to_the_same_bits_and_its_codes_pass_through() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    ours = FORMAT.pack(int8_codes(64, 96), torch.float16)
    theirs = functional.int8_vectorwise_dequant(ours.tensors["weight"], ours.tensors["SCB"])
    assert torch.equal(theirs, FORMAT.dequantize(ours))
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).half()
    signed, most, _ = functional.int8_vectorwise_quant(weight)
    packed = replace(ours, tensors={**ours.tensors, "weight": signed, "SCB": most})
    codes = FORMAT.unpack(packed)
    again = FORMAT.pack(codes, torch.float16)
    assert torch.equal(again.tensors["weight"], signed)
    assert torch.equal(functional.int8_vectorwise_dequant(signed, most), FORMAT.dequantize(packed))
    assert torch.allclose(again.tensors["SCB"], most, rtol=2**-22)
