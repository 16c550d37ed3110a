"""The hqq method itself: better than rounding, never worse, whole zeros, whatever the weight."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from quantkit.formats.base import Codes
from quantkit.formats.pack_quantized import FORMAT
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.rounding import RTN, RtnOptions
from quantkit.support.errors import SpecError
from quantkit.testing import check_method
from quantkit_hqq.method import METHOD, HqqOptions

SOURCE = Path(__file__).parents[1] / "src"


def spec_of(bits: int = 4, strategy: str = "group", symmetric: bool = False) -> QuantSpec:
    size = 16 if strategy == "group" else None
    return QuantSpec(bits=bits, symmetric=symmetric, scale_dtype="bfloat16",
                     granularity=Granularity(strategy=strategy, size=size))


def weight_of(rows: int = 24, cols: int = 64) -> torch.Tensor:
    """Heavy tails, as real weights have."""
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(4))
    return normal * normal.abs() * 0.02


def lp_error(codes: Codes, weight: torch.Tensor, p: float = 0.7) -> float:
    zero = 2 ** (codes.spec.bits - 1) if codes.zero is None else codes.zero.float().reshape(-1, 1)
    groups = codes.codes.float().reshape(codes.scale.numel(), -1)
    values = (groups - zero) * codes.scale.reshape(-1, 1)
    return float((values - weight.reshape(values.shape)).abs().pow(p).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_error_is_below_that_of_rounding(bits: int, strategy: str, symmetric: bool) -> None:
    weight, spec = weight_of(), spec_of(bits, strategy, symmetric)
    codes = METHOD.run(weight, None, spec, HqqOptions())
    rounded = RTN.run(weight, None, spec, RtnOptions())
    assert (codes.zero is None) == symmetric
    # at 8 bits a shared grid leaves nothing to gain
    assert lp_error(codes, weight) <= lp_error(rounded, weight) * (1.0001 if bits == 8 else 0.99)


def test_the_bulk_of_the_weights_comes_closer() -> None:
    """What an exponent below 1 is for: half of all weights have a smaller error than after rounding."""
    weight = weight_of(128, 64)

    def median_error(codes: Codes) -> float:
        return float((FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16)) - weight).abs().median())

    for bits in (3, 4):
        rounded = median_error(RTN.run(weight, None, spec_of(bits), RtnOptions()))
        assert median_error(METHOD.run(weight, None, spec_of(bits), HqqOptions())) < 0.9 * rounded


@pytest.mark.parametrize("weight", [
    torch.zeros(2, 16), torch.full((2, 16), 0.3), torch.full((2, 16), -0.3), torch.full((2, 16), 1e-41),
    torch.full((2, 16), 65504.0), torch.tensor([[0.0] * 15 + [900.0]] * 2)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awkward_weights(weight: torch.Tensor, symmetric: bool) -> None:
    codes = METHOD.run(weight, None, spec_of(4, "group", symmetric), HqqOptions())
    assert bool((codes.scale > 0).all())
    assert torch.equal(codes.scale, codes.scale.to(torch.bfloat16).float()), "rounded as stored"
    values = FORMAT.dequantize(FORMAT.pack(codes, torch.bfloat16))
    assert bool(torch.isfinite(values).all()) and bool((values[weight == 0] == 0).all())


def test_contract() -> None:
    check_method(METHOD)


def test_pure_and_deterministic() -> None:
    weight = weight_of()
    before = weight.clone()
    first, second = (METHOD.run(weight, None, spec_of(), HqqOptions()) for _ in range(2))
    assert torch.equal(weight, before)
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scale, second.scale)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="NaN or infinite"):
        METHOD.run(weight_of() * float("nan"), None, spec_of(), HqqOptions())
    nf = QuantSpec(kind="nf", bits=4, granularity=Granularity(strategy="block", size=64))
    assert METHOD.reason_against(nf) is not None
    for wrong in ({"lp_norm": 0}, {"lp_norm": 2}, {"kappa": 0.5}, {"iterations": 0}, {"lpnorm": 1}):
        with pytest.raises(ValidationError):
            HqqOptions(**wrong)
