"""Kernels over shapes that nobody chose: drawn, the same ones in every run, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels import reference
from quantkit_kernels.triton import fp8, nf4, w4a16, w8a8, w8a16, w16a16
from quantkit_kernels.triton.argmax import argmax
from quantkit_kernels.triton.decode_attention import decode_attention
from quantkit_kernels.triton.embedding import embed
from quantkit_kernels.triton.hadamard import apply_hadamard
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.prefill_attention import prefill_attention, tiles_of
from quantkit_kernels.triton.rms_norm import rms_norm

# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=20, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS, SMALL = st.integers(1, 40), st.integers(1, 200)


def random(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.sampled(2)
@given(m=ROWS, n=SMALL, k=SMALL, seed=st.integers(0, 99))
@DRAWN
def test_weights_with_a_scale_a_row(on, randn, product_obeys_the_rule, m, n, k, seed):
    x = randn(m, k, seed=seed, on=on)
    plain = randn(n, k, seed=seed + 1, on=on)
    product_obeys_the_rule(multiply(x, w16a16.pack(plain)), x, plain.double())
    codes = torch.randint(-127, 127, (n, k), generator=random(seed), dtype=torch.int8)
    scale = 0.01 * (0.5 + torch.rand(n, generator=random(seed)))
    packed = w8a16.pack(codes.to(on[0]), scale.to(on[0]))
    exact = reference.dequantize_int(codes, scale[:, None])
    product_obeys_the_rule(multiply(x, packed), x, exact)
    ids = torch.arange(m, device=on[0]) % n
    found = embed(ids, packed, on[1]).cpu().double()
    assert torch.allclose(found, exact[ids.cpu()], rtol=torch.finfo(on[1]).eps, atol=1e-6)
    floats = torch.where(codes == -1, 0, codes).view(torch.float8_e4m3fn)
    packed = fp8.pack(floats.to(on[0]), scale.to(on[0]))
    product_obeys_the_rule(multiply(x, packed), x, floats.double() * scale.double()[:, None])
    packed = w8a8.pack(codes.to(on[0]), scale.to(on[0]))
    levels = quantize(x, torch.int8)
    sums = levels.values.double() @ codes.to(on[0]).double().T
    want = (sums.float() * levels.scale[:, None] * scale.to(on[0])).to(on[1])
    assert torch.equal(multiply(levels, packed), want)


@given(m=ROWS, n=SMALL, group=st.sampled_from([32, 64, 128]), groups=st.integers(1, 4), zeros=st.booleans(),
       seed=st.integers(0, 99))
@DRAWN
def test_weights_in_groups(on, randn, product_obeys_the_rule, m, n, group, groups, zeros, seed):
    k = group * groups
    x = randn(m, k, seed=seed, on=on)
    codes = torch.randint(0, 16, (n, k), generator=random(seed), dtype=torch.uint8)
    scale = (0.01 * (0.5 + torch.rand(n, groups, generator=random(seed)))).half().float()
    zero = torch.randint(0, 16, scale.shape, generator=random(seed), dtype=torch.uint8) if zeros else None
    there = [None if part is None else part.to(on[0]) for part in (codes, scale, zero)]
    exact = reference.dequantize_int(codes, scale, 8 if zero is None else zero)
    product_obeys_the_rule(multiply(x, w4a16.pack(*there)), x, exact)


@given(m=ROWS, n=SMALL, blocks=st.integers(1, 6), seed=st.integers(0, 99))
@DRAWN
def test_nf4(on, randn, product_obeys_the_rule, m, n, blocks, seed):
    x = randn(m, 64 * blocks, seed=seed, on=on)
    codes = torch.randint(0, 16, (n, 64 * blocks), generator=random(seed), dtype=torch.uint8)
    most = 0.02 * (0.5 + torch.rand(n * blocks, generator=random(seed)))
    levels = torch.tensor(nf4.LEVELS).to(on[1]).double().tolist()
    got = multiply(x, nf4.pack(codes.to(on[0]), most.to(on[0])))
    product_obeys_the_rule(got, x, reference.dequantize_nf4(codes, most, levels))


@given(m=st.integers(1, 9), n=st.integers(1, 3000), seed=st.integers(0, 99))
@DRAWN
def test_rows(on, randn, obeys_the_rule, m, n, seed):
    x, weight = randn(m, n, seed=seed, on=on), randn(n, seed=seed + 1, on=on)
    obeys_the_rule(rms_norm(x, weight, 1e-6)[0], F.rms_norm(x, (n,), None, 1e-6) * weight,
                   reference.rms_norm(x, weight, 1e-6))
    x[m // 2, n // 3] = 60
    ids, finite = argmax(x)
    assert finite.all() and torch.equal(ids, x.argmax(-1))


@given(n=st.sampled_from([16, 20, 24, 48, 96, 112, 160, 192, 320]), m=st.integers(1, 6),
       seed=st.integers(0, 99))
@DRAWN
def test_rotations(on, randn, obeys_the_rule, n, m, seed):
    x = randn(m, n, seed=seed, on=on)
    signs, mix, dense = reference.rotation(n, on[0])
    obeys_the_rule(apply_hadamard(x, signs, mix), (x.float() @ dense.float()).to(on[1]), x.double() @ dense)


LENGTHS = st.lists(st.tuples(st.integers(9, 300), st.integers(9, 300)), min_size=1, max_size=2)
CODINGS = st.sampled_from([("plain", "plain", None), ("int8", "int8", None), ("fp8", "fp8", None),
                           ("channel4", "token4", 20), ("hadamard4", "hadamard4", 0),
                           ("hadamard3", "hadamard2", 7)])
WINDOWS = st.sampled_from([{}, {"window": 50}, {"limit": 30, "sinks": 4}])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", [False, True])
@given(lengths=LENGTHS, coding=CODINGS, d=st.sampled_from([32, 64, 96]), group=st.integers(1, 5), how=WINDOWS,
       seed=st.integers(0, 99))
@DRAWN
def test_attention(on, randn, obeys_the_rule, paged_cache, prompt, lengths, coding, d, group, how, seed):
    keys, values, residual_length = coding
    counts = [min(9, *one) if prompt else 1 for one in lengths]
    lengths = [[*one] for one in lengths]
    cache = paged_cache.PagedCache(lengths, counts, d, on, keys, values, residual_length, seed=seed)
    q = randn(sum(counts), 2 * group, d, seed=seed, on=on)
    given_q = q, cache.pages, cache.tables, cache.step, cache.layer
    if prompt:
        tiles = torch.tensor(tiles_of(range(len(counts)), counts, group), dtype=torch.int32).view(-1, 3)
        got = prefill_attention(*given_q, tiles.to(on[0]), scale=d**-0.5, **how)
    else:
        got = decode_attention(*given_q, scale=d**-0.5, **how)
    plain, exact = cache.expected(q, scale=d**-0.5, **how)
    obeys_the_rule(got, plain, exact, 5 * torch.ones_like(exact))
