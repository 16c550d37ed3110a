"""Rotation, cache write and attention over pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.kv.codecs.kivi import GroupedGrid
from quantkit.kv.codecs.per_token import Float8Vectors, Int8Vectors, PlainVectors
from quantkit_kernels.cpu import attention, kv_codecs, kv_write
from quantkit_kernels.cpu.kv_pages import SEQUENCE, PageCodecs
from quantkit_kernels.cpu.program import Program
from tests.kernels.cpu import reference

CODECS = {"bf16": PlainVectors(torch.bfloat16), "f16": PlainVectors(torch.float16),
          "f32": PlainVectors(torch.float32), "int8": Int8Vectors(), "fp8": Float8Vectors(),
          **{f"token{bits}": GroupedGrid(bits, channels=False) for bits in (2, 3, 4)}}
MANY = 2**31 - 1


class Pages:
    """One sequence's keys and values in one layer, its pages in no order; fed step by step."""

    def __init__(self, isa, pool, room, codec, dim, group, heads, total, seed=0):
        self.isa, self.pool, self.room, self.codec = isa, pool, room, codec
        self.dim, self.group, self.heads, self.total = dim, group, heads, total
        make = torch.Generator().manual_seed(seed)
        self.q = torch.randn(total, heads * group, dim, generator=make)
        self.k, self.v = (torch.randn(total, heads, dim, generator=make) for _ in range(2))
        angle = torch.arange(total)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.cos, self.sin = angle.cos().contiguous(), angle.sin().contiguous()
        count = -(-total // kv_codecs.PAGE)
        self.table = torch.randperm(count * heads, generator=make).view(heads, count).int().contiguous()
        layout = CODECS[codec].layout(dim, torch.bfloat16)
        self.parts = {f"{side}_{name}": torch.zeros(count * heads * kv_codecs.PAGE, *shape, dtype=dtype)
                      for side in "kv" for name, (shape, dtype) in layout.items()}
        self.positions = None
        self.seen = 0

    def step(self, count, *, splits=1, tile=16, window=MANY, limit=MANY, sinks=0, norms=(None, None)):
        """The next tokens' results, ``[count, heads · group, D]``."""
        begin, end = self.seen, self.seen + count
        lengths = torch.full((1, self.heads), begin, dtype=torch.int32)
        table, codecs = self.table, PageCodecs(self.codec, self.codec)
        record = np.zeros(1, SEQUENCE)
        record["table"], record["table_width"] = table.data_ptr(), table.shape[1]
        record["lengths"], record["count"] = lengths.data_ptr(), count
        sequences = torch.from_numpy(record.view(np.int64))
        rows = torch.tensor([[0, i, begin + i] for i in range(count)])
        tiles = torch.tensor([[i, min(tile, count - i), 0] for i in range(0, count, tile)])
        q, k, v = (x[begin:end].clone().contiguous() for x in (self.q, self.k, self.v))
        width, queries = self.heads * self.group * self.dim * 4, self.heads * self.group
        out, partial = self.room(count, queries, self.dim), self.room(count, queries, splits, self.dim + 2)
        scratch = self.room(self.pool.threads, attention.scratch_bytes(self.dim, tile * self.group),
                            dtype=torch.uint8)
        where = {**self.parts, "positions": self.positions, "rows": rows, "sequences": sequences, "layer": 0,
                 "heads": self.heads}
        program = Program(self.isa)
        program.add(kv_write.RopeStore(codecs, self.dim), count * self.heads, **where, q=q, k=k, v=v,
                    cos=self.cos, sin=self.sin, q_norm=norms[0], k_norm=norms[1], q_stride=width,
                    kv_stride=self.heads * self.dim * 4, group=self.group)
        program.add(attention.Attend(codecs, self.dim), len(tiles) * self.heads * splits, **where, q=q,
                    out=out, tiles=tiles, scratch=scratch, partial=partial, q_stride=width, out_stride=width,
                    group=self.group, window=window, limit=limit, sinks=sinks, splits=splits,
                    scratch_private=scratch.shape[1])
        program.add(attention.ReduceSplits(self.dim), count * queries if splits > 1 else 0, partial=partial,
                    out=out, out_stride=width, query_heads=queries, splits=splits)
        program.finish()
        self.pool.run(program.records)
        self.seen = end
        return out

    def stored(self, name):
        """A part of all tokens so far, ``[tokens, heads, …]``."""
        slots = (self.table.long()[:, :, None] * kv_codecs.PAGE + torch.arange(kv_codecs.PAGE)).flatten(1)
        return self.parts[name][slots[:, :self.seen]].transpose(0, 1)


@pytest.fixture
def pages(pools, room):
    return lambda isa, *args, threads=1, **more: Pages(isa, pools[threads], room, *args, **more)


def turned(one, x, scale=None):
    """``x [T, H, D]`` rotated to positions from 0 on."""
    cos, sin = (angle[:len(x), None].numpy() for angle in (one.cos, one.sin))
    return torch.from_numpy(reference.rotate(x.numpy(), cos, sin, scale))


def exact(one, begin, window=MANY, limit=MANY, sinks=0):
    """Queries from ``begin`` on by the reference."""
    end, codec = one.seen, CODECS[one.codec]
    q = turned(one, one.q[:end], one.dim**-0.5).numpy()
    keys = codec.decode(codec.encode(turned(one, one.k[:end]))).float()
    values = codec.decode(codec.encode(one.v[:end])).float()
    at = torch.arange(end)
    behind = at[begin:, None] - at[None]
    seen = (behind >= 0) & (behind < window) & ((behind < limit) | (at[None] < sinks))
    pairs = [(keys[:, head // one.group].numpy(), values[:, head // one.group].numpy())
             for head in range(one.heads * one.group)]
    return torch.stack([torch.from_numpy(reference.attend(q[begin:, head], *pair, seen.numpy()))
                        for head, pair in enumerate(pairs)], 1)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_the_bits_of_the_reference(isa, pages, codec, dim):
    one = pages(isa, codec, dim, 2, 2, 300)
    one.step(280)
    assert torch.equal(one.step(20), exact(one, 280))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dim", [8, 2, 20])
def test_small_and_odd_heads(isa, pages, dim):
    one = pages(isa, "bf16", dim, 3, 1, 70)
    one.step(69)
    assert torch.equal(one.step(1), exact(one, 69))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_stored_is_what_the_codec_makes(isa, pages, codec):
    one = pages(isa, codec, 64, 1, 2, 130)
    one.k[3] = 0
    one.k[4, :, 0] = 1e30
    one.v[5] = torch.randn(2, 64) * 1e-40
    one.step(130)
    for side, x in (("k", turned(one, one.k)), ("v", one.v)):
        kept = getattr(CODECS[codec], "_dtype", None)
        for name, part in CODECS[codec].encode(x if kept is None else x.to(kept)).items():
            found, wanted = (t.contiguous().view(torch.uint8) for t in (one.stored(f"{side}_{name}"), part))
            assert torch.equal(found, wanted), name


@pytest.mark.sampled(12)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("limits", [{}, {"window": 40}, {"limit": 30, "sinks": 4}, {"window": 1}])
def test_any_tile_split_chunk_and_thread_gives_the_same_bits(isa, pages, codec, limits):
    whole = pages(isa, codec, 64, 3, 2, 600)
    expected = whole.step(600, **limits)
    assert torch.equal(expected[590:], exact(whole, 590, **limits))
    parts = pages(isa, codec, 64, 3, 2, 600, threads=2)
    steps = (1, 1, 1), (254, 1, 7), (1, 2, 1), (1, 3, 1), (340, 1, 16), (1, 9, 1), (2, 3, 2)
    found = [parts.step(count, splits=splits, tile=tile, **limits) for count, splits, tile in steps]
    assert torch.equal(torch.cat(found), expected)


def test_near_float64(isa, pages):
    one = pages(isa, "bf16", 64, 3, 2, 400)
    found = one.step(400)
    q = turned(one, one.q).double()
    k = one.stored("k_values").double().repeat_interleave(3, 1)
    v = one.stored("v_values").double().repeat_interleave(3, 1)
    true = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True).transpose(0, 1)
    assert (found.double() - true).abs().max() < 2e-6


def test_norms_come_before_rotation(isa, pages):
    one = pages(isa, "bf16", 32, 2, 1, 40)
    weights = torch.rand(32) + 0.5, torch.rand(32) + 0.5
    found = one.step(40, norms=weights)
    for side, weight in zip("qk", weights):
        x = getattr(one, side)
        setattr(one, side, torch.from_numpy(reference.norm(x.reshape(-1, 32).numpy(), weight.numpy(), 0.0)
                                            ).view(x.shape))
    assert torch.allclose(found, exact(one, 0), atol=3e-2)  # the sum of squares has another order
