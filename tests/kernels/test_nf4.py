"""The lookup of NF4's levels in PTX, executed here."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit_kernels.triton.nf4 import LEVELS, ORDER, lookup_asm, tables


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
