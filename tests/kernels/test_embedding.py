"""Rows of a packed weight, looked up."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.reference import dequantize_int, dequantize_nf4
from quantkit_kernels.triton import fp8, nf4, w4a16, w8a8, w8a16, w16a16
from quantkit_kernels.triton.embedding import embed

N, K = 300, 192
IDS = [0, 299, 7, 8, 130, 7, 64]


def weights(name, family):
    """Packed, and the same in float64."""
    random = torch.Generator().manual_seed(0)
    four = torch.randint(0, 16, (N, K), generator=random, dtype=torch.uint8)
    eight = torch.randint(-127, 127, (N, K), generator=random, dtype=torch.int8)
    scale = torch.rand(N, generator=random)
    floats = torch.where(eight == -1, 0, eight).view(torch.float8_e4m3fn)
    match name:
        case "int4 g32" | "int4 g64":
            scale = torch.rand(N, K // int(name[-2:]), generator=random)
            return w4a16.pack(four, scale, None, family), dequantize_int(four, scale, 8)
        case "int4 zp":
            scale, zero = torch.rand(N, 6, generator=random).half().float(), four[:, :6]
            return w4a16.pack(four, scale, zero, family), dequantize_int(four, scale, zero)
        case "int8":
            return w8a16.pack(eight, scale, family), dequantize_int(eight, scale[:, None])
        case "w8a8":
            return w8a8.pack(eight, scale, family), dequantize_int(eight, scale[:, None])
        case "fp8":
            return fp8.pack(floats, scale, family), floats.double() * scale.double()[:, None]
        case "nf4":
            top = torch.rand(N * K // 64, generator=random)
            return nf4.pack(four, top, family), dequantize_nf4(four, top, nf4.LEVELS)
    plain = torch.randn(N, K, generator=random)
    return w16a16.pack(plain, family), plain.double()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["ampere", "hopper"])
@pytest.mark.parametrize("name", ["int4 g32", "int4 g64", "int4 zp", "int8", "w8a8", "fp8", "nf4", "plain"])
def test_rows(on, name, family):
    packed, plain = weights(name, family)
    for part in ("words", "scale"):
        if (t := getattr(packed, part)) is not None:
            object.__setattr__(packed, part, t.to(on[0]))
    got = embed(torch.tensor(IDS, device=on[0]), packed, on[1])
    assert got.shape == (len(IDS), K) and got.dtype == on[1]
    assert torch.allclose(got.cpu().double(), plain[IDS], rtol=torch.finfo(on[1]).eps, atol=1e-6)


def test_into_a_part_of_a_wider_buffer(on, randn):
    weight = randn(20, 600, on=on)
    buffer = weight.new_full((3, 1000), float("nan"))
    out = buffer[:, 16:616]
    ids = torch.tensor([3, 0, 19], dtype=torch.int32, device=on[0])
    assert embed(ids, w16a16.pack(weight), on[1], out=out) is out
    assert torch.equal(out, weight[ids]) and buffer[:, :16].isnan().all() and buffer[:, 616:].isnan().all()
    assert embed(ids[:0], w16a16.pack(weight), on[1]).shape == (0, 600)


def test_embed_refuses_wrong_shapes_and_dtypes():
    packed, ids = w16a16.pack(torch.zeros(4, 8)), torch.zeros(2, dtype=torch.int64)
    for one, w, out in ((ids[None], packed, None), (ids.float(), packed, None),
                        (ids, w16a16.pack(torch.zeros(4, 8), gated=True), None),
                        (ids, packed, torch.zeros(2, 7))):
        with pytest.raises(ValueError, match="must be"):
            embed(one, w, torch.float32, out=out)
