"""AMX's products, by tiles in memory as Intel's manual has them: few machines have real ones."""

from __future__ import annotations

import functools

import pytest
import torch

from quantkit_kernels.cpu import compiled, decoders, isa, matmul, pack, tiles
from quantkit_kernels.cpu.float_product import CHUNK
from quantkit_kernels.cpu.tiles import TILE_BYTES, Tiles
from quantkit_kernels.cpu.values import F32, I32, I64, vec
from tests.kernels.cpu import reference

ROW = vec(I32, 16)
IN_MEMORY = isa.Isa("amx-in-memory", 16, isa.AMX.needs)


class TilesInMemory(Tiles):
    def begin(self):
        self.memory = self.e.room(8 * TILE_BYTES)

    def end(self):
        pass

    def clear(self, tile):
        for row in range(16):
            self.e.store(self._row(tile, row), self.e.const(ROW, 0))

    def load(self, tile, start, stride):
        with self.e.loop(0, 16) as row:
            self.e.store(self._row(tile, row), self.e.load(start + row * stride, ROW))

    def store(self, tile, start):
        with self.e.loop(0, 16) as row:
            self.e.store(start + row * 64, self.e.load(self._row(tile, row), ROW))

    def multiply(self, total, weights, inputs):
        e, real = self.e, vec(F32, 16)
        with e.loop(0, 16) as row:
            even, odd = e.var(e.const(real, 0.0)), e.var(e.const(real, 0.0))
            with e.loop(0, 16) as k:
                pair = e.load(self._row(weights, row) + k * 4, I32).spread(16)
                columns = e.load(self._row(inputs, k), ROW)
                even.set(e.fma((pair << 16).bits(real), (columns << 16).bits(real), even.get()))
                odd.set(e.fma((pair & -65536).bits(real), (columns & -65536).bits(real), odd.get()))
            place = self._row(total, row)
            e.store(place, e.load(place, real) + (even.get() + odd.get()))

    def _row(self, tile, row):
        row = row if hasattr(row, "ir") else self.e.const(I64, row)
        return self.memory + (row * 64 + tile * TILE_BYTES)


@pytest.fixture
def product(monkeypatch, multiply, fastest):
    """``product(matmul, x, …)``: by tiles in memory."""
    if not fastest.bf16:
        pytest.skip("all but the tiles is done by AVX-512, which this CPU lacks")
    monkeypatch.setattr("quantkit_kernels.cpu.amx.Tiles", TilesInMemory)
    return functools.partial(multiply, IN_MEMORY)


@pytest.mark.parametrize(("n", "k"), [(32, 32), (97, 96), (64, CHUNK + 64)])
def test_the_bits_of_the_manual_in_any_company(product, same, n, k):
    make = torch.Generator().manual_seed(n)
    weight, x = torch.randn(n, k, generator=make).bfloat16(), torch.randn(37, k, generator=make)
    held, bias = torch.randn(37, n, generator=make), torch.randn(-(-n // 32) * 32, generator=make)
    exact = reference.tile_matmul(reference.bfloat(x.numpy()), weight.float().numpy(),
                                  (held + bias[:n]).numpy())
    run = functools.partial(product, matmul.Matmul(decoders.BF16, None), weights=pack.rows(weight), n=n,
                            bias=bias)
    for rows in (1, 5, 16, 17, 32, 37):
        same(run(x[:rows], add=held[:rows]), exact[:rows])
    for units in ({"stripes_a_unit": 2}, {"rows_a_unit": 20, "threads": 2}):
        same(run(x, add=held, **units), exact)


def test_kernels_use_the_instructions():
    spec = matmul.Matmul(decoders.BF16, None)
    text = compiled.assembly(spec.name, isa.AMX, functools.partial(spec.emit, isa=isa.AMX), "sapphirerapids",
                             triple="x86_64-unknown-linux-gnu")
    assert text.count("tdpbf16ps") == 6
    assert all(word in text for word in ("ldtilecfg", "tileloadd", "tilerelease"))


def test_who_may_not_use_tiles_is_given_other_instructions(monkeypatch):
    from quantkit.ops import cpu_machine

    features = dict.fromkeys(isa.AMX.needs, True)
    monkeypatch.delenv("QUANTKIT_ISA", raising=False)
    monkeypatch.setattr(isa, "host_features", lambda: features)
    monkeypatch.setattr(tiles, "permitted", lambda: False)
    cpu_machine.isa.cache_clear()
    cpu_machine.reason_against_tiles.cache_clear()
    try:
        assert cpu_machine.isa().name == "avx512-bf16"
        monkeypatch.setenv("QUANTKIT_ISA", "amx")
        cpu_machine.isa.cache_clear()
        with pytest.raises(Exception, match="doesn't permit"):
            cpu_machine.isa()
    finally:
        cpu_machine.isa.cache_clear()
        cpu_machine.reason_against_tiles.cache_clear()
