"""Pages whose vectors wait to be encoded: kernels beside the cache's own operations on the same steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.models.architecture import parse_config
from quantkit.models.forward_context import ForwardContext
from quantkit.ops.cpu_weight import PLAIN
from quantkit.ops.hadamard import hadamard_factors
from quantkit_kernels.cpu import attention, kv_pages, kv_write
from quantkit_kernels.cpu.kv_codecs import PARTS
from quantkit_kernels.cpu.program import Program

MANY = 2**31 - 1
GROUP, HEADS = 2, 2
SETTINGS = ("int4", "int3(sinks=0)", "int2(residual_length=0, sinks=0)", "int8(residual_length=64)",
            "fp8(residual_length=1, sinks=1)", "int8/int4(residual_length=100)", "int4/int8", "rotation(2)",
            "rotation(3.5, residual_length=10)", "rotation(4, sinks=0)", "rotation(3)/int4",
            "bf16(sinks=65)/int2")


class Kernels:
    """One sequence in one layer of a cache, its steps taken by kernels."""

    def __init__(self, isa, pool, room, kv, dim, total, numbered=False, seed=0, dtype=torch.bfloat16):
        self.isa, self.pool, self.room, self.dim = isa, pool, room, dim
        self.config = parse_config({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": GROUP * HEADS, "head_dim": dim,
            "num_key_value_heads": HEADS})
        setting = parse_kv(f"window({MANY // 2})+{kv}" if numbered else kv)  # so wide that all is seen
        self.cache, self.twin = (KVCache(self.config, setting, dtype) for _ in range(2))
        self.plain = PLAIN[dtype]
        self.number, self.other = self.cache.add(), self.twin.add()
        make = torch.Generator().manual_seed(seed)
        self.q = torch.randn(1, HEADS * GROUP, total, dim, generator=make)
        # channels of very different sizes, a part in common, a first token like no other
        scale = torch.randn(HEADS, 1, dim, generator=make).exp()
        self.k = (torch.randn(1, HEADS, total, dim, generator=make) + 2) * scale
        self.k[:, :, 0] *= 20
        self.v = torch.randn(1, HEADS, total, dim, generator=make)
        self.seen = 0

    def step(self, count, *, splits=1, tile=16):
        """The next tokens' results, ``[count, heads, D]``."""
        begin, end, cache = self.seen, self.seen + count, self.cache
        held, codings = cache._sequences[self.number], cache.codecs
        cache.reserve(held, count)
        store = cache.layers[0].store
        codecs = kv_pages.PageCodecs(codings.keys.name, codings.values.name, self.plain)
        blocks = held.pages_to_encode(codings, count)
        record = held.record.copy().reshape(1)
        record["count"] = count
        q, k, v = (x[0, :, begin:end].transpose(0, 1).clone().contiguous() for x in (self.q, self.k, self.v))
        context = ForwardContext(self.config, torch.arange(end)[None], torch.float32)
        cos, sin = (one[0, 0, :, self.dim // 2:].contiguous() for one in context.rope_tables(None))
        width, queries = HEADS * GROUP * self.dim * 4, HEADS * GROUP
        out, partial = self.room(count, queries, self.dim), self.room(count, queries, splits, self.dim + 2)
        size = max(attention.scratch_bytes(self.dim, tile * GROUP), kv_write.encode_bytes(self.dim))
        scratch = self.room(self.pool.threads, size, dtype=torch.uint8)
        parts = {name.replace(".", "_"): part for name, part in store.pages.parts.items()}
        waits = store.residual.parts
        hadamard_arguments = dict(zip(("signs", "mix"), hadamard_factors(self.dim)))
        where = {**{f"{s}_{name}": parts.get(f"{s}_{name}") for s in "kv" for name in PARTS},
                 "positions": parts.get("positions"), "residual_positions": waits.get("positions"),
                 "k_residual": waits["k.values"], "v_residual": waits["v.values"], "layer": 0, "heads": HEADS,
                 "rows": torch.tensor([[0, i, begin + i] for i in range(count)]),
                 "sequences": torch.from_numpy(record.view(np.int64)),
                 "residual_length": codings.residual_length, "first": codings.first}
        tiles = torch.tensor([[i, min(tile, count - i), 0] for i in range(0, count, tile)])
        program = Program(self.isa)
        program.add(kv_write.RopeStore(codecs, self.dim), count * HEADS, **where, **hadamard_arguments, q=q,
                    k=k, v=v, cos=cos, sin=sin, q_stride=width, kv_stride=HEADS * self.dim * 4, group=GROUP)
        program.add(kv_write.EncodePages(codecs, self.dim), HEADS * blocks, **where, scratch=scratch,
                    blocks=blocks, scratch_private=scratch.shape[1])
        program.add(attention.Attend(codecs, self.dim), len(tiles) * HEADS * splits, **where, q=q, out=out,
                    tiles=tiles, scratch=scratch, partial=partial, q_stride=width, out_stride=width,
                    group=GROUP, window=MANY, limit=MANY, splits=splits, scratch_private=scratch.shape[1])
        program.add(attention.ReduceSplits(self.dim), count * queries if splits > 1 else 0, partial=partial,
                    out=out, out_stride=width, query_heads=queries, splits=splits)
        if codings.values.hadamard:
            program.add(kv_write.UndoHadamard(self.dim), count, **hadamard_arguments, x=out, x_stride=width,
                        heads=queries)
        program.finish()
        self.pool.run(program.records)
        cache.advance(held, count)
        self.seen = end
        return out

    def expected(self, count):
        """The same by the cache's own operations, of all tokens that the kernels had not at its last call."""
        begin = self.twin.seen(self.other)
        batch = Batch(self.twin, [self.other])
        batch.begin([count])
        at = torch.arange(begin, begin + count)[None]
        found = batch.attend(0, *(x[:, :, begin:begin + count] for x in (self.q, self.k, self.v)),
                             ForwardContext(self.config, at, torch.float32), None)
        return found[0].transpose(0, 1)


@pytest.fixture
def kernels(pools, room):
    return lambda isa, *args, threads=1, **more: Kernels(isa, pools[threads], room, *args, **more)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kv", "dim"), [*((kv, 64) for kv in SETTINGS), ("int4", 32), ("rotation(3)", 96),
                                         ("int2", 96)])
