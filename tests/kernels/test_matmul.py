"""A multiply: how it is cut, what follows the sum, where the result goes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quantkit_kernels.reference import dequantize_int
from quantkit_kernels.triton import w8a8, w8a16, w16a16
from quantkit_kernels.triton.arrivals import counters
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import PROGRAMS, SPLIT_ROWS, multiply, plan

FAMILIES = ("ampere", "hopper", "blackwell", "cdna")
GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("n", [1, 128, 4096, 14336, 128256])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 32, 33, 112])
def test_segments_cover_k_and_are_the_same_for_all_rows(n, tiles):
    for family in FAMILIES:
        plans = [plan(n, tiles, m, 64, family) for m in (1, 2, 16, 17, 64, SPLIT_ROWS, 4096)]
        assert len({(p.per, p.segments) for p in plans}) == 1
        p = plans[0]
        assert (p.segments - 1) * p.per < tiles <= p.segments * p.per
        assert p.segments * -(-n // 128) <= max(PROGRAMS, -(-n // 128))
        assert plans[0].split == (p.segments > 1) and not plans[-1].split


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_covers_few_rows_without_waste(family):
    assert plan(4096, 32, 1, 128, family).bm == plan(4096, 32, 16, 128, family).bm == 16
    assert all(plan(4096, 32, m, bk, family, grouped).bm <= 128 for m in (17, 4096) for bk in (32, 64, 128)
               for grouped in (False, True))


@pytest.mark.parametrize(("family", "early"), [("ampere", False), ("hopper", True), ("blackwell", True),
                                               ("cdna", False)])
def test_kernels_begin_early_only_where_it_was_measured_and_can_be(family, early):
    def begins(measured):
        p = plan(4096, 32, 1, 128, family, measured=measured)
        return p.early, p.options.get("launch_pdl", False)

    assert begins({"pdl": 1}) == (early, early)
    assert begins({}) == begins({"pdl": 0}) == (False, False)


@pytest.fixture
def weight(on):
    """int8 codes, and the same weight in float64."""
    def make(n, k, **how):
        random = torch.Generator().manual_seed(0)
        codes = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8).to(on[0])
        scale = 0.01 * (0.5 + torch.rand(n, generator=random)).to(on[0])
        return w8a16.pack(codes, scale, **how), dequantize_int(codes, scale[:, None])

    return make


def test_whoever_adds_segments_adds_them_in_the_same_order(on, randn, weight):
    """The last program of a tile, time after time, or one that goes through all of K."""
    packed, _ = weight(300, 576)
    x = randn(SPLIT_ROWS + 2, 576, on=on)
    every = multiply(x, packed)
    assert all(torch.equal(multiply(x[:m], packed), every[:m]) for m in (1, 17, 64, 17))
    assert not counters(x.device).any()


def test_a_large_gated_product_has_the_same_bits_every_time(on, randn, obeys_the_rule, weight):
    """Large enough on a GPU that its tiles meet in every order, so that a race would show."""
    n, k, rows, times = (28672, 4096, 512, 20) if on[0].type == "cuda" else (76, 576, 33, 3)
    packed, plain = weight(n, k, gated=True)
    x = randn(rows, k, on=on)
    first = multiply(x, packed, gated="silu")
    assert all(torch.equal(multiply(x, packed, gated="silu"), first) for _ in range(times - 1))
    exact, rounded = ((F.silu(gate) * up) for gate, up in (
        F.linear(x.to(dtype), plain.to(dtype)).chunk(2, 1) for dtype in (torch.float64, on[1])))
    obeys_the_rule(first, rounded, exact)


# one segment; several as programs; several in one program
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("m", "k"), [(3, 128), (17, 576), (130, 576)])
@pytest.mark.parametrize("gate", [None, *GATES])
def test_what_follows_the_sum(on, randn, obeys_the_rule, weight, m, k, gate):
    packed, plain = weight(76, k, gated=gate is not None)
    n = packed.outputs
    x, bias, residual = randn(m, k, on=on), randn(76, seed=1, on=on), randn(m, n, seed=2, on=on)

    def model(dtype):
        y = F.linear(x.to(dtype), plain.to(dtype), bias.to(dtype))
        if gate is not None:
            up = y[:, n:]
            y = GATES[gate](y[:, :n]) * up
        return y + residual.to(dtype)

    obeys_the_rule(multiply(x, packed, bias=bias, residual=residual, gated=gate), model(on[1]),
                   model(torch.float64))


@pytest.mark.parametrize(("m", "k"), [(2, 128), (2, 576)])
def test_parts_of_wider_buffers(on, randn, weight, m, k):
    packed, _ = weight(40, k)
    x, residual = randn(m, k, on=on), randn(m, 40, seed=1, on=on)
    expected = multiply(x, packed, residual=residual)
    source, target = x.new_full((m, 2 * k), float("nan")), x.new_full((m, 100), float("nan"))
    source[:, 16:16 + k] = x
    out = target[:, 48:88]
    out.copy_(residual)
    assert multiply(source[:, 16:16 + k], packed, out=out, residual=out) is out
    assert torch.equal(out, expected) and target[:, :48].isnan().all() and target[:, 88:].isnan().all()
    assert torch.equal(multiply(x.T.contiguous().T, packed, residual=residual.T.contiguous().T), expected)


@pytest.mark.parametrize("gate", GATES)
def test_gates_far_from_zero_stay_finite(on, gate):
    values = torch.tensor([-6e4, -300.0, -20.0, -3.0, 0.0, 3.0, 300.0, 6e4])
    both = torch.cat((values, torch.ones(8))).to(on[1])
    packed = w16a16.pack(both[:, None].to(on[0]), gated=True)
    got = multiply(torch.ones(1, 1, dtype=on[1], device=on[0]), packed, gated=gate)[0].cpu().double()
    exact = GATES[gate](both[:8].double())
    assert torch.allclose(got, exact, rtol=torch.finfo(on[1]).eps, atol=1e-6)


def test_multiply_refuses_arguments_that_do_not_match():
    packed = w8a16.pack(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4))
    for x in (torch.zeros(2, 9), torch.zeros(8), torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"\[m, 8\]"):
            multiply(x, packed)
    x = torch.zeros(2, 8)
    for how, words in (({"out": torch.zeros(2, 3)}, "out"), ({"out": torch.zeros(4, 2).T}, "out"),
                       ({"out": torch.zeros(2, 4, dtype=torch.half)}, "out"),
                       ({"residual": torch.zeros(4)}, "residual"), ({"bias": torch.zeros(3)}, "bias"),
                       ({"gated": "silu"}, "gated"), ({"gated": "relu"}, "gated")):
        with pytest.raises(ValueError, match=words):
            multiply(x, packed, **how)
    gated = w8a16.pack(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4), gated=True)
    with pytest.raises(ValueError, match="silu or gelu_tanh"):
        multiply(x, gated)
    with pytest.raises(ValueError, match="equally many rows"):
        w8a16.pack(torch.zeros(3, 8, dtype=torch.int8), torch.ones(3), gated=True)
    with pytest.raises(ValueError, match="no Levels"):
        multiply(quantize(x, torch.int8), packed)
    with pytest.raises(ValueError, match="takes Levels"):
        multiply(x, w8a8.pack(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)))
    with pytest.raises(ValueError, match="float32"):
        multiply(x.half(), w16a16.pack(torch.zeros(4, 8)))
    assert multiply(torch.zeros(0, 8), packed).shape == (0, 4)
    assert packed.nbytes == 128 * 64 + 4 * 128
