"""What a step writes into pages: the same codes as the cache's own, in the same slots and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from quantkit_kernels import reference
from quantkit_kernels.triton import close_pages as close
from quantkit_kernels.triton import rope_store as rope
from quantkit_kernels.triton.advance import advance
from quantkit_kernels.triton.cache import LayerPages, SequenceTables, StepTokens
from quantkit_kernels.triton.close_pages import close_pages
from quantkit_kernels.triton.rope_store import rope_store
from tests.kernels.written_cache import CODINGS, EPS, HKV, Cache, H, angles, fused, parts

# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=5, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values", "dim"), [
    ("none", "none", 64), ("int8", "int8", 128), ("fp8", "fp8", 32), ("int8", "token4", 96),
    ("none", "token3", 64), ("fp8", "token2", 32), ("int8", "none", 20)])
def test_vectors_by_themselves(on, randn, keys, values, dim):
    """A prompt of one sequence beside one token of another, then one token of each."""
    cache = Cache(on, keys, values, dim, numbered=dim == 64)
    turns = angles(90, dim, on[0])
    for counts in ((18, 1), (1, 1)):
        out, q = cache.step(counts, fused(randn, sum(counts), dim, on), turns)
        assert torch.equal(out, q) and out.is_contiguous()
    cache.same()


@pytest.mark.sampled(2)
@drawn(counts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=3),
       keys=st.sampled_from(["none", "int8", "fp8", "channel4", "channel3", "channel2"]),
       values=st.sampled_from(["none", "int8", "fp8", "token4", "token3", "token2"]),
       dim=st.sampled_from([32, 64, 96, 128]), residual_length=st.integers(0, 70), pages=st.integers(0, 1))
@DRAWN
def test_steps_of_any_length(on, randn, counts, keys, values, dim, residual_length, pages):
    waits = keys.startswith("channel")
    cache = Cache(on, keys, values, dim, residual_length * waits, 64 * pages * waits, numbered=True)
    turns = angles(400, dim, on[0])
    for at, some in enumerate(counts):
        out, q = cache.step(some, fused(randn, sum(some), dim, on, seed=at), turns)
        assert torch.equal(out, q)
        cache.same()
        cache.settle()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values", "dim", "residual_length", "first", "count"), [
    ("channel4", "token4", 64, 64, 64, 20), ("channel3", "token3", 96, 0, 0, 20),
    ("channel2", "token2", 32, 10, 0, 70), ("int8", "fp8", 32, 0, 64, 20),
    ("channel4", "none", 32, 64, 0, 20)])
def test_vectors_that_wait(on, randn, monkeypatch, keys, values, dim, residual_length, first, count):
    """A page ends in the middle of a prompt's piece, another with a decoded token: the cache's own bytes."""
    monkeypatch.setattr(close, "FEW", 8)
    cache = Cache(on, keys, values, dim, residual_length, first, numbered=True)
    turns = angles(400, dim, on[0])
    begin = first + residual_length + 64 - 1
    cache.fill((begin - 20, begin - 5), randn, turns)
    for at, counts in enumerate(((20, count), (1, 1), (0, 1))):
        shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(at)).tolist()
        out, q = cache.step(counts, fused(randn, sum(counts), dim, on, seed=at), turns, rows=shuffled)
        assert torch.equal(out, q)
        cache.same()
        if at:  # pages may also stay for a step more
            cache.settle()
    assert cache.store.pages.used >= 2 * HKV


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "values", "dim", "residual_length"), [
    ("hadamard4c", "hadamard4", 64, 64), ("hadamard3c", "hadamard3", 96, 0), ("hadamard2c", "token2", 32, 0),
    ("int8", "hadamard3", 64, 0)])
def test_rotated_vectors(on, randn, monkeypatch, keys, values, dim, residual_length):
    """Vectors that wait have the cache's bits; codes differ where sums of another order do."""
    monkeypatch.setattr(rope, "FEW", 4)
    cache = Cache(on, keys, values, dim, residual_length)
    turns, count = angles(300, dim, on[0]), residual_length + 58
    cache.fill((count, count - 8), randn, turns)
    out, q = cache.step((7, 4), fused(randn, 11, dim, on), turns)
    assert torch.equal(out, q)
    for side, name in zip("kv", (keys, values)):
        mine, other = ({key[2:]: part.cpu() for key, part in one.pages.parts.items()
                        if key.startswith(f"{side}.")} for one in (cache.store, cache.expected))
        a, b = (CODINGS[name].decode(parts).double() for parts in (mine, other))
        assert torch.isfinite(a).all() and (a - b).norm() <= 1e-3 * b.norm() and b.norm() > 0
        assert (mine["codes"] != other["codes"]).double().mean() < 1e-3
    if cache.store.residual is not None:
        for name, part in cache.expected.residual.parts.items():
            assert torch.equal(cache.store.residual.parts[name].cpu(), part)


