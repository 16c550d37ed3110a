"""A trellis's table in shared memory: the PTX that copies it there and looks levels up, executed here."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.formats import trellis_code
from quantkit_kernels.triton import trellis
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.trellis import COPY, LOOK_UP

TABLE, BASE = 4096, 1024
"""Where the table lies in global memory, and its copies in shared memory."""


class Thread:
    """Executes a block of PTX, of the instructions that these two have."""

    def __init__(self, text, registers, shared, levels=None):
        self.registers, self.shared, self.levels = registers, shared, levels
        lines = [line.strip().removesuffix(";") for line in text.strip()[1:-1].splitlines()]
        lines = [line for line in lines if line and not line.startswith(".")]
        at = 0
        while at < len(lines):
            if lines[at].startswith("@") and self.registers["more"]:
                at = lines.index(lines[at].split()[-1] + ":")
            elif not lines[at].startswith("@") and not lines[at].endswith(":"):
                self.run(*lines[at].split(maxsplit=1))
            at += 1

    def value(self, name):
        return int(name, 0) if name[0].isdigit() else self.registers[name]

    def run(self, kind, rest):
        to, *names = re.sub(r"[\[\]{}]", "", rest).split(", ")
        given = [self.value(name) for name in names]
        match kind:
            case "bar.sync":
                return
            case "st.shared.v4.b32":
                assert self.registers[to] % 16 == 0
                self.shared.update({self.registers[to] + 4 * at: value for at, value in enumerate(given)})
                return
            case "mov.u32":
                result = given[0]
            case "mov.b32":
                result = given[0] | given[1] << 16
            case "mad.lo.u32" | "mad.wide.u32":
                result = given[0] * given[1] + given[2]
            case "add.u32":
                result = given[0] + given[1]
            case "and.b32":
                result = given[0] & given[1]
            case "setp.lt.u32":
                result = given[0] < given[1]
            case "ld.global.nc.b16":
                result = self.levels[(given[0] - TABLE) // 2]
            case "ld.shared.b32":
                result = self.shared[given[0]]
            case "dp4a.u32.u32":
                first, second = (value.to_bytes(4, "little") for value in given[:2])
                result = sum(a * b for a, b in zip(first, second)) + given[2]
            case "prmt.b32":
                both = (given[0] | given[1] << 32).to_bytes(8, "little")
                result = int.from_bytes(bytes(both[given[2] >> 4 * at & 7] for at in range(4)), "little")
            case _:
                raise AssertionError(kind)
        self.registers[to] = result


@pytest.mark.parametrize("threads", [128, 256])
def test_the_table_in_shared_memory(threads):
    levels = torch.randint(0, 2**16, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    shared, bases = {}, []
    for thread in range(threads):
        registers = {"$1": TABLE, "table": BASE, "%tid.x": thread, "%ntid.x": threads, "%laneid": thread % 32}
        bases.append(Thread(COPY.value, registers, shared, levels).registers["$0"])
    assert sorted(shared) == [*range(BASE, BASE + 32768, 4)]
    words = torch.randint(0, 2**32, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    for word in [*words, 0, 2**32 - 1]:
        for lane in (0, 1, 31, threads - 1):
            thread = Thread(LOOK_UP.value, {"$2": word, "$3": bases[lane]}, Banked(shared, lane % 32))
            states = word.to_bytes(4, "little")
            assert [thread.registers["$0"], thread.registers["$1"]] == [
                levels[states[at]] | levels[states[at + 2]] << 16 for at in (0, 1)]


class Banked(dict):
    """Shared memory that a lane reads from its own bank only."""

    def __init__(self, memory, bank):
        super().__init__(memory)
        self._bank = bank

    def __getitem__(self, address):
        assert (address - BASE) // 4 % 32 == self._bank
        return super().__getitem__(address)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_state_of_the_learned_tables(on, bits):
    """As the format decodes them, times a row's scale; whichever way levels are looked up."""
    k = trellis.SEVERAL * trellis.BK
    symbols = torch.randint(0, 2**bits, (192, k), generator=torch.Generator().manual_seed(bits),
                            dtype=torch.uint8)
    levels = trellis_code.decode(symbols, bits, trellis_code.LEARNED)
    assert len(levels.unique()) == len(set(trellis_code.learned(bits)))
    for shared in (False, None):
        packed = trellis.pack(symbols.to(on[0]), torch.ones(192, device=on[0]), trellis_code.learned(bits),
                              bits, shared=shared)
        assert packed.words.nbytes * 8 == 256 * k * bits
        got = multiply(torch.eye(k, dtype=on[1], device=on[0]), packed)
        assert torch.equal(got.cpu().float().T, levels)


def test_rows_are_whole_rings():
    for rows, gated in ((96, False), (192, True)):
        with pytest.raises(ValueError, match="rows must be a multiple of"):
            trellis.pack(torch.zeros(rows, 128, dtype=torch.uint8), torch.ones(rows),
                         trellis_code.learned(4), 4, gated=gated)