def test_kernels_do_what_the_caches_own_operations_do(isa, kernels, kv, dim):
    one = kernels(isa, kv, dim, 420, numbered="sinks=0" in kv)
    for count in (150, 1, 1, 61, 1, 190, 1):
        found, expected = one.step(count), one.expected(count)
        size = float(expected.abs().mean())
        # a number on the edge between two bfloat16s, or two codes, may fall to either side
        assert float((found - expected).abs().mean()) < size * (4e-3 if "rotation" in kv else 1e-3), count
        mine, its = (cache.layers[0].store for cache in (one.cache, one.twin))
        for name, part in its.pages.parts.items():
            got, want = (t.contiguous().view(torch.uint8) for t in (mine.pages.parts[name], part))
            assert got.shape == want.shape, name
            same = float((got == want).float().mean()) if len(got) else 1.0
            assert same > (0.98 if "rotation" in kv else 0.995), name
    assert one.cache.allocated_bytes == one.twin.allocated_bytes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kv", ["int4", "int8(residual_length=64)", "rotation(3)"])
def test_vectors_wait_in_the_dtype_that_the_cache_has(isa, kernels, kv, dtype):
    one = kernels(isa, kv, 64, 260, dtype=dtype)
    for count in (150, 1, 108, 1):
        found, expected = one.step(count), one.expected(count)
        assert float((found - expected).abs().mean()) < 3e-3 * float(expected.abs().mean()), count
    mine, its = (cache.layers[0].store.residual.parts["k.values"] for cache in (one.cache, one.twin))
    assert mine.dtype == its.dtype == dtype
    assert float((mine - its).abs().max()) <= torch.finfo(dtype).eps * 4 * float(its.abs().max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", ["int3(residual_length=70, sinks=0)", "rotation(3)"])
def test_any_tile_split_chunk_and_thread_gives_the_same_bits(isa, kernels, kv):
    whole = kernels(isa, kv, 64, 700)
    expected = whole.step(700)
    parts = kernels(isa, kv, 64, 700, threads=2)
    steps = (1, 1, 1), (254, 1, 7), (1, 2, 1), (1, 3, 1), (340, 1, 16), (1, 9, 1), (2, 3, 2), (100, 3, 16)
    found = [parts.step(count, splits=splits, tile=tile) for count, splits, tile in steps]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("kv", ["rotation(3)", "rotation(4, residual_length=0, sinks=0)"])
def test_the_largest_numbers_stay_finite_when_vectors_are_rotated(isa, kernels, kv):
    one = kernels(isa, kv, 64, 200)
    most = torch.finfo(torch.bfloat16).max / 4  # positions turn a pair of numbers, which may add up
    one.q, one.k = one.q * 1e-30, torch.full_like(one.k, most)
    one.v = torch.where(one.v > 0, most, -most)
    for count in (130, 1, 69):
        assert torch.isfinite(one.step(count)).all() and torch.isfinite(one.expected(count)).all()


def test_codecs_that_read_the_same_bits_are_the_ones_that_the_cache_has():
    """Every coding of a built-in codec has a kernel by its name."""
    from quantkit.kv.build import build_kv_codecs
    from quantkit_kernels.cpu.kv_codecs import CODECS

    for kv in ("int8", "fp8", "int4", "int3", "int2", *(f"rotation({bits})" for bits in (2, 2.5, 3, 3.5, 4))):
        codings = build_kv_codecs(parse_kv(kv))
        for side, coding in (("k", codings.keys), ("v", codings.values)):
            kernel = CODECS[coding.name]
            assert kernel.hadamard == coding.hadamard
            for of, layout in ((kernel.bytes(64), coding.layout), (kernel.shared(64), coding.shared)):
                want = {name: torch.Size(shape).numel() * dtype.itemsize
                        for name, (shape, dtype) in layout(64, torch.bfloat16).items()}
                assert of == want, (kv, side)