@pytest.mark.parametrize("wide", [False, True])
def test_norms_of_heads(on, randn, obeys_the_rule, wide):
    """Weights of the model's dtype, or float32."""
    dim, n = 32, 20
    cache, turns = Cache(on, "none", "none", dim), angles(40, dim, on[0])
    weights = {f"{name}_norm": randn(dim, seed=at, on=(on[0], torch.float32 if wide else on[1])) + 1
               for at, name in enumerate("qk")}
    qkv = fused(randn, n, dim, on)
    out, q = cache.step((n, 0), qkv, turns, **weights)
    x, k, v = parts(qkv, dim)
    where = torch.arange(n, device=on[0])
    cos, sin = (t[where].repeat(1, 2).double() for t in turns)
    exact = reference.rotate(reference.rms_norm(x, weights["q_norm"], EPS), cos, sin)
    obeys_the_rule(out, q, exact)
    pages = cache.stored[1][0].layers[0].pages
    stored, plain = (store.pages.parts["k.values"][[own[0] for own in pages], :n].transpose(0, 1)
                     for store in (cache.store, cache.expected))
    exact = reference.rotate(reference.rms_norm(k, weights["k_norm"], EPS), cos, sin)
    obeys_the_rule(stored, plain.to(on[0]), exact)
    held = cache.store.pages.parts["v.values"][[own[0] for own in pages], :n].transpose(0, 1)
    assert torch.equal(held, v)


def write(cache, qkv, turns, rows, **about):
    """Tokens of a cache's first pages, in layer 1; the pages behind are other sequences'."""
    for sequence in cache.stored[1]:
        cache.store.reserve(sequence.layers[0], 64)
    where = torch.tensor(rows, dtype=torch.int32, device=cache.on[0]).view(-1, 2)
    return rope_store(qkv, *turns, cache.pages(), cache.tables(), StepTokens(where, 64), 1, heads=H,
                      kv_heads=HKV, dim=cache.dim, rotation=cache.turn, **about)


