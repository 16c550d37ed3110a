"""fp8 weights: every code exactly, and against float64."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.fp8 import pack, spread
from quantkit_kernels.triton.matmul import multiply

CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def weight(n, k, seed=0):
    random = torch.Generator().manual_seed(seed)
    codes = CODES[torch.randint(0, len(CODES), (n, k), generator=random)]
    return codes.view(torch.float8_e4m3fn), 0.01 * (0.5 + torch.rand(n, generator=random))


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 16, 3), (33, 100, 17), (128, 64, 16), (130, 576, 1),
                                           (130, 576, 17), (140, 192, 130)])
def test_against_float64(on, randn, product_obeys_the_rule, n, k, m):
    codes, scale = weight(n, k)
    x, exact = randn(m, k, on=on), (codes.double() * scale.double()[:, None]).to(on[0])
    got = multiply(x, pack(codes.to(on[0]), scale.to(on[0])))
    product_obeys_the_rule(got, x, exact)


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_every_code_is_exact(on, family):
    """Each in all four bytes of a word: what is below the normal numbers too."""
    codes = torch.stack([CODES.roll(at) for at in range(128)], 1).contiguous()
    if on[0].type == "cuda" and family != "hopper":
        family = None
    x = torch.eye(128, dtype=on[1], device=on[0])
    got = multiply(x, pack(codes.to(on[0]), torch.ones(len(codes), device=on[0]), family))
    assert torch.equal(got.cpu().float(), codes.view(torch.float8_e4m3fn).float().T)


def bfloat16(bits):
    return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).double()


def test_bits_come_to_where_bfloat16_wants_them():
    """The decoder's steps, in integers: the interpreter doesn't compute in bfloat16."""
    codes = CODES[torch.randint(0, len(CODES), (4000, 4), generator=torch.Generator().manual_seed(0))]
    exact = codes.view(torch.float8_e4m3fn).double()
    for word, values in zip(spread(codes.view(torch.int32)[:, 0]).tolist(), exact.tolist()):
        word &= 0xFFFFFFFF
        turned = word >> 4 | word << 28 & 0xFFFFFFFF
        first, second = word & 0x87F087F0, (turned & 0x87808780) | (word << 4 & 0x00700070)
        for pair, (low, high) in ((first, values[::2]), (second, values[1::2])):
            got = bfloat16([(half ^ 0x8000) - 0x8000 for half in (pair & 0xFFFF, pair >> 16)]) * 2.0**120
            assert got.tolist() == [low, high]


def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone):
    rows_stand_alone(pack(*(part.to(on[0]) for part in weight(150, 1088))), randn(16, 1088, on=on))
