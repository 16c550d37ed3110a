"""Products of every format: the reference's bits, and fp64 within the error rule."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.cpu import decoders, pack
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.matmul import MOST_COLUMNS, Matmul
from quantkit_kernels.cpu.scales import ScaleLayout
from quantkit_kernels.cpu.weight_decoder import BYTES, SUB, WORDS
from tests.kernels.cpu import reference

TABLE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
         0.7229568362236023, 1.0)
NF4 = decoders.nf4(TABLE)
TOKENS = ("w8a8", "e4m3_tokens")
KINDS = ("bf16", "f16", "f32", "int8", "int8 g64", "int8 zp", "int8 g64 zp", *TOKENS, "e4m3",
         "int4", "int4 zp", "int4 g32", "int4 g64", "int4 g128", "int4 g32 zp", "int4 g128 zp", "nf4 g32",
         "nf4 g64", "trellis2 w10", "trellis2 w16", "trellis3 w12", "trellis4 w13", "trellis4 w16")
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 33, 63, 64, 65, 97, 127, 129)


CODE = (0x9E35, 0x6A4D, 30)


def trellis_values(symbols, width, window):
    """Of symbols ``[n, k]``: row r of a tile is place ``4 (r % 16) + r // 16`` of its ring."""
    rows = torch.arange(64)
    places = 4 * (rows % 16) + rows // 16
    order = places.argsort()
    state = torch.zeros_like(symbols.int()).unflatten(0, (-1, 64))
    for back in range(16):
        earlier = order[(places - back) % 64]
        if back * width < window:
            state += symbols.int().unflatten(0, (-1, 64))[:, earlier] << back * width
    state %= 2**window
    mixed = state * CODE[0] % 65536 ^ state * CODE[1] // 65536
    return (sum(mixed // 16**digit % 16 for digit in range(4)) - CODE[2]).flatten(0, 1)


class Case:
    """A weight of some kind ``[n, k]`` and how it is stored; ``weight`` is what it means, in float64."""

    def __init__(self, kind, n, k, seed, *, zero_groups=False):
        make = torch.Generator().manual_seed(seed)
        name, *rest = kind.split()
        group, zp = next((int(one[1:]) for one in rest if one[0] == "g"), 0), "zp" in rest
        self.multiple = max(group, SUB)
        self.k = -(-k // self.multiple) * self.multiple
        groups = self.k // group if group else 1
        scale = torch.rand(n, groups, generator=make) * 0.1 + 0.01
        if zero_groups:
            scale[torch.rand(n, groups, generator=make) < 0.3] = 0
        self.zeros = None
        if name == "bf16":
            weight = torch.randn(n, k, generator=make).bfloat16()
            self.matmul, self.weight = Matmul(decoders.BF16, None), weight.double()
            self.pack = lambda lanes: (pack.bf16(weight, lanes), None, None)
            self.exact = lambda x: reference.float_matmul(x, _pad(weight.float(), self.k).numpy())
            return
        if name in ("f16", "f32"):
            decoder = decoders.FP16 if name == "f16" else decoders.FP32
            weight = torch.randn(n, k, generator=make).to(torch.float16 if name == "f16" else torch.float32)
            weight[0, 0] = 1e-7  # a subnormal float16
            self.matmul, self.weight = Matmul(decoder, None), weight.double()
            self.pack = lambda lanes: (pack.floats(weight, lanes), None, None)
            self.exact = lambda x: reference.float_matmul(
                x, _pad(weight.float(), self.k).numpy(), decoder.split_sums)
            return
        if name in ("w8a8", "e4m3", "e4m3_tokens"):
            self._eight_bit(name, n, k, scale, make)
            return
        family, dtype = WORDS, torch.float32
        if name.startswith("trellis"):
            width, window = int(name[-1]), int(rest[0][1:])
            codes = torch.randint(0, 2**width, (-(-n // 64) * 64, k), generator=make, dtype=torch.uint8)
            levels, decoder = trellis_values(codes, width, window)[:n], decoders.trellis(width, window, CODE)
        elif name == "int8":
            codes = torch.randint(-128, 128, (n, k), generator=make, dtype=torch.int8)
            levels, decoder, dtype = codes.int(), decoders.INT8, torch.bfloat16
            if zp:
                zero = torch.randint(-128, 128, (n, groups), generator=make, dtype=torch.int8)
                self.zeros, levels = zero.view(torch.uint8), levels - self._wide(zero, group, k)
        else:
            codes = torch.randint(0, 16, (n, k), generator=make, dtype=torch.uint8)
            if name == "nf4":
                levels, decoder = (torch.tensor(TABLE)[codes.long()] * decoders.NF4_LEVELS).round().int(), NF4
                scale = scale / decoders.NF4_LEVELS
            else:
                family, decoder, dtype = BYTES, decoders.INT4, torch.bfloat16
                zero = torch.randint(0, 16, (n, groups), generator=make, dtype=torch.uint8) if zp else None
                if zero is not None:
                    self.zeros = zero
                    levels = codes.int() - self._wide(zero, group, k)
                else:
                    levels = codes.int() - 8
        scale = scale.to(dtype)
        self.matmul = Matmul(decoder, group, ScaleLayout("bf16" if dtype == torch.bfloat16 else "f32"), zp)
        wide = scale.double().repeat_interleave(group or self.k, 1)[:, :k]
        if name == "nf4":
            self.weight = torch.tensor(TABLE, dtype=torch.float64)[codes.long()] * decoders.NF4_LEVELS * wide
        else:
            self.weight = levels.double() * wide
        packer = getattr(pack, name, lambda codes, *_: pack.trellis(codes, width))
        self.pack = lambda lanes: (packer(codes, lanes, self.multiple), pack.scales(scale, lanes),
                                   None if self.zeros is None else pack.scales(self.zeros, lanes))
        self.exact = lambda x: reference.integer_matmul(x, _pad(levels, self.k).numpy(),
                                                        scale.float().numpy(), family, group)

    def _wide(self, zero, group, k):
        return zero.int().repeat_interleave(group or self.k, 1)[:, :k]

    def _eight_bit(self, name, n, k, scale, make):
        """int8 with every code, or e4m3 with every code but NaN, and a scale a row."""
        codes = torch.randint(0, 256, (n, k), generator=make, dtype=torch.uint8)
        if name == "w8a8":
            levels, decoder, packer = codes.float() - 128, decoders.W8A8, pack.w8a8
        else:
            codes[codes & 0x7F == 0x7F] = 1
            levels, packer = codes.view(torch.float8_e4m3fn).float(), pack.e4m3
            decoder = decoders.E4M3 if name == "e4m3" else decoders.E4M3_TOKENS
        self.matmul = Matmul(decoder, 0)
        self.weight = levels.double() * scale.double()
        self.pack = lambda lanes: (packer(codes, lanes), pack.scales(scale, lanes), None)
        padded = _pad(levels, self.k).numpy()
        if name == "e4m3":
            self.exact = lambda x: reference.float_matmul(x, padded) * scale.numpy()[:, 0]
        else:
            self.exact = lambda x: reference.token_matmul(x, padded, scale.numpy(), decoder.family)


def _pad(x, k):
    return torch.nn.functional.pad(x, (0, k - x.shape[1]))


def activations(m, k, padded, seed, outlier=False, zeros=False):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    if outlier and k:
        x[:, k // 2] *= 1000
    if zeros:
        x[:, :k // 2] = 0
    return _pad(x, padded).contiguous()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 9])
def test_the_bits_of_the_reference(isa, multiply, same, kind, m):
    case = Case(kind, 65, 192, 0)
    x = activations(m, 192, case.k, 1)
    found = multiply(isa, case.matmul, x, *case.pack(isa.lanes), 65)
    same(found, case.exact(x.numpy())[:, :65])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), n=st.sampled_from(SIZES), k=st.sampled_from(SIZES), m=st.integers(1, 20),
       seed=st.integers(0, 99), outlier=st.booleans(), zeros=st.booleans(), zero_groups=st.booleans())
def test_near_float64_over_random_shapes(multiply, fastest, kind, n, k, m, seed, outlier, zeros, zero_groups):
    """At most twice what torch loses in bfloat16; int8 activations lose what their step says."""
    case = Case(kind, n, k, seed, zero_groups=zero_groups)
    x = activations(m, k, case.k, seed + 1, outlier, zeros)
    found = multiply(fastest, case.matmul, x, *case.pack(fastest.lanes), n).double()
    true = x[:, :k].double() @ case.weight.T
    assert torch.isfinite(found).all()
    if kind in TOKENS:  # half a step of integers, or of the last of four bits
        size = x[:, :k].double().abs()
        step = size / 16 if kind == "e4m3_tokens" else torch.zeros_like(size)
        least = size.amax(1, keepdim=True).clamp_min(1e-30) / (127 if kind == "w8a8" else 448 * 2**9) / 2
        allowed = torch.maximum(step, least) @ case.weight.abs().T + 1e-5 * (size @ case.weight.abs().T)
    elif case.matmul.decoder.family is BYTES:
        groups = x.abs().unflatten(1, (-1, SUB)).amax(-1).clamp_min(1e-30).double()
        step = (groups / 127).repeat_interleave(SUB, 1)[:, :k]
        allowed = 0.5 * step @ case.weight.abs().T + 1e-5 * (x[:, :k].double().abs() @ case.weight.abs().T)
    else:
        rounded = (x[:, :k].bfloat16().double() - x[:, :k].double()).abs()
        lost = rounded @ case.weight.abs().T
        lowest = x[:, :k].double().abs() @ case.weight.abs().T
        groups = x.abs().unflatten(1, (-1, SUB)).amax(-1).double() / 8191
        step = groups.repeat_interleave(SUB, 1)[:, :k] @ case.weight.abs().T
        table = 6.2e-5 * (x[:, :k].double().abs() @ case.weight.abs().amax().expand(n, k).T)
        allowed = 2 * lost + 1e-5 * lowest + 0.5 * step + (table if "nf4" in kind else 0)
    assert ((found - true).abs() <= allowed + 1e-12).all()


@pytest.mark.parametrize(("kind", "most"), [("bf16", 1), ("f16", 1), ("f32", 2), ("int8", 1), ("nf4 g64", 1),
                                            ("int4 g64", 3), ("int4 g128 zp", 3)])
@pytest.mark.parametrize("m", [1, 16])
def test_the_error_beside_that_of_torch(multiply, fastest, kind, most, m):
    """torch multiplies the same weights in their dtype, quantized ones in bfloat16, and loses on its result
    too. int8 activations cost more than that, and far less than weights of 4 bits do, which is all that they
    are used for."""
    case = Case(kind, 256, 1024, 9)
    x = activations(m, 1024, case.k, 10)
    true = x.double() @ case.weight.T

    def error(found):
        return ((found.double() - true).norm() / true.norm()).item()

    dtype = {"f16": torch.float16, "f32": torch.float32}.get(kind, torch.bfloat16)
    theirs = error(torch.nn.functional.linear(x.to(dtype), case.weight.to(dtype)))
    ours = error(multiply(fastest, case.matmul, x, *case.pack(fastest.lanes), 256))
    assert ours <= most * theirs
    if most > 2:  # half a step of 16 levels, evenly spread
        rounding = (12**-0.5 * case.weight.abs().amax() / 8) / case.weight.square().mean().sqrt()
        assert ours < rounding / 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_thread(isa, multiply, kind):
    case = Case(kind, 97, 224, 3)
    x = activations(23, 224, case.k, 4)
    packed = case.pack(isa.lanes)
    alone = torch.cat([multiply(isa, case.matmul, x[i:i + 1], *packed, 97) for i in range(23)])
    for rows in (2, 3, 4, 5, 8, 9, 16, 23):
        assert torch.equal(multiply(isa, case.matmul, x[:rows], *packed, 97), alone[:rows])
    for units in ({"stripes_a_unit": 3}, {"rows_a_unit": 5}, {"stripes_a_unit": 2, "rows_a_unit": 8}):
        assert torch.equal(multiply(isa, case.matmul, x, *packed, 97, threads=2, **units), alone)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_agree(isa, multiply, kind):
    case = Case(kind, 33, 160, 5)
    x = activations(6, 160, case.k, 6, outlier=True)
    assert torch.equal(multiply(isa, case.matmul, x, *case.pack(isa.lanes), 33),
                       multiply(PLAIN, case.matmul, x, *case.pack(PLAIN.lanes), 33))


@pytest.mark.parametrize("kind", ("bf16", "f16", "f32", "int4 g32"))
def test_bias_and_residual_are_added_last(isa, multiply, same, kind):
    case = Case(kind, 40, 64, 7)
    x, bias, held = activations(5, 64, case.k, 8), torch.randn(64), torch.randn(5, 40)
    plain = multiply(isa, case.matmul, x, *case.pack(isa.lanes), 40)
    found = multiply(isa, case.matmul, x, *case.pack(isa.lanes), 40, bias=bias, add=held)
    same(found, held + (plain + bias[:40]))


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_row_of_int8_fits_32_bits(isa, multiply, m, sign):
    """Sums may wrap on the way, where weights are multiplied as unsigned; what comes out may not."""
    codes = torch.zeros(32, MOST_COLUMNS, dtype=torch.uint8)
    x = torch.full((m, MOST_COLUMNS), 127.0 * sign)
    found = multiply(isa, Matmul(decoders.W8A8, 0), x, pack.w8a8(codes, isa.lanes),
                     pack.scales(torch.ones(32, 1), isa.lanes), n=32)
    assert torch.equal(found, torch.full((m, 32), -128.0 * 127 * sign * MOST_COLUMNS))


@pytest.mark.sampled(3)
def test_the_largest_sums_fit(isa, multiply, same):
    """Every code and activation at its limit: integers that overflow would change sign."""
    codes = torch.full((32, 64), 15, dtype=torch.uint8)
    lowest = torch.full((32, 1), -128, dtype=torch.int8).view(torch.uint8)
    for matmul, packed, levels, *zeros in (
            (Matmul(decoders.INT4, 0), pack.int4(codes, isa.lanes), 7),
            (Matmul(decoders.INT8, 0, zeros=True), pack.int8(codes | 255, isa.lanes, middle=128), 255,
             pack.scales(lowest, isa.lanes)),
            (Matmul(decoders.INT8, 0), pack.int8(torch.full((32, 64), -127).to(torch.int8), isa.lanes), -127),
            (Matmul(decoders.W8A8, 0), pack.w8a8(torch.zeros(32, 64, dtype=torch.uint8), isa.lanes), -128),
            (Matmul(NF4, 0), pack.nf4(codes, isa.lanes), 8191)):
        x = torch.full((1, 64), 3.0)
        scale = pack.scales(torch.ones(32, 1), isa.lanes)
        product = multiply(isa, matmul, x, packed, scale, *zeros, n=32)
        family = matmul.decoder.family
        exact = (reference.token_matmul if family.sums_rows else
                 functools.partial(reference.integer_matmul, group=0))
        full, ones = np.full((32, 64), levels, np.int32), np.ones((32, 1), np.float32)
        same(product, exact(x.numpy(), full, ones, family))
        assert torch.allclose(product, torch.full((1, 32), 64 * 3.0 * levels))
