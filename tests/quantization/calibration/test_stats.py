"""Hessian accumulators against NumPy, and what they refuse."""

import numpy as np
import pytest
import torch

from quantkit.quantization.calibration.finite import NonFiniteError
from quantkit.quantization.calibration.runner import HessianObserver
from quantkit.support.errors import CalibrationError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_outer_products(dtype: torch.dtype) -> None:
    observer = HessianObserver("layer")
    batches = [torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    for batch in batches:
        observer(batch)
    stats = observer.result()
    rows = torch.cat(batches).reshape(-1, 7).double().numpy()
    assert stats.tokens == 30 and stats.hessian is not None and stats.hessian.dtype == torch.float32
    np.testing.assert_allclose(stats.hessian.numpy(), rows.T @ rows / 30, rtol=1e-4, atol=1e-5)


def test_wide_inputs_are_summed_in_blocks() -> None:
    observer = HessianObserver("layer")
    x = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))
    observer(x)
    hessian = observer.result().hessian
    assert hessian is not None and torch.equal(hessian, hessian.T)
    torch.testing.assert_close(hessian, (x.double().T @ x.double() / 50).float(), rtol=1e-4, atol=1e-5)


def test_wide_sums_are_of_inputs_as_products_round_them() -> None:
    """Where the CPU has tiles for bfloat16; both sides are rounded alike: it stays positive definite."""
    observer = HessianObserver("layer", importance=torch.linspace(0.1, 1.9, 2048))
    x = torch.randn(2048, 1100, generator=torch.Generator().manual_seed(0))
    observer(x)
    hessian = observer.result().hessian
    assert hessian is not None and torch.equal(hessian, hessian.T)
    expected = (x.double() * torch.linspace(0.1, 1.9, 2048)[:, None]).T @ x.double() / 2048
    torch.testing.assert_close(hessian, expected.float(), rtol=0, atol=1e-3)
    assert torch.linalg.eigvalsh(hessian.double()).min() > 0.9 * torch.linalg.eigvalsh(expected).min() > 0


def test_overflow_and_nothing_seen() -> None:
    with pytest.raises(CalibrationError, match="no calibration token reached x"):
        HessianObserver("x").result()
    observer = HessianObserver("x")
    with pytest.raises(NonFiniteError, match="input of x is too large") as caught:
        observer(torch.full((1, 2), 1e30))
    assert "1e+30" in str(caught.value.why)
    for _ in range(500):
        observer(torch.full((1, 2), 9e17))
    with pytest.raises(CalibrationError, match="overflows"):
        observer.result()


def test_only_the_largest_values_where_nobody_wants_more():
    observer = HessianObserver("name", form=False)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    observer(x[:2])
    observer(x[2:])
    stats = observer.result()
    assert stats.hessian is None and stats.tokens == 15
    assert torch.equal(stats.largest, x.abs().amax((0, 1)))
    nobody = HessianObserver("name", size=8, form=False).result()
    assert nobody.tokens == 0 and nobody.hessian is None and not nobody.largest.any()
