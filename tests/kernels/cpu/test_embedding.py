"""Rows of an embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit_kernels.cpu import decoders, pack
from quantkit_kernels.cpu.embedding import Embed
from quantkit_kernels.cpu.matmul import Matmul
from quantkit_kernels.cpu.program import Program
from quantkit_kernels.cpu.scales import ScaleLayout
from tests.kernels.cpu import reference

VOCABULARY = 70
TOKENS = [0, VOCABULARY - 1, 31, 32, 33, 5, 5, 7]
TABLE = tuple(np.linspace(-1, 1, 16).tolist())
PLAIN = {"bf16": (torch.bfloat16, decoders.BF16, pack.bf16),
         "f16": (torch.float16, decoders.FP16, pack.floats),
         "f32": (torch.float32, decoders.FP32, pack.floats)}


@pytest.fixture
def look_up(pools, room):
    """``look_up(isa, ids, kernel, size, padded, table, …)`` → float32 ``[m, padded]``."""
    def run(isa, ids, kernel, size, padded, table, threads=2, scale=1.0, plain="bf16", **parts):
        out = room(len(ids), padded)
        program = Program(isa)
        program.add(Embed(kernel, scale, plain), len(ids), ids=ids, out=out, padded=padded, table=table,
                    out_stride=padded * 4, size=size, **parts)
        program.finish()
        pools[threads].run(program.records)
        return out

    return run


def every_bit(n, dtype):
    """A table in which all bits occur: NaN, infinities and subnormal numbers too."""
    random = torch.Generator().manual_seed(0)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    ends = torch.iinfo(whole)
    return torch.randint(ends.min, ends.max, (VOCABULARY, n), generator=random, dtype=whole).view(dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("packed", [False, True], ids=["table", "blocks"])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 96, 576])
def test_the_bits_of_the_reference(isa, look_up, size, packed, kind):
    dtype, decoder, packer = PLAIN[kind]
    ids, table = torch.tensor(TOKENS), every_bit(size, dtype)
    padded = -(-size // 32) * 32
    laid = packer(table, isa.lanes) if packed else table
    found = look_up(isa, ids, Matmul(decoder, None) if packed else None, size, padded + 16, laid, plain=kind,
                    columns=padded)[:, :size].contiguous().numpy()
    bits = table.view(torch.int16) if kind == "bf16" else table
    expected = reference.embedding(ids.numpy(), bits.numpy())
    real = ~np.isnan(expected)
    assert (np.isnan(found) == ~real).all() and (found.view("i4") == expected.view("i4"))[real].all()


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("packed", [False, True], ids=["table", "blocks"])
def test_rows_times_a_number(isa, look_up, packed, kind):
    dtype, decoder, packer = PLAIN[kind]
    ids, table = torch.tensor(TOKENS), torch.randn(VOCABULARY, 64).to(dtype)
    laid = packer(table, isa.lanes) if packed else table
    found = look_up(isa, ids, Matmul(decoder, None) if packed else None, 64, 64, laid, scale=33.75,
                    plain=kind, columns=64)
    assert torch.equal(found, table[ids].float() * 33.75)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scales", ["bf16", "f32"])
@pytest.mark.parametrize("group", [0, 32, 96])
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int8", "int8 with zeros", "w8a8", "nf4",
                                  "e4m3"])
def test_levels_times_scales(isa, look_up, kind, group, scales):
    """Groups of 96 are of three subgroups; a row of 90 is padded, with what must not show."""
    if group and kind in ("w8a8", "e4m3"):
        group = 0
    size, columns, random = (192 if group else 90), (192 if group else 96), np.random.default_rng(3)
    codes = random.integers(0, 16 if "4" in kind else 256, (VOCABULARY, size), "u1")
    if kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0
    groups = size // group if group else 1
    scale = torch.from_numpy(random.uniform(0.5, 2, (VOCABULARY, groups)).astype("f4"))
    scale = scale.bfloat16() if scales == "bf16" else scale
    zero = torch.from_numpy(random.integers(0, 16 if "4" in kind else 256, (VOCABULARY, groups), "u1"))
    level = codes.astype("f4")
    given, width = torch.from_numpy(codes), group or 32
    if kind.startswith("int4"):
        laid, decoder = pack.int4(given, isa.lanes, width), decoders.INT4
        level -= np.repeat(zero.numpy(), size // groups, 1) if "zeros" in kind else 8
    elif kind.startswith("int8"):
        laid, decoder = pack.int8(given, isa.lanes, width, 128), decoders.INT8
        level -= np.repeat(zero.numpy(), size // groups, 1) if "zeros" in kind else 128
        zero = zero ^ 128  # signed, as the codes are
    elif kind == "w8a8":
        laid, decoder, level = pack.w8a8(given, isa.lanes), decoders.W8A8, level - 128
    elif kind == "nf4":
        laid, decoder = pack.nf4(given, isa.lanes, width), decoders.nf4(TABLE)
        level = np.rint(np.float32(TABLE)[codes] * decoders.NF4_LEVELS)
    else:
        laid, decoder = pack.e4m3(given, isa.lanes), decoders.E4M3
        level = given.view(torch.float8_e4m3fn).float().numpy()
    kernel = Matmul(decoder, group, ScaleLayout(scales), "zeros" in kind)
    ids = torch.tensor(TOKENS)
    found = look_up(isa, ids, kernel, size, columns + 16, laid, columns=columns, scale=0.5,
                    scales=pack.scales(scale, isa.lanes),
                    zeros=pack.scales(zero, isa.lanes) if kernel.zeros else None)
    wide = np.repeat(scale.float().numpy(), size // groups, 1)
    expected = level[TOKENS].astype("f4") * wide[TOKENS] * np.float32(0.5)
    np.testing.assert_array_equal(found[:, :size], expected)
    assert (found[:, size:] == 0).all()


def test_what_lies_in_several_blocks_is_not_looked_up(fastest):
    kernel = Matmul(decoders.trellis(4, 12, (1, 2, 3)), 0)
    program = Program(fastest)
    program.add(Embed(kernel))
    with pytest.raises(AssertionError, match="several blocks"):
        program.finish()


def test_the_reference_widens_as_torch_does():
    ids, table = torch.tensor(TOKENS), torch.randn(VOCABULARY, 33).bfloat16()
    found = reference.embedding(ids.numpy(), table.view(torch.int16).numpy())
    assert torch.equal(torch.from_numpy(found), table[ids].float())
