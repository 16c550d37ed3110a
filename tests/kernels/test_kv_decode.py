"""Pairs of codes become numbers: what the PTX does, instruction by instruction, against the codecs."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.kv.codecs.rotation import levels
from quantkit_kernels.triton.kv_decode import ADDED_BF16, ASM_TEXTS, SIZE, SIZE_BF16

HALF = {False: torch.bfloat16, True: torch.float16}


def floats(word, dtype):
    """Words ``[n]`` int64 → float64 ``[n, 2]``."""
    parts = torch.stack((word & 0xFFFF, word >> 16), -1)
    return torch.where(parts > 0x7FFF, parts - 0x10000, parts).to(torch.int16).view(dtype).double()


def words(values, dtype):
    """The inverse; values are rounded once."""
    bits = values.to(dtype).view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


def execute(text, dtype, *given):
    """``$0`` of a PTX block; ``given`` are ``$1`` and so on, int64 ``[n]``."""
    registers = {f"${at + 1}": word for at, word in enumerate(given)}

    def value(name):
        return torch.full_like(given[0], int(name, 16)) if name[0].isdigit() else registers[name]

    for line in re.findall(r"^\s*((?:mov|and|shr|lop3|fma|min|max)\.\S+ .*);$", text, re.MULTILINE):
        kind, rest = line.split(" ", 1)
        to, *names = (part.strip() for part in rest.split(","))
        if kind == "lop3.b32":
            a, b, c = map(value, names[:3])
            result = {"0xEA": (a & b) | c, "0x6A": (a & b) ^ c}[names[3]]
        elif kind == "shr.b32":
            result = value(names[0]) >> int(names[1])
        else:
            a, *more = map(value, names)
            x = [floats(one, dtype) for one in (a, *more)]
            match kind.split(".")[0]:
                case "mov":
                    result = a
                case "and":
                    result = a & more[0]
                case "fma":  # exact in float64 before it is rounded
                    assert kind.endswith({torch.bfloat16: ".bf16x2", torch.float16: ".f16x2"}[dtype])
                    result = words(x[0] * x[1] + x[2], dtype)
                case other:
                    result = words(getattr(torch, f"{other}imum")(*x), dtype)
        registers[to] = result
    return floats(registers["$0"], dtype)


def pairs(bits, up=0, noise=0):
    """All pairs of codes, with other codes' bits beside them: words, and codes ``[n, 2]``."""
    codes = torch.cartesian_prod(*2 * [torch.arange(2**bits)])
    return (codes[:, 0] | codes[:, 1] << 16) << up | noise, codes


@pytest.mark.parametrize("half", [False, True])
def test_bytes(half):
    every, codes = pairs(8)
    signed = torch.where(codes > 127, codes - 256, codes).double()
    for noise in (0, 0xFF00FF00):
        assert torch.equal(execute(ASM_TEXTS["int8", 8, half], HALF[half], every | noise), signed)
    finite = ((codes & 127) < 127).all(1)
    want = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    got = execute(ASM_TEXTS["fp8", 8, half], HALF[half], every << 8 | 0x00FF00FF)
    assert torch.equal(got[finite], want[finite])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels(half, bits):
    every, codes = pairs(bits, 1, 0x80018001)
    size = (SIZE if half else SIZE_BF16).value[bits]
    got = execute(ASM_TEXTS["hadamard", bits, half], HALF[half], every) * size
    want = levels(bits).double()[codes]
    error = (got - want).norm() / want.norm()
    assert error < (5e-4 if half else 2e-3), error
    assert half or ADDED_BF16[bits] == torch.tensor(ADDED_BF16[bits]).to(torch.bfloat16)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_grids(half, bits):
    every, codes = pairs(bits, 0, 0x80108010)
    dtype, n = HALF[half], len(every)
    random = torch.Generator().manual_seed(0)
    for size in (1.0, 65504.0):
        low = (torch.randn(n, 2, generator=random) * size).clamp(-65280, 65280).to(torch.bfloat16).double()
        scale = (torch.rand(n, 2, generator=random) * size).to(torch.bfloat16).clamp(max=65280).double()
        got = execute(ASM_TEXTS["grid", bits, half], dtype, every, words(scale, dtype), words(low, dtype))
        want = (codes * scale + low).clamp(*((-65504, 65504) if half else (-1e30, 1e30)))
        step = torch.finfo(dtype).eps / 2 * want.abs() + 2.0**-24 * 16
        assert torch.isfinite(got).all() and (got - want).abs().le(step).all()
