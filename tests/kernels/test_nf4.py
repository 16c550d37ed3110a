"""NF4 weights: against float64, row by row; and the lookup in PTX, executed here."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit_kernels.reference import dequantize_nf4
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.nf4 import LEVELS, ORDER, lookup_asm, pack, tables


def weight(n, k, seed=0):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    return codes, 0.02 * (0.5 + torch.rand(n * k // 64, generator=random))


@pytest.fixture
def check(product_obeys_the_rule):
    """Ours against torch in the same precision and the exact product; returns ours."""
    def run(x, codes, absmax, *how):
        got = multiply(x, pack(codes.to(x.device), absmax.to(x.device), *how))
        exact = dequantize_nf4(codes, absmax, LEVELS).to(x.device)
        product_obeys_the_rule(got, x, exact)
        return got

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("n", "k", "m"), [
    *((n, k, m) for n, k in ((1, 64), (33, 64), (130, 192)) for m in (1, 3, 16, 17)),
    (7, 1024, 1), (192, 576, 17)])
def test_against_float64(on, randn, check, n, k, m):
    check(randn(m, k, on=on), *weight(n, k))


@pytest.mark.parametrize("m", [33, 130])
def test_prefill(on, randn, check, m):
    check(randn(m, 128, on=on), *weight(140, 128))


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_every_order_of_columns(on, randn, check, family):
    how = (None, "select") if on[0].type == "cuda" else (family,)
    check(randn(5, 192, on=on), *weight(130, 192), *how)


def test_every_level(on):
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 4)
    x = torch.eye(64, dtype=on[1], device=on[0])
    got = multiply(x, pack(codes.to(on[0]), torch.ones(16, device=on[0])))
    assert torch.equal(got.cpu(), torch.tensor(LEVELS).to(on[1]).repeat(4)[:, None].expand(64, 16))


def test_empty_blocks_and_outliers(on, randn, check):
    codes, absmax = weight(20, 128)
    absmax[::3] = 0
    x = randn(4, 128, on=on)
    x[1, 7] = 1000
    check(x, codes, absmax)


def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone):
    packed = pack(*(part.to(on[0]) for part in weight(20, 1088)))
    rows_stand_alone(packed, randn(16, 1088, on=on))


def test_refuses_blocks_that_cross_rows():
    with pytest.raises(ValueError, match="multiple of 64"):
        pack(torch.zeros(2, 96, dtype=torch.uint8), torch.ones(3))


def execute(text, word, tables):
    """The four results of a PTX block of ``xor``, ``shl``, ``shr``, ``prmt`` and ``lop3`` (0x96)."""
    registers = {"$4": word} | {f"${5 + at}": value & 0xFFFFFFFF for at, value in enumerate(tables)}

    def value(name):
        return int(name, 0) if name[0].isdigit() else registers[name]

    def picked(both, pick):
        byte = both[pick & 7]
        return (255 if byte > 127 else 0) if pick & 8 else byte

    for line in re.findall(r"^\s*((?:xor|shl|shr|prmt|lop3)\.\S+ .*);$", text, re.MULTILINE):
        kind, rest = line.split(" ", 1)
        to, *given = (part.strip() for part in rest.split(","))
        a, b, *more = map(value, given)
        match kind:
            case "xor.b32":
                result = a ^ b
            case "shl.b32":
                result = a << b & 0xFFFFFFFF
            case "shr.u32":
                result = a >> b
            case "lop3.b32":
                assert more[1] == 0x96
                result = a ^ b ^ more[0]
            case "prmt.b32":
                both = (a | b << 32).to_bytes(8, "little")
                chosen = bytes(picked(both, more[0] >> 4 * at & 15) for at in range(4))
                result = int.from_bytes(chosen, "little")
            case _:
                raise AssertionError(line)
        registers[to] = result
    return [registers[f"${at}"] for at in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_lookup_in_ptx(dtype):
    levels = torch.tensor([LEVELS[at] for at in ORDER]).to(dtype)
    bits = [value & 0xFFFF for value in torch.where(levels == 0, -levels, levels).view(torch.int16).tolist()]
    text, known = lookup_asm(dtype), tables(dtype)
    words = torch.randint(0, 2**32, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    for word in [*words, *(0x11111111 * code for code in range(16))]:
        codes = [word >> 4 * at & 15 for at in range(8)]
        wanted = [bits[codes[2 * at]] | bits[codes[2 * at + 1]] << 16 for at in range(4)]
        assert execute(text, word, known) == wanted
