"""Products of every format: the reference's bits, and fp64 within the error rule."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels.cpu import decoders, pack
from quantkit_kernels.cpu.embedding import Embed
from quantkit_kernels.cpu.matmul import MOST_COLUMNS, Matmul
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.scales import ScaleLayout
from quantkit_kernels.cpu.weight_decoder import BYTES, FLOATS, SUB, WORDS
from tests.kernels.cpu import reference

TABLE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
         0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
         0.7229568362236023, 1.0)
NF4 = decoders.nf4(TABLE)
TOKENS = ("w8a8", "e4m3_tokens")
KINDS = ("bf16", "f16", "f32", "int8", "int8 g64", "int8 zp", "int8 g64 zp", *TOKENS, "e4m3",
         "int4", "int4 zp", "int4 g32", "int4 g64", "int4 g128", "int4 g32 zp", "int4 g128 zp", "nf4 g32",
         "nf4 g64", "trellis2 w8", "trellis3 w8", "trellis4 w8",
         "trellis2 w10", "trellis2 w16", "trellis3 w12", "trellis4 w13", "trellis4 w16")
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


HALF = torch.randint(-127, 128, (128,), generator=torch.Generator().manual_seed(0)).tolist()
LEVELS = (*HALF, *(-level for level in HALF))


def learned_values(symbols, width):
    """Of symbols ``[n, k]``: a row's state begins with its own symbol, in the low bits; those of the rows
    behind it follow, around the ring of 64."""
    tiles = symbols.long().unflatten(0, (-1, 64))
    state = sum(tiles.roll(-step, 1) << step * width for step in range(4)) % 256
    return torch.tensor(LEVELS)[state].flatten(0, 1).int()


def floats_product(wide, pairs, x, isa=None):
    """Of bfloat16 pairs are multiplied; each kind of instruction has its own bits."""
    x = reference.bfloat(x) if pairs else x
    if pairs and isa is not None and isa.amx:
        return reference.tile_matmul(x, wide, np.zeros((len(x), len(wide)), np.float32))
    return reference.float_matmul(x, wide, pairs)


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
        self.zeros = self.levels = self.scale = None
        if name in ("bf16", "f16", "f32"):
            decoder = {"bf16": decoders.BF16, "f16": decoders.FP16, "f32": decoders.FP32}[name]
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]
            weight = torch.randn(n, k, generator=make).to(dtype)
            weight[0, 0] = 1e-7  # a subnormal float16
            self.matmul, self.weight = Matmul(decoder, None), weight.double()
            self.pack = lambda _: (pack.rows(weight), None, None)
            wide = _pad(weight.float(), self.k).numpy()
            self.exact = functools.partial(floats_product, wide, name == "bf16")
            return
        if name in ("w8a8", "e4m3", "e4m3_tokens"):
            self._eight_bit(name, n, k, scale, make)
            return
        family, dtype = WORDS, torch.float32
        if name.startswith("trellis"):
            width, window = int(name[-1]), int(rest[0][1:])
            codes = torch.randint(0, 2**width, (-(-n // 64) * 64, k), generator=make, dtype=torch.uint8)
            if window == 8:
                levels, family, decoder = learned_values(codes, width)[:n], BYTES, decoders.learned_trellis(
                    width, LEVELS)
            else:
                levels = trellis_values(codes, width, window)[:n]
                decoder = decoders.trellis(width, window, CODE)
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
        self.levels, self.scale = levels, wide.float()
        if name == "nf4":
            self.weight = torch.tensor(TABLE, dtype=torch.float64)[codes.long()] * decoders.NF4_LEVELS * wide
        else:
            self.weight = levels.double() * wide
        rings = pack.learned_trellis if family is BYTES else pack.trellis
        packer = getattr(pack, name, lambda codes, *_: rings(codes, width))
        self.pack = lambda lanes: (packer(codes, lanes, self.multiple), pack.scales(scale, lanes),
                                   None if self.zeros is None else pack.scales(self.zeros, lanes))
        self.exact = lambda x, isa=None: reference.integer_matmul(x, _pad(levels, self.k).numpy(),
                                                        scale.float().numpy(), family, group)

    def arguments(self, lanes):
        """Weights, scales and zero points in a kernel's order."""
        return dict(zip(("weights", "scales", "zeros"), self.pack(lanes)))

    def rows(self):
        """What the weight means, float32: of codes that are looked up their level times the scale."""
        return self.weight.float() if self.levels is None else self.levels.float() * self.scale

    def _wide(self, zero, group, k):
        return zero.int().repeat_interleave(group or self.k, 1)[:, :k]

    def _eight_bit(self, name, n, k, scale, make):
        """int8 with every code, or e4m3 with every code but NaN, and a scale a row."""
        codes = torch.randint(0, 256, (n, k), generator=make, dtype=torch.uint8)
        if name == "w8a8":
            levels, decoder, packer = codes.float() - 128, decoders.W8A8, pack.w8a8
        else:
            codes[codes & 0x7F == 0x7F] = 1
            levels, packer = codes.view(torch.float8_e4m3fn).float(), lambda codes, _: pack.rows(codes)
            decoder = decoders.E4M3 if name == "e4m3" else decoders.E4M3_TOKENS
        self.matmul = Matmul(decoder, 0)
        self.weight = levels.double() * scale.double()
        self.levels, self.scale = levels, scale
        self.pack = lambda lanes: (packer(codes, lanes), pack.scales(scale, lanes), None)
        padded = _pad(levels, self.k).numpy()
        if name == "e4m3":
            self.exact = lambda x, isa=None: reference.float_matmul(x, padded, times=scale.numpy()[:, 0])
        else:
            self.exact = lambda x, isa=None: reference.token_matmul(x, padded, scale.numpy(), decoder.family)


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
WIDE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GROUPED = {
    # codes, columns that share a scale, how it is stored, and whether there are zero points
    "int4 in 16": ("int4", 16, ScaleLayout("bf16"), False),
    "int4 in 16 with zero points": ("int4", 16, ScaleLayout("f32"), True),
    "int4 with minima": ("uint4", 32, ScaleLayout("f16", minima=True), False),
    "int4 in 16 with minima": ("uint4", 16, ScaleLayout("bf16", minima=True), False),
    "int4 in 96 with minima": ("uint4", 96, ScaleLayout("f32", minima=True), False),
    "int4 in superblocks": ("uint4", 32, ScaleLayout("u8", minima=True, outer=96, outer_stored="f16"), False),
    "int2 in 16": ("int2", 16, ScaleLayout("bf16"), False),
    "int2 with zero points": ("int2", 64, ScaleLayout("bf16"), True),
    "int2 with minima": ("uint2", 32, ScaleLayout("f16", minima=True), False),
    "int3 in 64": ("int3", 64, ScaleLayout("bf16"), False),
    "int3 in 16 with zero points": ("int3", 16, ScaleLayout("f32"), True),
    "int3 in superblocks": ("uint3", 32, ScaleLayout("u8", minima=True, outer=96, outer_stored="f16"), False),
    "int8 in 16": ("int8", 16, ScaleLayout("f16"), False),
    "int8 in 16 with zero points": ("int8", 16, ScaleLayout("bf16"), True),
    "int8 with minima": ("uint8", 64, ScaleLayout("bf16", minima=True), False),
    "int8 in superblocks": ("int8", 16, ScaleLayout("i8", outer=64, outer_stored="f16"), False),
    "int5 in 32": ("int5", 32, ScaleLayout("f16"), False),
    "int5 with minima": ("uint5", 64, ScaleLayout("f16", minima=True), False),
    "int6 in superblocks": ("int6", 16, ScaleLayout("i8", outer=64, outer_stored="f16"), False),
    "int6 with zero points": ("int6", 32, ScaleLayout("bf16"), True),
    "int8 in superblocks with minima": ("int8", 32, ScaleLayout("u8", minima=True, outer=64), False),
    "e2m1 in 16": (E2M1, 16, ScaleLayout("e4m3", outer=0), False),
    "e2m1 in 32": (E2M1, 32, ScaleLayout("e8m0"), False),
    "e2m1 in 64": (E2M1, 64, ScaleLayout("bf16"), False),
    "a wide table": (WIDE, 32, ScaleLayout("f16"), False),
    "a wide table in 16": (WIDE, 16, ScaleLayout("f32"), False),
    "e4m3 in tiles": ("e4m3", 64, ScaleLayout("f32", shared=True), False),
}
COLUMNS = 192


