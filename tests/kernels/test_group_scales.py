"""Weights with minima, groups of 16, 4-bit floats, IQ4_NL's levels and fp8 tiles, against float64."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton import fp4, fp8, iq4, w4a16, w8a16
from quantkit_kernels.triton.embedding import embed
from quantkit_kernels.triton.group_scales import pack_scales, pack_superblocks
from quantkit_kernels.triton.matmul import multiply

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def drawn(top, n, k, seed=0):
    return torch.randint(0, top, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def numbers(n, groups, dtype=torch.float16, seed=1):
    """Scales of a model's size, float32, as ``dtype`` holds them."""
    random = torch.Generator().manual_seed(seed)
    return (0.01 * (0.5 + torch.rand(n, groups, generator=random))).to(dtype).float()


def wide(part, k):
    return part.double().repeat_interleave(k // part.shape[1], 1)


def int4_minima(n, k, group, how, dtype=torch.float16):
    codes, scale, low = drawn(16, n, k), numbers(n, k // group, dtype), -8 * numbers(n, k // group, dtype, 2)
    low = low.to(dtype).float()
    exact = codes.double() * wide(scale, k) + wide(low, k)
    return lambda to: w4a16.pack_minima(to(codes), pack_scales(to(scale), to(low), **gate(how)), group,
                                        **how), exact


def gate(how):
    return {"gated": how["gated"]} if "gated" in how else {}


def int8_minima(n, k, group, how, dtype=torch.bfloat16, bits=8):
    codes, scale, low = drawn(2**bits, n, k), numbers(n, k // group, dtype), -100 * numbers(n, k // group)
    low = low.to(dtype).float()
    exact = codes.double() * wide(scale, k) + wide(low, k)
    stored = (codes ^ (128 if bits == 8 else 0)).view(torch.int8)
    return lambda to: w8a16.pack_groups(to(stored), pack_scales(to(scale), to(low), **gate(how)), group,
                                        unsigned=bits == 8, **how), exact


def superblocks(n, k, group, how):
    counts = [drawn(64, n, k // 32, seed) for seed in (3, 4)]
    outer = [numbers(n, k // 256, seed=seed).half() for seed in (5, 6)]
    outer[1] = -outer[1]
    codes = drawn(16, n, k)
    scale, low = (count.double() * wide(number, k // 32) for count, number in zip(counts, outer))
    return lambda to: w4a16.pack_minima(to(codes), pack_superblocks(
        [to(count) for count in counts], [to(number) for number in outer], **gate(how)), 32, **how), (
        codes.double() * wide(scale, k) + wide(low, k))


def int8_groups(n, k, group, how, dtype=torch.float16):
    codes, scale = drawn(256, n, k).view(torch.int8), numbers(n, k // group, dtype)
    scale[:, ::2] *= -1
    return lambda to: w8a16.pack_groups(to(codes), pack_scales(to(scale), **gate(how)), group, **how), (
        codes.double() * wide(scale, k))


def int4_fine(n, k, group, how):
    codes, scale = drawn(16, n, k), numbers(n, k // 16)
    return lambda to: w4a16.pack_fine(to(codes), to(scale), **how), (codes.double() - 8) * wide(scale, k)


def int8_fine(n, k, group, how):
    codes, scale = drawn(256, n, k).view(torch.int8), numbers(n, k // 16)
    return lambda to: w8a16.pack_fine(to(codes), to(scale), **how), codes.double() * wide(scale, k)


def mxfp4(n, k, group, how):
    codes, powers = drawn(16, n, k), (drawn(6, n, k // group, 8).float() - 9).exp2()
    return lambda to: fp4.pack(to(codes), to(powers), **how), E2M1.double()[codes.long()] * wide(powers, k)


def nvfp4(n, k, group, how):
    codes, scale = drawn(16, n, k), drawn(127, n, k // 16, 7).view(torch.float8_e4m3fn)
    outer = torch.tensor(3e-4)
    return lambda to: fp4.pack_fine(to(codes), to(scale), to(outer), **how), (
        E2M1.double()[codes.long()] * wide(scale, k) * outer.double())


def iq4_nl(n, k, group, how):
    codes, scale = drawn(16, n, k), numbers(n, k // group) / 16
    scale = scale.half().float()
    return lambda to: iq4.pack(to(codes), pack_scales(to(scale), **gate(how)), group, **how), (
        torch.tensor(iq4.LEVELS).double()[codes.long()] * wide(scale, k))


def fp8_tiles(n, k, group, how):
    codes = drawn(256, n, k)
    codes[codes & 127 == 127] = 0
    scale = numbers(n, k // group, torch.float32) / 10
    return lambda to: fp8.pack(to(codes), to(scale), group=group, **how), (
        codes.view(torch.float8_e4m3fn).double() * wide(scale, k))


KINDS = {"int4 with minima": (int4_minima, 32), "int4 with minima in 64": (int4_minima, 64),
         "int4 with minima in 128": (int4_minima, 128), "int8 with minima": (int8_minima, 64),
         "int8 with minima in 32": (int8_minima, 32), "superblocks": (superblocks, 32),
         "int8 in 32": (int8_groups, 32), "int8 in 128": (int8_groups, 128), "int4 in 16": (int4_fine, 16),
         "int8 in 16": (int8_fine, 16), "mxfp4": (mxfp4, 32), "e2m1 in 64": (mxfp4, 64), "nvfp4": (nvfp4, 16),
         "iq4_nl": (iq4_nl, 32), "iq4 in 128": (iq4_nl, 128), "fp8 tiles": (fp8_tiles, 128)}


@pytest.fixture(params=KINDS)
def kind(request):
    make, group = KINDS[request.param]
    return lambda n, k, **how: make(n, k, group, how)


@pytest.fixture
def there(on):
    return lambda part: part.to(on[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("n", "k", "m"), [(1, 256, 1), (33, 256, 17), (130, 512, 3), (140, 768, 16),
                                           (70, 256, 70)])
def test_against_float64(on, there, randn, product_obeys_the_rule, kind, n, k, m):
    pack, exact = kind(n, k)
    x = randn(m, k, on=on)
    x[:, 5] += 3  # minima are multiplied by sums
    product_obeys_the_rule(multiply(x, pack(there)), x, exact)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", ["ampere", "hopper", "blackwell", "cdna"])
def test_every_order_of_columns(on, there, randn, product_obeys_the_rule, kind, family):
    if on[0].type == "cuda" and family != "hopper":
        family = None
    pack, exact = kind(130, 256, family=family)
    x = randn(5, 256, on=on)
    product_obeys_the_rule(multiply(x, pack(there)), x, exact)


@pytest.mark.sampled(4)
def test_rows_of_an_embedding(on, there, kind):
    pack, exact = kind(140, 512)
    ids = torch.tensor([0, 139, 8, 127, 128, 5, 5])
    rows = embed(ids.to(on[0]), pack(there), on[1]).cpu().double()
    assert torch.allclose(rows, exact[ids], rtol=torch.finfo(on[1]).eps, atol=1e-6)


@pytest.mark.sampled(4)
def test_a_row_does_not_depend_on_the_others(on, there, randn, rows_stand_alone, kind):
    pack, _ = kind(150, 1280)
    rows_stand_alone(pack(there), randn(16, 1280, on=on))


@pytest.mark.sampled(4)
def test_one_program_or_many_give_the_same_bits(on, there, randn, kind):
    packed, x = kind(100, 768)[0](there), randn(300, 768, on=on)
    together = multiply(x, packed)
    for m in (1, 16, 17, 130):
        assert torch.equal(multiply(x[:m], packed), together[:m])


@pytest.mark.sampled(4)
def test_a_gate_beside_what_it_opens(on, there, randn, kind):
    x, n = randn(3, 256, on=on), 140
    y = multiply(x, kind(n, 256)[0](there)).float()
    got = multiply(x, kind(n, 256, gated=True)[0](there), gated="silu").float()
    near = torch.nn.functional.silu(y[:, :n // 2]) * y[:, n // 2:]
    assert torch.allclose(got, near, rtol=6e-3, atol=6e-3 * float(near.abs().max()))


def test_scales_take_as_few_bits_as_hold_them():
    n, k, bits = 128, 1024, 8 / 128 / 1024
    scale, low = numbers(n, 32), numbers(n, 32)
    for parts, layout, each in ((pack_scales(scale), "float16", 0.5),
                                (pack_scales(scale, low), "float16 low", 1),
                                (pack_scales(scale.bfloat16().float()), "bfloat16", 0.5),
                                (pack_scales(scale * 1.0001), "float32", 1),
                                (pack_scales(scale * 1.0001, low), "float32 low", 2),
                                (pack_scales(torch.full((n, 32), 2.0**-127), powers=True), "e8m0", 0.25)):
        assert parts[1] == layout and parts[0].nbytes * bits == each
    assert superblocks(n, k, 32, {})[0](lambda part: part).scale.nbytes * bits == 0.5 + 0.125
    fine = nvfp4(n, k, 16, {})[0](lambda part: part)
    assert (fine.scale.nbytes - 4 * n) * bits == 0.5


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_every_product_of_level_and_e4m3_scale_is_exact(on, family):
    """Each of 16 codes by each of 127 scales, subnormal ones too."""
    if on[0].type == "cuda" and family != "hopper":
        family = None
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 4)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 4).view(torch.float8_e4m3fn)
    packed = fp4.pack_fine(codes.to(on[0]), scale.to(on[0]), torch.ones((), device=on[0]), family)
    got = multiply(torch.eye(64, dtype=on[1], device=on[0]), packed).cpu().float()
    exact = (E2M1[codes.long()] * scale.float().repeat_interleave(16, 1)).T
    assert torch.equal(got, exact.to(on[1]).float())


def test_pack_refuses_groups_that_do_not_exist():
    with pytest.raises(ValueError, match="multiple of 128"):
        fp4.pack(drawn(16, 4, 96), torch.ones(4, 2))
