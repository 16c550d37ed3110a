"""Rotations of rows: the bits of the same steps in torch, whatever the width."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops import hadamard as reference_hadamard
from quantkit_kernels import reference
from quantkit_kernels.triton import hadamard
from quantkit_kernels.triton.hadamard import apply_hadamard


def factors(n, on):
    return tuple(part.to(on[0]) for part in reference_hadamard.hadamard_factors(n))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 7, 12, 64, 80, 96, 128, 256, 576, 1536, 4096, 152, 11008])
def test_there_and_back(on, randn, n):
    """In registers, and in parts from 9 times a power of two on."""
    x = randn(3, n, on=on)
    there, back = (apply_hadamard(x, *factors(n, on), back=way) for way in (False, True))
    assert torch.equal(there, reference_hadamard.apply_hadamard(x)) and torch.equal(back,
                                                                                    reference_hadamard.undo_hadamard(x))
    assert (hadamard.constants(n) is None) == (n in (576, 152, 11008))


@pytest.mark.parametrize("n", [96, 320, 576])
def test_against_the_whole_matrix(on, randn, obeys_the_rule, n):
    x = randn(5, n, on=on)
    signs, mix, dense = reference.rotation(n, on[0])
    obeys_the_rule(apply_hadamard(x, signs, mix), (x.float() @ dense.float()).to(on[1]), x.double() @ dense)
    obeys_the_rule(apply_hadamard(x, signs, mix, back=True), (x.float() @ dense.T.float()).to(on[1]),
                   x.double() @ dense.T)


@pytest.mark.parametrize("n", [20, 64, 48])
def test_parts_that_are_too_long(on, randn, monkeypatch, n):
    """The last step of such a part's Hadamard matrix is one of the small matrix."""
    monkeypatch.setattr(hadamard, "WHOLE", (n & -n) // 2)
    x = randn(3, n, on=on)
    exact = reference_hadamard.apply_hadamard(x.double().float()).double()
    got = apply_hadamard(x, *factors(n, on))
    rounding = 2e-3 if on[1] == torch.bfloat16 else 1e-3
    assert hadamard.constants(n) is None and (got.double() - exact).norm() <= rounding * exact.norm()
    again = apply_hadamard(got, *factors(n, on), back=True)
    assert (again.double() - x.double()).norm() <= 2 * rounding * x.double().norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "m"), [(64, 40), (144, 10)])
def test_rows_that_lie_apart_and_are_alone(on, randn, n, m):
    x = randn(m, n + 3, on=on)[:, :n]
    signs, mix = factors(n, on)
    whole = apply_hadamard(x, signs, mix)
    for at in (0, 5, m - 1):
        assert torch.equal(apply_hadamard(x[at:at + 1], signs, mix)[0], whole[at])
    spoiled = x.clone()
    spoiled[3] = float("nan")
    rest = [at for at in range(m) if at != 3]
    assert torch.equal(apply_hadamard(spoiled, signs, mix)[rest], whole[rest])
    assert torch.equal(apply_hadamard(x.T.contiguous().T, signs, mix), whole)


@pytest.mark.parametrize("n", [64, 144])
def test_the_largest_numbers_stay_finite(on, n):
    x = torch.full((2, n), torch.finfo(on[1]).max, dtype=on[1], device=on[0])
    signs = torch.ones(n, device=on[0])
    assert torch.isfinite(apply_hadamard(x, signs, factors(n, on)[1])).all()


def test_apply_hadamard_refuses_arguments_that_do_not_match(randn):
    on = (torch.device("cpu"), torch.float32)
    x, (signs, mix) = randn(2, 96, on=on), factors(96, on)
    assert apply_hadamard(x[:0], signs, mix).shape == (0, 96)
    for given in ((x[:, :64], signs, mix), (x, signs.double(), mix), (x, signs, mix[:2]),
                  (x, signs, mix, x[:1])):
        with pytest.raises(ValueError, match="fit together"):
            apply_hadamard(*given)
