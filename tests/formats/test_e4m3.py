"""e4m3 against its definition, written out by hand, and against torch over every kind of float32."""

import numpy as np
import torch

from quantkit.formats.e4m3 import LARGEST, decode, encode, has_nan, nearest_


def by_definition(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def test_every_code_by_the_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = np.array([by_definition(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(decode(codes).numpy(), expected)
    real = ~torch.isnan(decode(codes))
    assert torch.equal(encode(decode(codes))[real], codes[real])
    assert decode(codes)[real].max() == LARGEST


def test_every_number_goes_to_the_nearest_ties_to_even() -> None:
    table = torch.tensor([by_definition(code) for code in range(127)], dtype=torch.float64)
    between = (table[1:] + table[:-1]) / 2
    x = torch.cat([table, between, between * (1 + 1e-7), between * (1 - 1e-7),
                   torch.rand(2000, generator=torch.Generator().manual_seed(0)).double() * 500]).float()
    distance = (x.double()[:, None] - table).abs()
    best = distance.argmin(1)
    above = distance.gather(1, (best[:, None] + 1).clamp(max=126))
    tied = (above == distance.amin(1, keepdim=True))[:, 0] & (best < 126)
    best += (tied & (best % 2 == 1)).long()
    assert torch.equal(encode(x).long(), best)
    assert torch.equal(encode(-x).long(), best + 128)


def test_rounding_in_place_is_the_same_over_all_bit_patterns() -> None:
    bits = torch.arange(-2**31, 2**31, 4999, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[~torch.isnan(x)]
    there = nearest_(x.clone())
    assert torch.equal(there, decode(encode(x))) and there.abs().max() == LARGEST


def test_nan_is_noticed() -> None:
    assert not has_nan(torch.tensor([0x7E, 0xFE, 0, 0x80], dtype=torch.uint8))
    assert has_nan(torch.tensor([0, 0x7F], dtype=torch.uint8))
    assert has_nan(torch.tensor([0xFF, 0], dtype=torch.uint8))
    assert has_nan(encode(torch.tensor([float("nan")])))
