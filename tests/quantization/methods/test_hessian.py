"""Factors against fp64, in one piece and in many, and that nothing given is written to."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.finite import all_finite
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods import gptq, hessian
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.hessian import (
    damped,
    factorize,
    losses,
    rows_below,
    symmetric_,
    undrifted,
)


def form(size: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size + 1, size, generator=random) * torch.rand(size, generator=random).add(0.1)
    made = x.T @ x / len(x)
    return (made + made.T) / 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("whole", [1, 4, 5, 2048])
@pytest.mark.parametrize("size", [1, 2, 5, 13, 32])
def test_the_factor_is_that_of_the_inverse(size, whole, act_order, monkeypatch):
    monkeypatch.setattr(hessian, "WHOLE", whole)
    monkeypatch.setattr(hessian, "_ROWS", 3)
    given = form(size)
    before = given.clone()
    factors, notes = factorize(given, 0.01, act_order)
    assert torch.equal(given, before) and notes == () and factors is not None
    order = factors.order
    assert sorted(order.tolist()) == list(range(size))
    if act_order:
        assert bool((given.diagonal()[order].diff() <= 0).all())
    exact = given.double()
    assert factors.damping == pytest.approx(0.01 * float(exact.diagonal().mean()), rel=1e-5)
    inverse = (exact + factors.damping * torch.eye(size)).inverse()[order][:, order]
    upper = factors.upper.double()
    assert torch.equal(upper, upper.triu()) and bool((upper.diagonal() > 0).all())
    torch.testing.assert_close(upper.T @ upper, inverse, rtol=1e-4, atol=1e-5 * float(inverse.abs().max()))


def test_a_matrix_that_is_not_positive_definite_is_found_in_any_block(monkeypatch):
    monkeypatch.setattr(hessian, "WHOLE", 4)
    for place in range(10):
        given = form(10)
        given[place, place] = -1.0
        assert not hessian._factorize_(given)


@pytest.mark.parametrize("half", [True, False])
def test_lower_losses_are_those_of_products_in_float32(half, monkeypatch):
    monkeypatch.setattr(hessian, "native_bf16", lambda: half)
    random = torch.Generator().manual_seed(0)
    given, error = form(96), torch.randn(200, 96, generator=random)
    other = error * torch.linspace(0.5, 1.5, 200)[:, None]
    other[100] = error[100]  # the same is no lower, and no higher
    other[7] = float("nan")
    expected = losses(error, given) <= losses(other, given)
    assert torch.equal(rows_below(error, other, given), expected)
    assert expected[100] and not expected[7] and 50 < int(expected.sum()) < 150


@pytest.mark.parametrize("size", [1, 7, 300])
def test_copies_in_an_order_and_mirrored(size, monkeypatch):
    monkeypatch.setattr(hessian, "_ROWS", 64)
    given = form(size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    expected = given[order][:, order] + 0.5 * torch.eye(size)
    torch.testing.assert_close(damped(given, 0.5, order), expected, rtol=0, atol=0)
    torch.testing.assert_close(damped(given, 0.5), given + 0.5 * torch.eye(size), rtol=0, atol=0)
    half = given.tril() + torch.full_like(given, float("nan")).triu(1)
    assert torch.equal(symmetric_(half), given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 1023, 1024, 2499])
def test_a_value_that_is_not_finite_is_found_in_any_piece(bad, row):
    values = torch.zeros(2500, 2)
    assert all_finite(values) and all_finite(values[:, 0]) and all_finite(values[:0])
    values[row, 1] = bad
    assert not all_finite(values) and all_finite(values[:, 0])


@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_solved_apart_are_what_they_are_together(strategy, symmetric, monkeypatch):
    random = torch.Generator().manual_seed(3)
    weight, stats = torch.randn(50, 64, generator=random) * 0.05, LayerStats(200, form(64))
    spec = QuantSpec(bits=4, symmetric=symmetric, scale_dtype="bfloat16",
                     granularity=Granularity(strategy=strategy, size=16 if strategy == "group" else None))
    whole = gptq.METHOD.run(weight, stats, spec, gptq.GptqOptions())
    monkeypatch.setattr(gptq, "WEIGHTS_AT_ONCE", 64 * 7)
    parts = gptq.METHOD.run(weight, stats, spec, gptq.GptqOptions())
    assert parts.notes == whole.notes == () and parts.spec == whole.spec
    # a product of fewer rows may round its last bit otherwise, and a tie may then fall otherwise
    assert float((parts.codes != whole.codes).float().mean()) < 0.002
    torch.testing.assert_close(parts.scale, whole.scale, rtol=0.01, atol=0)
    assert (parts.zero is None) == (whole.zero is None) == symmetric
    one, other = (losses(values(codes) - weight, stats.hessian).sum() for codes in (whole, parts))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def values(codes) -> torch.Tensor:
    levels = codes.codes.float().view(*codes.scale.shape, -1) if codes.scale.numel() > 1 else (
        codes.codes.float().view(1, 1, -1))
    zero = 2 ** (codes.spec.bits - 1) if codes.zero is None else codes.zero.float().unsqueeze(-1)
    return ((levels - zero) * codes.scale.unsqueeze(-1)).view(codes.codes.shape)


@pytest.mark.parametrize("act_order", [True, False])
def test_weights_make_up_for_drift_as_least_squares_do(act_order: bool) -> None:
    """What they give on the new inputs is, of all weights, closest to what they gave on the old ones."""
    random = torch.Generator().manual_seed(3)
    old = torch.randn(200, 12, generator=random, dtype=torch.float64)
    new = old + 0.3 * torch.randn(200, 12, generator=random, dtype=torch.float64)
    weight = torch.randn(7, 12, generator=random, dtype=torch.float64)
    best = torch.linalg.lstsq(new, old @ weight.T).solution.T
    factors, _ = factorize((new.T @ new / 200).float(), 1e-6, act_order)
    assert factors is not None
    drift = ((old - new).T @ new / 200).float()
    torch.testing.assert_close(undrifted(weight.float(), drift, factors, 1.0), best.float(), rtol=1e-3,
                               atol=1e-4)
    half = undrifted(weight.float(), drift, factors, 0.5)
    torch.testing.assert_close(half, ((weight + best) / 2).float(), rtol=1e-3, atol=1e-4)


def test_gptq_solves_for_the_weights_that_make_up_for_drift() -> None:
    weight, drift = torch.randn(64, 32, generator=torch.Generator().manual_seed(4)), 0.2 * form(32, 5)
    spec = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=16), scale_dtype="float32")
    stats = LayerStats(100, form(32), drift=drift)
    factors, _ = factorize(form(32), gptq.GptqOptions().damp, True)
    assert factors is not None
    wanted = undrifted(weight, drift, factors, 0.5)
    found, other, without = (gptq.quantize(target, given, spec, gptq.GptqOptions(drift=share))
                             for target, given, share in ((weight, stats, 0.5), (wanted, stats, 0.0),
                                                          (weight, stats, 0.0)))
    assert torch.equal(found.codes, other.codes) and torch.equal(found.scale, other.scale)
    assert not torch.equal(found.codes, without.codes)
    assert gptq.METHOD.asked({"drift": 0.5}) == {"hessian", "drift"}
    assert gptq.METHOD.asked({"drift": 0.0}) == {"hessian"}
