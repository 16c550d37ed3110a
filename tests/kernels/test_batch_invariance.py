"""A row's bits don't depend on how many rows there are: in every format, however the work is cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quantkit_kernels.triton import fp8, nf4, w4a16, w8a8, w8a16, w16a16
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import multiply, plan

ROWS = (1, 16, 17, 64, 130)


def make(name, n, k, device, dtype, **how):
    """A weight of random codes."""
    random = torch.Generator().manual_seed(0)
    four = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8).to(device)
    eight = torch.randint(-127, 127, (n, k), generator=random, dtype=torch.int8)
    eight = torch.where(eight == -1, 0, eight).to(device)  # as bits of fp8 −1 is NaN
    scale = 0.001 * torch.rand(n, generator=random).to(device)
    match name:
        case "w16a16":
            return w16a16.pack(0.02 * torch.randn(n, k, generator=random).to(dtype).to(device), **how)
        case "w4a16":
            scales = scale[:, None].half().float().repeat(1, k // 32)
            return w4a16.pack(four, scales, four[:, :k // 32], **how)
        case "nf4":
            return nf4.pack(four, 0.1 * torch.rand(n * k // 64, generator=random).to(device), **how)
        case "fp8a8":
            return w8a8.pack(eight.view(torch.float8_e4m3fn), scale, **how)
    return {"w8a16": w8a16.pack, "fp8": fp8.pack, "w8a8": w8a8.pack}[name](eight, scale, **how)


def operand(packed, x):
    return quantize(x, packed.decoder.takes[0]) if packed.decoder.levels else x


def check(packed, x, rows, gated=None):
    again = partial(multiply, w=packed, gated=gated)
    whole = again(operand(packed, x))
    assert torch.isfinite(whole).all()
    for m in rows:
        assert torch.equal(again(operand(packed, x[:m])), whole[:m]), m


NAMES = ("w16a16", "w4a16", "w8a16", "fp8", "nf4", "w8a8", "fp8a8")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_programs_or_one_after_the_other(on, randn, name):
    packed = make(name, 100, 1152 if name in ("w8a8", "fp8a8") else 576, *on)
    plans = [plan(100, packed.words.shape[1], m, packed.bk, "hopper", packed.group > 0) for m in (16, 300)]
    assert plans[0].split and not plans[1].split
    check(packed, randn(300, packed.k, on=on), ROWS)


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_behind_a_gate(on, randn, name):
    check(make(name, 100, 1152, *on, gated=True), randn(130, 1152, on=on), (1, 17), "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large(randn, name, n, k, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    on = torch.device("cuda"), dtype
    x = randn(1024, k, on=on)
    for gated in (None, "silu"):
        check(make(name, n, k, *on, gated=gated is not None), x, (*ROWS, 33, 128, 256, 257, 512), gated)
