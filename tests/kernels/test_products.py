"""Products with weights of every format: against float64, over shapes that don't fit, and row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.triton import fp4, fp8, iq4, nf4, trellis, w4a16, w8a8, w8a16, w16a16
from quantkit_kernels.triton.dequantize import apply_gate, dequantize
from quantkit_kernels.triton.embedding import embed
from quantkit_kernels.triton.group_scales import pack_scales, pack_superblocks
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import multiply, plan

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def drawn(top, n, k, seed=0):
    return torch.randint(0, top, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def numbers(n, groups, dtype=torch.float16, seed=1):
    """Scales of a model's size, float32, as ``dtype`` holds them."""
    random = torch.Generator().manual_seed(seed)
    return (0.01 * (0.5 + torch.rand(n, groups, generator=random))).to(dtype).float()


def wide(part, k):
    return part.double().repeat_interleave(k // part.shape[1], 1)


def plain(n, k, group, how):
    weight = (64 * torch.randn(n, k, generator=torch.Generator().manual_seed(0))).round() / 64  # in any dtype
    return lambda to: w16a16.pack(to(weight).to(to.dtype), **how), weight.double()


def int4(n, k, group, how, zeros=False):
    codes, scale = drawn(16, n, k), numbers(n, k // (group or k))
    zero = drawn(16, *scale.shape, 9) if zeros else None
    exact = (codes.double() - (8 if zero is None else wide(zero, k))) * wide(scale, k)
    return lambda to: w4a16.pack(to(codes), to(scale), None if zero is None else to(zero), **how), exact


def int4_zeros(n, k, group, how):
    return int4(n, k, group, how, zeros=True)


def rows_of(pack, floats=False):
    """8-bit weights with a scale a row."""
    def make(n, k, group, how):
        codes, scale = drawn(256, n, k), numbers(n, 1, torch.float32)
        codes[codes & 127 == 127] = 0  # NaN of fp8
        codes = codes.view(torch.float8_e4m3fn if floats else torch.int8)
        return lambda to: pack(to(codes), to(scale)[:, 0], **how), codes.double() * scale.double()

    return make


def nf4_blocks(n, k, group, how):
    codes, top = drawn(16, n, k), numbers(n, k // 64, torch.float32)
    exact = torch.tensor(nf4.LEVELS, dtype=torch.float64)[codes.long()] * wide(top, k)
    return lambda to: nf4.pack(to(codes), to(top).flatten(), **how), exact


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


def trellis_of(bits):
    """Rows are filled up to whole rings, of a gate and of what it opens."""
    def make(n, k, group, how):
        whole = 128 if how.get("gated") else 64
        n = -(-n // whole) * whole
        symbols, scale = drawn(2**bits, n, k), numbers(n, 1, torch.float32)
        later = [symbols.unflatten(0, (-1, 64)).roll(-at, 1).flatten(0, 1).long() for at in range(4)]
        states = sum(symbol << bits * at for at, symbol in enumerate(later)) & 255
        levels = torch.randint(-127, 128, (256,), generator=torch.Generator().manual_seed(bits))
        return lambda to: trellis.pack(to(symbols), to(scale)[:, 0], tuple(levels.tolist()), bits, **how), (
            levels[states].double() * scale.double())

    return make


def fp8_tiles(n, k, group, how):
    codes = drawn(256, n, k)
    codes[codes & 127 == 127] = 0
    scale = numbers(n, k // group, torch.float32) / 10
    return lambda to: fp8.pack(to(codes), to(scale), group=group, **how), (
        codes.view(torch.float8_e4m3fn).double() * wide(scale, k))


# what makes it, the columns of a group, and what columns are a multiple of here
KINDS = {"plain": (plain, 0, 52), "int4 in 32": (int4, 32, 32), "int4 in 64": (int4, 64, 64),
         "int4 in 128": (int4, 128, 128), "int4 in 256": (int4, 256, 256), "int4 a row": (int4, 0, 52),
         "int4 with zero points": (int4_zeros, 32, 32), "int4 with zero points in 64": (int4_zeros, 64, 64),
         "int4 with zero points in 128": (int4_zeros, 128, 128), "int8 a row": (rows_of(w8a16.pack), 0, 52),
         "fp8 a row": (rows_of(fp8.pack, True), 0, 52), "nf4": (nf4_blocks, 64, 64),
         "int4 with minima": (int4_minima, 32, 32), "int4 with minima in 64": (int4_minima, 64, 64),
         "int4 with minima in 128": (int4_minima, 128, 128), "int8 with minima": (int8_minima, 64, 64),
         "int8 with minima in 32": (int8_minima, 32, 32), "superblocks": (superblocks, 32, 256),
         "int8 in 32": (int8_groups, 32, 32), "int8 in 128": (int8_groups, 128, 128),
         "int4 in 16": (int4_fine, 16, 64), "int8 in 16": (int8_fine, 16, 64), "mxfp4": (mxfp4, 32, 32),
         "e2m1 in 64": (mxfp4, 64, 64), "nvfp4": (nvfp4, 16, 64), "iq4_nl": (iq4_nl, 32, 32),
         "iq4 in 128": (iq4_nl, 128, 128), "fp8 tiles": (fp8_tiles, 128, 128),
         **{f"trellis of {bits} bits": (trellis_of(bits), 0, 52) for bits in (2, 3, 4)}}
ROUNDED = {"int8 by int8": (rows_of(w8a8.pack), 0, 52), "fp8 by fp8": (rows_of(w8a8.pack, True), 0, 52)}
"""Kinds whose activations are rounded: their products are in ``test_w8a8.py``."""


def factory(name):
    make, group, step = (KINDS | ROUNDED)[name]
    return lambda n, k, **how: make(n, -(-k // step) * step, group, how)


@pytest.fixture(params=KINDS)
def kind(request):
    """``kind(n, k, …)`` → what packs a weight of about that shape, and the weight in float64."""
    return factory(request.param)


@pytest.fixture(params=KINDS | ROUNDED)
def any_kind(request):
    return factory(request.param)


@pytest.fixture
def there(on):
    def to(part):
        return part.to(on[0])

    to.dtype = on[1]
    return to


def rounded(packed, x):
    return quantize(x, packed.decoder.takes[0]) if packed.decoder.levels else x


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (33, 256, 17), (130, 512, 3), (140, 768, 16),
                                           (70, 256, 70), (17, 600, 200)])
def test_against_float64(on, there, randn, product_obeys_the_rule, kind, n, k, m):
    pack, exact = kind(n, k)
    x = randn(m, exact.shape[1], on=on)
    x[:, 5] += 3  # minima are multiplied by sums
    product_obeys_the_rule(multiply(x, pack(there)), x, exact)


# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
@pytest.mark.sampled(2)
@given(name=st.sampled_from([*KINDS]), m=st.integers(1, 40), n=st.integers(1, 200), k=st.integers(1, 512))
@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shapes_that_nobody_chose(on, there, randn, product_obeys_the_rule, name, m, n, k):
    pack, exact = factory(name)(n, k)
    x = randn(m, exact.shape[1], on=on)
    product_obeys_the_rule(multiply(x, pack(there)), x, exact)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", ["ampere", "hopper", "blackwell", "cdna"])
def test_every_order_of_columns(on, there, randn, product_obeys_the_rule, kind, family):
    if on[0].type == "cuda" and family != "hopper":
        family = None
    pack, exact = kind(130, 256, family=family)
    x = randn(5, exact.shape[1], on=on)
    product_obeys_the_rule(multiply(x, pack(there)), x, exact)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_rows_of_an_embedding(on, there, any_kind, family):
    pack, exact = any_kind(300, 512, family=None if on[0].type == "cuda" else family)
    ids = torch.tensor([0, 299, 7, 8, 127, 128, 7])
    rows = embed(ids.to(on[0]), pack(there), on[1]).cpu().double()
    assert torch.allclose(rows, exact[ids], rtol=torch.finfo(on[1]).eps, atol=1e-6)


def narrowest(kind, there):
    """Columns that several programs share, where one of 16 rows has some: nine tiles of the kind's."""
    return 9 * kind(1, 1)[0](there).bk


@pytest.mark.sampled(24)
def test_a_row_does_not_depend_on_the_others(on, there, randn, rows_stand_alone, any_kind):
    packed = any_kind(150, narrowest(any_kind, there))[0](there)
    rows_stand_alone(packed, randn(16, packed.k, on=on), lambda x: rounded(packed, x))


@pytest.mark.sampled(24)
def test_one_program_or_many_give_the_same_bits(on, there, randn, any_kind):
    packed = any_kind(100, narrowest(any_kind, there))[0](there)
    plans = [plan(100, packed.words.shape[1], m, packed.bk, "hopper", packed.group > 0) for m in (16, 140)]
    assert plans[0].split and not plans[1].split
    x = randn(140, packed.k, on=on)
    together = multiply(rounded(packed, x), packed)
    assert torch.isfinite(together).all()
    for m in (1, 17, 64):
        assert torch.equal(multiply(rounded(packed, x[:m]), packed), together[:m])


@pytest.mark.sampled(8)
def test_a_gate_beside_what_it_opens(on, there, randn, kind):
    gated = kind(140, 256, gated=True)[0](there)
    n = gated.n
    plain = kind(n, 256)[0](there)
    x = randn(3, plain.k, on=on)
    y = multiply(x, plain).float()
    got = multiply(x, gated, gated="silu")
    near = torch.nn.functional.silu(y[:, :n // 2]) * y[:, n // 2:]
    assert torch.allclose(got.float(), near, rtol=6e-3, atol=6e-3 * float(near.abs().max()))
    assert torch.equal(multiply(x[:1], gated, gated="silu"), got[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
def test_large_products_give_the_same_bits(on, there, randn, any_kind, n, k):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for gated in (False, True):
        packed = any_kind(n, k, gated=gated)[0](there)
        x, gate = randn(1024, packed.k, on=on), "silu" if gated else None
        whole = multiply(rounded(packed, x), packed, gated=gate)
        for m in (1, 16, 17, 64, 130, 33, 128, 256, 257, 512):
            assert torch.equal(multiply(rounded(packed, x[:m]), packed, gated=gate), whole[:m]), m


def test_every_code_is_exact(on, there):
    """Each code, and each zero point, alone in a column of a product with the identity."""
    zero = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 4)
    four = torch.arange(16, dtype=torch.uint8).repeat(16, 8)
    eight = torch.arange(-128, 128).to(torch.int8).reshape(4, 64)
    floats = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    floats = torch.stack([floats.roll(at) for at in range(128)], 1).contiguous().view(torch.float8_e4m3fn)
    places = (torch.arange(200 * 128).reshape(200, 128) % 2039).to(on[1])
    ones, orders = torch.ones(300), (None,) if on[0].type == "cuda" else ("ampere", "hopper")
    levels = torch.tensor(nf4.LEVELS).to(on[1]).repeat(16, 4)
    cases = [(w4a16.pack(there(four), there(torch.ones(16, 4)), there(zero)), four.int() - zero[:, :1].int()),
             (w8a16.pack(there(eight), there(ones[:4])), eight), (w16a16.pack(there(places)), places),
             (nf4.pack(there(four[:, :64]), there(ones[:16])), levels),
             *((fp8.pack(there(floats), there(ones[:254]), family), floats) for family in orders)]
    for packed, exact in cases:
        got = multiply(torch.eye(packed.k, dtype=on[1], device=on[0]), packed)
        assert torch.equal(got.cpu().float(), exact.T.float())


def test_groups_without_a_scale_outliers_and_a_common_mean(on, there, randn, product_obeys_the_rule):
    x = randn(4, 256, on=on)
    x[1, 7] = 1000
    codes, scale = drawn(16, 20, 256), numbers(20, 4)
    scale[:, 1] = scale[3] = 0
    levels = torch.tensor(nf4.LEVELS, dtype=torch.float64)[codes.long()]
    for packed, mean, exact in (
            (w4a16.pack(there(codes), there(scale)), 3, (codes.double() - 8) * wide(scale, 256)),
            (nf4.pack(there(codes), there(scale).flatten()), 0, levels * wide(scale, 256)),
            (w8a16.pack(there(codes).view(torch.int8), there(scale[:, 0])), 0,
             codes.double() * scale[:, :1].double())):
        got = multiply(x + mean, packed)
        product_obeys_the_rule(got, x + mean, exact)
        assert (got[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_beside_zero_points(on, there, randn, product_obeys_the_rule, dtype):
    codes, scale, zero = drawn(16, 20, 128), numbers(20, 4, dtype), drawn(16, 20, 4, 9)
    x = randn(2, 128, on=on)
    exact = (codes.double() - wide(zero, 128)) * wide(scale, 128)
    product_obeys_the_rule(multiply(x, w4a16.pack(there(codes), there(scale), there(zero))), x, exact)


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


def test_pack_refuses_what_does_not_exist():
    codes, scale = drawn(16, 4, 64), numbers(4, 2)
    zero = drawn(16, 4, 2)
    for what, pack in (("multiple of 128", lambda: fp4.pack(drawn(16, 4, 96), torch.ones(4, 2))),
                       ("multiple of 128", lambda: w4a16.pack(drawn(16, 4, 96), torch.ones(4, 2))),
                       ("exactly", lambda: w4a16.pack(codes, scale * 1.0001, zero)),
                       ("multiple of 64", lambda: nf4.pack(drawn(16, 2, 96), torch.ones(3))),
                       (r"not torch\.float64", lambda: w16a16.pack(torch.zeros(2, 2, dtype=torch.float64)))):
        with pytest.raises(ValueError, match=what):
            pack()
    assert w4a16.pack(codes, scale * 1.0001).mode == "symmetric"


def test_bits_come_to_where_bfloat16_wants_them():
    """The steps that decode fp8, in integers: the interpreter doesn't compute in bfloat16."""
    def bfloat16(bits):
        return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).double()

    known = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    codes = known[torch.randint(0, len(known), (4000, 4), generator=torch.Generator().manual_seed(0))]
    exact = codes.view(torch.float8_e4m3fn).double()
    for word, values in zip(fp8.spread(codes.view(torch.int32)[:, 0]).tolist(), exact.tolist()):
        word &= 0xFFFFFFFF
        turned = word >> 4 | word << 28 & 0xFFFFFFFF
        first, second = word & 0x87F087F0, (turned & 0x87808780) | (word << 4 & 0x00700070)
        for pair, (low, high) in ((first, values[::2]), (second, values[1::2])):
            got = bfloat16([(half ^ 0x8000) - 0x8000 for half in (pair & 0xFFFF, pair >> 16)]) * 2.0**120
            assert got.tolist() == [low, high]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", [{}, {"gated": True}], ids=["", "gated"])
def test_numbers_row_by_row(on, there, kind, how, request):
    """Every number is rounded once, NF4's levels before, and nothing behind them is written."""
    pack, exact = kind(134, 300, **how)
    out = torch.full((exact.numel() + 1,), torch.nan, dtype=there.dtype, device=on[0])
    numbers = dequantize(pack(there), out)
    assert torch.isnan(out[-1])
    allowed = torch.finfo(there.dtype).eps * (1.01 if "nf4" in request.node.name else 0.51)
    assert ((numbers.double().cpu() - exact).abs() <= allowed * exact.abs() + 2.0**-24).all()


def test_weights_that_are_not_made_of_numbers():
    pack, _ = factory("int8 by int8")(64, 64)
    with pytest.raises(ValueError, match="rounded for it"):
        dequantize(pack(lambda part: part), torch.empty(64 * 64))
    pack, _ = factory("int4 in 32")(64, 64)
    with pytest.raises(ValueError, match=r"64 . 64 numbers in a row"):
        dequantize(pack(lambda part: part), torch.empty(64 * 64 - 1))


def clamped(gate, up):
    gate = gate.clamp(max=1.5)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-1.5, 1.5) + 1)


@pytest.mark.parametrize(("activation", "opens"), [
    ("silu", lambda gate, up: torch.nn.functional.silu(gate) * up),
    ("gelu_tanh", lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up), (1.5, clamped)])
def test_a_gate_and_what_it_opens(on, there, randn, obeys_the_rule, activation, opens):
    x = randn(3, 2 * 1100, on=on)
    obeys_the_rule(apply_gate(x, activation), opens(*x.chunk(2, 1)), opens(*x.double().chunk(2, 1)))
    with pytest.raises(ValueError, match="even number"):
        apply_gate(x[:, 1:], activation)