class GroupedCase:
    """Random codes ``[n, 192]``; ``levels`` and ``scale`` (and ``minimum``) are what they mean, float32."""

    k = COLUMNS

    def __init__(self, kind, n, seed=0):
        codes, self.group, self.layout, zeros = GROUPED[kind]
        self.n, make = n, torch.Generator().manual_seed(seed)
        groups = COLUMNS // self.group
        self.zeros = self.outer = self.minimum = None
        self.family = WORDS if codes[-1] in ("5", "6", "8") else BYTES
        self.packed(codes, make)
        if zeros:
            middle, top = (128 if codes == "int8" else 0), 2 ** int(codes[-1])
            zero = torch.randint(0, top, (n, groups), generator=make)
            shift = zero - top // 2  # from what means 0 without
            self.levels = self.levels - shift.repeat_interleave(self.group, 1)
            self.zeros = (zero - middle).to(torch.int8).view(torch.uint8)
        self.stored = [self.numbers(groups, make) for _ in range(1 + self.layout.minima)]
        values = [self.value(part) for part in self.stored]
        if self.layout.outer is not None:
            blocks = COLUMNS // self.layout.outer if self.layout.outer else 1
            dtype = torch.float16 if self.layout.outer_stored == "f16" else torch.float32
            self.outer = [(torch.rand(n, blocks, generator=make) - 0.3).to(dtype) for _ in self.stored]
            values = [value * outer.float().repeat_interleave(groups // blocks, 1)
                      for value, outer in zip(values, self.outer)]
        self.scale, self.minimum = values[0], values[1] if self.layout.minima else None
        self.matmul = Matmul(self.decoder, self.group, self.layout, zeros)

    def packed(self, codes, make):
        """Draws codes; sets ``pack``, ``decoder`` and ``levels``."""
        bits = 4 if isinstance(codes, tuple) else 8 if codes == "e4m3" else int(codes[-1])
        top = 2**bits
        drawn = torch.randint(0, top, (self.n, COLUMNS), generator=make, dtype=torch.uint8)
        if codes == "e4m3":
            drawn[drawn & 0x7F == 0x7F] = 1
            self.pack, self.decoder = lambda _: pack.rows(drawn, multiple=self.group), decoders.E4M3
            self.levels, self.family = drawn.view(torch.float8_e4m3fn).float(), FLOATS
        elif codes in ("int8", "uint8"):
            self.pack = lambda lanes: pack.int8(drawn, lanes, self.group, 128)
            self.decoder = {"int8": decoders.INT8, "uint8": decoders.UINT8}[codes]
            self.levels = drawn.int() - (128 if codes == "int8" else 0)
        elif bits in (2, 3, 5, 6):
            packer = pack.narrow_integers if bits < 4 else pack.wide_integers
            self.pack = lambda lanes: packer(drawn, lanes, bits, self.group)
            self.decoder = getattr(decoders, codes.upper())
            self.levels = drawn.int() - (0 if codes[0] == "u" else top // 2)
        else:
            self.pack = lambda lanes: pack.int4(drawn, lanes, self.group)
            self.decoder = {"int4": decoders.INT4, "uint4": decoders.UINT4}.get(codes) or (
                decoders.int_table(codes))
            self.levels = (torch.tensor(codes, dtype=torch.int32)[drawn.long()] if isinstance(codes, tuple)
                           else drawn.int() - (8 if codes == "int4" else 0))

    def numbers(self, groups, make):
        """What is stored of scales, or of minima: every byte, or floats."""
        shape = (self.n, groups)
        if self.layout.stored in ("u8", "i8", "e8m0", "e4m3"):
            top = {"e8m0": 150, "e4m3": 127}.get(self.layout.stored, 256)
            return torch.randint(0, top, shape, generator=make, dtype=torch.uint8)
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[self.layout.stored]
        number = torch.randn(shape, generator=make)
        return (number[:1].expand(shape) if self.layout.shared else number).to(dtype)

    def value(self, part):
        """What a stored number means."""
        if self.layout.stored == "e8m0":
            return torch.ldexp(torch.ones(part.shape), part.int() - 127)
        views = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}
        return part.view(views.get(self.layout.stored, part.dtype)).float()

    def arguments(self, lanes):
        """Weights, scales, zero points and what scales are multiples of, in a kernel's order."""
        if self.layout.shared:
            scales = self.stored[0][:1].expand(-(-self.n // 32) * 32 // lanes, -1).contiguous()
        else:
            scales = pack.scales(self.stored, lanes)
        return {"weights": self.pack(lanes), "scales": scales,
                "zeros": None if self.zeros is None else pack.scales(self.zeros, lanes),
                "outer": None if self.outer is None else pack.scales(self.outer, lanes)}

    def rows(self):
        """What the weight means, float32."""
        rows = self.levels.float() * self.scale.repeat_interleave(self.group, 1)
        return rows if self.minimum is None else rows + self.minimum.repeat_interleave(self.group, 1)

    def exact(self, x, isa=None):
        """The reference's product."""
        levels, scale = self.levels.numpy(), self.scale.numpy()
        if self.family is FLOATS:
            return reference.float_matmul(x, levels, scale=scale, group=self.group)
        minimum = None if self.minimum is None else self.minimum.numpy()
        return reference.integer_matmul(x, levels, scale, self.family, self.group, minimum)


def _pad(x, k):
    return torch.nn.functional.pad(x, (0, k - x.shape[1]))


def activations(m, k, padded, seed, outlier=False, zeros=False):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    if outlier and k:
        x[:, k // 2] *= 1000
    if zeros:
        x[:, :k // 2] = 0
    return _pad(x, padded).contiguous()


def case_of(kind, n, k):
    return GroupedCase(kind, n) if kind in GROUPED else Case(kind, n, k, 0)


ALL = pytest.mark.parametrize("kind", [*KINDS, *GROUPED])


@pytest.mark.sampled(36)
@ALL
@pytest.mark.parametrize("m", [1, 2, 9, 20])
def test_the_bits_of_the_reference(isa, multiply, same, kind, m):
    case = case_of(kind, 65, 192)
    x = activations(m, 192, case.k, 1, outlier=True)
    found = multiply(isa, case.matmul, x, **case.arguments(isa.lanes), n=65)
    same(found, case.exact(x.numpy(), isa)[:, :65])


@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3", "e4m3_tokens"])
def test_long_rows_are_cut_into_chunks(isa, multiply, same, kind):
    case = Case(kind, 33, 4160, 0)
    x = activations(4, 4160, case.k, 1)
    result = multiply(isa, case.matmul, x, **case.arguments(isa.lanes), n=33)
    same(result, case.exact(x.numpy(), isa)[:, :33])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), n=st.sampled_from(SIZES), k=st.sampled_from(SIZES), m=st.integers(1, 20),
       seed=st.integers(0, 99), outlier=st.booleans(), zeros=st.booleans(), zero_groups=st.booleans())
def test_near_float64_over_random_shapes(multiply, fastest, kind, n, k, m, seed, outlier, zeros, zero_groups):
    """At most twice what torch loses in bfloat16; int8 activations lose what their step says."""
    case = Case(kind, n, k, seed, zero_groups=zero_groups)
    x = activations(m, k, case.k, seed + 1, outlier, zeros)
    found = multiply(fastest, case.matmul, x, **case.arguments(fastest.lanes), n=n).double()
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
    else:  # bfloat16 weights take bfloat16 activations
        rounded = (x[:, :k].bfloat16().double() - x[:, :k].double()).abs()
        lost = rounded @ case.weight.abs().T
        lowest = x[:, :k].double().abs() @ case.weight.abs().T
        groups = x.abs().unflatten(1, (-1, SUB)).amax(-1).double() / 8191
        step = groups.repeat_interleave(SUB, 1)[:, :k] @ case.weight.abs().T
        table = 0.5 * x[:, :k].double().abs() @ case.scale.double().T if "nf4" in kind else 0
        allowed = 2 * lost + 1e-5 * lowest + 0.5 * step + table
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
    ours = error(multiply(fastest, case.matmul, x, **case.arguments(fastest.lanes), n=256))
    assert ours <= most * theirs
    if most > 2:  # half a step of 16 levels, evenly spread
        rounding = (12**-0.5 * case.weight.abs().amax() / 8) / case.weight.square().mean().sqrt()
        assert ours < rounding / 8


@pytest.mark.sampled(20)
@ALL
def test_a_row_has_the_same_bits_in_any_company_and_on_any_thread(isa, multiply, kind):
    case = case_of(kind, 97, 224)
    x = activations(23, case.k, case.k, 4)

    def product(x, **how):
        return multiply(isa, case.matmul, x, **arguments, n=97, **how)

    arguments = case.arguments(isa.lanes)
    alone = torch.cat([product(x[i:i + 1]) for i in range(23)])
    for rows in (2, 3, 4, 5, 8, 9, 16, 23):
        assert torch.equal(product(x[:rows]), alone[:rows])
    for units in ({"stripes_a_unit": 3}, {"rows_a_unit": 5}, {"stripes_a_unit": 2, "rows_a_unit": 8}):
        assert torch.equal(product(x, threads=2, **units), alone)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *GROUPED) if not kind.startswith("trellis")])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_rows_of_an_embedding_are_what_codes_mean(isa, pools, room, kind, scale):
    """A row of 190 is padded, with what must not show."""
    case, ids = case_of(kind, 70, 190), torch.tensor([0, 69, 31, 32, 33, 5, 5])
    parts, expected = case.arguments(isa.lanes), case.rows()[ids] * scale
    size, out, program = expected.shape[1], room(len(ids), case.k + 16), Program(isa)
    program.add(Embed(case.matmul, scale), len(ids), ids=ids, out=out, padded=case.k + 16,
                table=parts.pop("weights"), out_stride=(case.k + 16) * 4, size=size, columns=case.k, **parts)
    program.finish()
    pools[2].run(program.records)
    np.testing.assert_array_equal(out[:, :size], expected)
    assert (out[:, size:] == 0).all()


