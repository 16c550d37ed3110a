"""Products and embeddings whose groups have minima, 16 columns, scales of few bits or a table of levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit_kernels.cpu import decoders, pack
from quantkit_kernels.cpu.embedding import Embed
from quantkit_kernels.cpu.isa import PLAIN
from quantkit_kernels.cpu.matmul import Matmul
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.scales import ScaleLayout
from quantkit_kernels.cpu.weight_decoder import BYTES, FLOATS, WORDS
from tests.kernels.cpu import reference

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
WIDE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
KINDS = {
    # codes, columns that share a scale, how it is stored, and whether there are zero points
    "int4 in 16": ("int4", 16, ScaleLayout("bf16"), False),
    "int4 in 16 with zero points": ("int4", 16, ScaleLayout("f32"), True),
    "int4 with minima": ("uint4", 32, ScaleLayout("f16", minima=True), False),
    "int4 in 16 with minima": ("uint4", 16, ScaleLayout("bf16", minima=True), False),
    "int4 in 96 with minima": ("uint4", 96, ScaleLayout("f32", minima=True), False),
    "int4 in superblocks": ("uint4", 32, ScaleLayout("u8", minima=True, outer=96, outer_stored="f16"), False),
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


class Weight:
    """Random codes ``[n, 192]``; ``levels`` and ``scale`` (and ``minimum``) are what they mean, float32."""

    def __init__(self, kind, n, seed=0):
        codes, self.group, self.layout, zeros = KINDS[kind]
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
            self.pack, self.decoder = lambda lanes: pack.e4m3(drawn, lanes, self.group), decoders.E4M3
            self.levels, self.family = drawn.view(torch.float8_e4m3fn).float(), FLOATS
        elif codes in ("int8", "uint8"):
            self.pack = lambda lanes: pack.int8(drawn, lanes, self.group, 128)
            self.decoder = {"int8": decoders.INT8, "uint8": decoders.UINT8}[codes]
            self.levels = drawn.int() - (128 if codes == "int8" else 0)
        elif bits in (5, 6):
            self.pack = lambda lanes: pack.wide_integers(drawn, lanes, bits, self.group)
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
        return (self.pack(lanes), scales, None if self.zeros is None else pack.scales(self.zeros, lanes),
                None if self.outer is None else pack.scales(self.outer, lanes))

    def product(self, x):
        """The reference's."""
        levels, scale = self.levels.numpy(), self.scale.numpy()
        if self.family is FLOATS:
            return reference.tile_matmul(x, levels, scale, self.group)
        minimum = None if self.minimum is None else self.minimum.numpy()
        return reference.integer_matmul(x, levels, scale, self.family, self.group, minimum)


@pytest.fixture
def product(multiply):
    """``product(isa, weight, x, …)`` → float32 ``[m, n]``."""
    def run(isa, weight, x, **more):
        weights, scales, zeros, outer = weight.arguments(isa.lanes)
        return multiply(isa, weight.matmul, x, weights, scales, zeros, weight.n, outer=outer, **more)

    return run


def activations(m, seed=1):
    x = torch.randn(m, COLUMNS, generator=torch.Generator().manual_seed(seed))
    x[:, 40] *= 100
    return x


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, 20])
def test_the_bits_of_the_reference(isa, product, same, kind, m):
    weight, x = Weight(kind, 65), activations(m)
    same(product(isa, weight, x), weight.product(x.numpy()))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_thread(isa, product, kind):
    weight, x = Weight(kind, 97), activations(23)
    alone = torch.cat([product(isa, weight, x[i:i + 1]) for i in range(23)])
    for rows in (2, 4, 8, 9, 16, 23):
        assert torch.equal(product(isa, weight, x[:rows]), alone[:rows])
    for units in ({"stripes_a_unit": 3}, {"rows_a_unit": 5}):
        assert torch.equal(product(isa, weight, x, threads=2, **units), alone)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_agree(isa, product, kind):
    weight, x = Weight(kind, 33), activations(6)
    assert torch.equal(product(isa, weight, x), product(PLAIN, weight, x))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_embedding_are_what_codes_mean(isa, pools, room, kind):
    weight, ids = Weight(kind, 70), torch.tensor([0, 69, 31, 32, 5, 5])
    weights, scales, zeros, outer = weight.arguments(isa.lanes)
    out, program = room(len(ids), COLUMNS), Program(isa)
    program.add(Embed(weight.matmul), len(ids), ids=ids, out=out, padded=COLUMNS, table=weights,
                scales=scales, outer=outer, zeros=zeros, out_stride=COLUMNS * 4, size=COLUMNS,
                columns=COLUMNS)
    program.finish()
    pools[2].run(program.records)
    expected = weight.levels.float() * weight.scale.repeat_interleave(weight.group, 1)
    if weight.minimum is not None:
        expected = expected + weight.minimum.repeat_interleave(weight.group, 1)
    np.testing.assert_array_equal(out, expected[ids])


@pytest.mark.sampled(5)
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
    names = {decoders.int_table(levels).name for levels in (E2M1, WIDE, WIDE[::-1])}
    assert len(names) == 3
    assert Matmul(decoders.INT4, 32).name != Matmul(decoders.UINT4, 32).name
