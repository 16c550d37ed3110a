"""8-bit by 8-bit products: sums are exact, scales follow."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.w8a8 import MOST_COLUMNS, pack

KINDS = ("int8", "e4m3")


def weight(kind, n, k, seed=0):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, (n, k), generator=random, dtype=torch.int8)
    scale = 0.01 + torch.rand(n, generator=random)
    if kind == "e4m3":
        codes = torch.where(codes == -1, 0, codes).view(torch.float8_e4m3fn)  # as bits −1 is NaN
    return codes, scale


@pytest.fixture
def check(obeys_the_rule):
    def run(x, codes, scale, *how):
        packed = pack(codes.to(x.device), scale.to(x.device), *how)
        rows = quantize(x, packed.decoder.takes[0])
        got = multiply(rows, packed)
        exact = rows.values.double() @ codes.to(x.device).double().T
        factor = rows.scale[:, None] * scale.to(x.device)
        if codes.dtype == torch.int8:
            assert torch.equal(got, (exact.float() * rows.scale[:, None] * scale.to(x.device)).to(x.dtype))
        terms = rows.values.double().abs() @ codes.to(x.device).double().abs().T * factor.double()
        plain = (rows.values.float() @ codes.to(x.device).float().T * factor).to(x.dtype)
        obeys_the_rule(got, plain, exact * rows.scale.double()[:, None] * scale.to(x.device).double(), terms)

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "m"), [
    (1, 1, 1), (3, 16, 3), (33, 100, 17), (128, 128, 16), (130, 1152, 1), (130, 1152, 17), (40, 300, 130)])
def test_against_float64(on, randn, check, kind, n, k, m):
    check(randn(m, k, on=on), *weight(kind, n, k))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_comes_to_its_place(on, kind):
    codes, _ = weight(kind, 200, 128)
    packed = pack(codes.to(on[0]), torch.ones(200, device=on[0]))
    rows = quantize(torch.eye(128, dtype=on[1], device=on[0]), packed.decoder.takes[0])
    plain = rows.values.cpu().float().amax() * codes.float().T * rows.scale[:, None].cpu()
    assert torch.allclose(multiply(rows, packed).cpu().float(), plain, rtol=2e-3)


def test_w8a8_refuses_wrong_shapes_and_dtypes():
    with pytest.raises(ValueError, match=r"not torch\.uint8"):
        pack(torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2))
    with pytest.raises(ValueError, match="32 bits"):
        pack(torch.zeros(1, MOST_COLUMNS + 1, dtype=torch.int8), torch.ones(1))