@pytest.mark.parametrize("kind", ("bf16", "f16", "f32", "int4 g32"))
def test_bias_and_residual_are_added(isa, multiply, same, kind):
    """Integers are added up before; products of floats are added to both."""
    case = Case(kind, 40, 64, 7)
    x, bias, held = activations(5, 64, case.k, 8), torch.randn(64), torch.randn(5, 40)
    plain = multiply(isa, case.matmul, x, **case.arguments(isa.lanes), n=40)
    found = multiply(isa, case.matmul, x, **case.arguments(isa.lanes), n=40, bias=bias, add=held)
    same(found, held + (plain + bias[:40]) if kind == "int4 g32" else held + bias[:40] + plain)


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


@pytest.mark.sampled(20)
@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("levels", [(-12,) * 15 + (12,), (-127,) * 15 + (113,), (-24,) + (0,) * 15])
def test_the_largest_sums_of_tables_fit(isa, multiply, same, levels, sign, m):
    """Integers that overflow would change sign, and saturated ones lose what is beyond."""
    decoder = decoders.int_table(levels)
    for code in (0, 15):
        codes = torch.full((32, 64), code, dtype=torch.uint8)
        x = torch.full((m, 64), 3.0 * sign)
        for group in (16, 32):
            result = multiply(isa, Matmul(decoder, group), x, pack.int4(codes, isa.lanes),
                              pack.scales(torch.ones(32, 64 // group), isa.lanes), n=32)
            same(result, reference.integer_matmul(x.numpy(), np.full((32, 64), levels[code], np.int32),
                                                  np.ones((32, 64 // group), np.float32), BYTES, group))


def test_a_tables_name_says_what_is_in_it():
    levels = (-24,) + (0,) * 15
    names = {decoders.int_table(table).name for table in (levels, levels[::-1], (-12,) * 15 + (12,))}
    assert len(names) == 3
    assert Matmul(decoders.INT4, 32).name != Matmul(decoders.UINT4, 32).name