def test_three_tensors_and_a_part_that_is_not_rotated(on, randn):
    """Rows that lie apart, dimensions behind R as they are, and a result of the caller's own."""
    n, dim, width = 18, 32, 8
    a, b = (Cache(on, "int8", "none", dim) for _ in range(2))
    qkv, turns = fused(randn, n, dim, on), angles(20, width, on[0])
    rows = [(1, at) for at in range(n)]
    out = torch.empty(n, H, dim, dtype=on[1], device=on[0])
    one = write(a, qkv, turns, rows, out=out)
    apart = tuple(torch.cat((x.flatten(1), x.flatten(1)[:, :3]), 1)[:, :-3] for x in parts(qkv, dim))
    assert one is out and apart[0].stride(0) == H * dim + 3
    assert torch.equal(one, write(b, apart, turns, rows))
    for name, part in a.store.pages.parts.items():
        assert torch.equal(part, b.store.pages.parts[name])
    q = next(parts(qkv, dim))
    assert torch.equal(one[..., width:], q[..., width:])
    cos, sin = (t[:n].repeat(1, 2) for t in turns)
    assert torch.equal(one[..., :width], reference.rotate(q[..., :width].float(), cos, sin).to(on[1]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("values", ["hadamard4", "token3", "none"])
def test_a_row_does_not_depend_on_the_others(on, randn, values):
    """Nor on nobody's: those are zeros, store nothing, and may be anything before."""
    n, dim, rows = 17, 32, [(0, at) if at % 2 == 0 else (-1, 5) for at in range(17)]
    qkv, turns = fused(randn, n, dim, on), angles(40, dim, on[0])
    spoiled = qkv.clone()
    spoiled[1::2] = float("nan")
    many, few = (Cache(on, "int8", values, dim, sequences=1) for _ in range(2))
    out = write(many, spoiled, turns, rows)
    assert (out[1::2] == 0).all()
    for at in (0, 4, 16):
        assert torch.equal(write(few, qkv[at:at + 1], turns, rows[at:at + 1])[0], out[at])
    for name, part in few.store.pages.parts.items():
        first_pages = [own[0] for own in few.stored[1][0].layers[0].pages]
        mine, other = part[first_pages], many.store.pages.parts[name][first_pages]
        assert torch.equal(mine[:, [0, 4, 16]], other[:, [0, 4, 16]])
        assert not mine[:, 1:4].bool().any() and not other[:, 1].bool().any()


@pytest.mark.parametrize("values", ["int8", "fp8", "token4", "token3", "hadamard2", "bf16"])
def test_extremes(on, monkeypatch, values):
    """Zeros, an outlier, ties, the smallest and the largest numbers: finite, and the cache's own codes."""
    monkeypatch.setattr(rope, "FEW", 4)
    dim, dtype = 32, on[1]
    if values == "bf16" and on[0].type == "cpu":
        pytest.skip("Triton's interpreter doesn't round to bfloat16")
    most, lines = torch.finfo(dtype).max, torch.zeros(8, 32)
    lines[1, 3], lines[2], lines[3] = -most, torch.finfo(dtype).tiny, torch.arange(32) + 0.5
    lines[4], lines[5, ::2], lines[6], lines[7] = 1.0, -1.0, most, torch.linspace(-most / 2, most / 2, 32)
    qkv = lines.to(dtype).to(on[0]).repeat(1, H + 2 * HKV)
    cache = Cache(on, "none", values, dim)
    out, q = cache.step((8, 0), qkv, angles(8, dim, on[0]))
    assert torch.isfinite(out).all()
    finite = torch.isfinite(q)  # where torch's is not
    assert torch.equal(out[finite], q[finite])
    own = {name[2:]: part for name, part in cache.store.pages.parts.items() if name.startswith("v.")}
    assert torch.isfinite(CODINGS[values].decode(own)).all()
    for name, part in cache.expected.pages.parts.items():
        if values != "hadamard2" and name.startswith("v."):
            assert torch.equal(cache.store.pages.parts[name].cpu(), part), name


def test_decoding_needs_nothing_from_the_host(on, randn):
    """Token after token over a page's end, by kernels alone; captured once where there are graphs."""
    dim, steps = 32, 6
    cache, turns = Cache(on, "channel4", "token4", dim, sequences=1), angles(80, dim, on[0])
    cache.fill((60,), randn, turns)
    cache.store.reserve(cache.stored[1][0].layers[0], steps)
    tables, pages = cache.tables(), cache.pages()
    tokens, given = fused(randn, steps, dim, on), fused(randn, 1, dim, on)
    step = StepTokens(torch.zeros(1, 2, dtype=torch.int32, device=on[0]), 80)

    def decode():
        rope_store(given, *turns, pages, tables, step, 1, heads=H, kv_heads=HKV, dim=dim)
        close_pages(pages, tables, step, 1)
        advance(tables, step)

    run = decode
    if on[0].type == "cuda":
        before = tables.lengths.clone(), tables.seen.clone()
        decode()  # compiles
        tables.lengths.copy_(before[0])
        tables.seen.copy_(before[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
        run = graph.replay
    for token in tokens:
        given.copy_(token)
        run()
    for token in tokens:
        cache.step((1,), token[None], turns, run=False)
    assert tables.lengths.unique().tolist() == [66] and tables.seen.tolist() == [66]
    cache.same()


def test_rope_store_and_close_pages_refuse_arguments_that_do_not_match(randn):
    on = (torch.device("cpu"), torch.float32)
    cache, turns = Cache(on, "int8", "int8", 32), angles(4, 32, "cpu")
    qkv = fused(randn, 2, 32, on)
    rows = [(0, 0), (1, 0)]
    assert write(cache, qkv[:0], turns, []).shape == (0, H, 32)
    for given, message in (({"qkv": qkv[:, 1:]}, "split"), ({"turns": (turns[0].double(), turns[1])}, "fit"),
                           ({"rows": [(0, 0)]}, "fit"), ({"out": qkv}, "must go"),
                           ({"q_norm": qkv[0, :32]}, "norms"),
                           ({"q_norm": qkv[0], "k_norm": qkv[0]}, "norms")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            write(**{"cache": cache, "qkv": qkv, "turns": turns, "rows": rows} | given)
    waits = Cache(on, "channel4", "token4", 32)
    step, tables, pages = StepTokens(torch.tensor(rows, dtype=torch.int32), 64), waits.tables(), waits.pages()
    about = {"heads": H, "kv_heads": HKV, "dim": 32}
    with pytest.raises(ValueError, match="tables"):
        rope_store(qkv, *turns, pages, replace(tables, starts=None), step, 1, **about)
    with pytest.raises(ValueError, match="wait for each other"):
        rope_store(qkv, *turns, LayerPages(replace(pages.k, residual=None), replace(pages.v, residual=None)),
                   tables, step, 1, **about)
    with pytest.raises(ValueError, match="only a layer with residual vectors"):
        close_pages(cache.pages(), cache.tables(), step, 1)
    turned = Cache(on, "int8", "hadamard4", 32)
    with pytest.raises(ValueError, match="rotation"):
        rope_store(qkv, *turns, turned.pages(), turned.tables(), step, 1, **about)


def test_a_step_is_counted(on):
    lengths = torch.arange(4 * 3 * 2, dtype=torch.int32, device=on[0]).view(4, 3, 2)
    seen = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=on[0])
    rows = torch.tensor([[2, 0], [-1, 0], [0, 0]], dtype=torch.int32, device=on[0])
    before = lengths.clone()
    advance(SequenceTables(lengths, lengths, seen), StepTokens(rows, 9))
    more = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=on[0])
    assert torch.equal(lengths, before + more[:, None, None]) and seen.tolist() == [6, 6, 8, 8]
    with pytest.raises(ValueError, match="contiguous"):
        advance(SequenceTables(lengths, lengths.transpose(1, 2), seen), StepTokens(rows, 9))
