"""Kernels of rows and attention over shapes that nobody chose: drawn, the same in every run, against
float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels import reference
from quantkit_kernels.triton.argmax import argmax
from quantkit_kernels.triton.decode_attention import decode_attention
from quantkit_kernels.triton.hadamard import apply_hadamard
from quantkit_kernels.triton.prefill_attention import prefill_attention, tiles_of
from quantkit_kernels.triton.rms_norm import rms_norm

# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=20, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])

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
