"""Grids: compressed-tensors' symmetric scale, exact zero, and every awkward weight."""


import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.quantization.methods.grid import (
    SHRINKS,
    find_grid,
    from_grid,
    round_to_grid,
    whole_,
)
from quantkit.quantization.methods.stored_scales import (
    round_scale,
)
from quantkit.support.errors import SpecError

STRATEGIES = ["tensor", "channel", "group"]


def grid_spec(bits: int, strategy: str = "group", size: int = 4, symmetric: bool = True,
            dtype: str = "float32") -> QuantSpec:
    granularity = Granularity(strategy=strategy, size=size if strategy == "group" else None)
    return QuantSpec(bits=bits, symmetric=symmetric, granularity=granularity, scale_dtype=dtype)


def awkward() -> dict[str, torch.Tensor]:
    """Weights ``[3, 8]`` that break careless scales."""
    outlier = torch.full((3, 8), 1e-3)
    outlier[1, 5] = 900.0
    return {"zeros": torch.zeros(3, 8), "minus zeros": -torch.zeros(3, 8), "equal": torch.full((3, 8), 0.3),
            "equal negative": torch.full((3, 8), -0.3), "outlier": outlier,
            "denormal": torch.full((3, 8), 1e-41), "smallest": torch.full((3, 8), 1.4e-45),
            "fp16 max": torch.tensor([65504.0, -65504.0] * 12).reshape(3, 8),
            "positive": torch.arange(1.0, 25).reshape(3, 8), "tiny and huge": torch.tensor(
                [[1e-38, 6e4, -1e-40, 0, 1, -1, 1e-7, -6e4]] * 3)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", list(awkward()))
def test_awkward_weights(name: str, bits: int, symmetric: bool, dtype: str) -> None:
    weight = awkward()[name]
    for strategy in STRATEGIES:
        spec = grid_spec(bits, strategy, symmetric=symmetric, dtype=dtype)
        grid = find_grid(weight, spec, shrinks=SHRINKS)
        assert grid.scale.shape == spec.scale_shape((3, 8)) == grid.zero.shape
        assert bool((grid.scale > 0).all()) and bool(torch.isfinite(grid.scale).all())
        assert torch.equal(grid.scale, grid.scale.to(getattr(torch, dtype)).float()), "rounded as stored"
        levels = round_to_grid(weight, grid, spec)
        assert float(levels.min()) >= 0 and float(levels.max()) <= 2**bits - 1
        assert torch.equal(levels, levels.round())
        values = from_grid(levels, grid)
        assert bool(torch.isfinite(values.to(getattr(torch, dtype))).all()), "finite as the model stores it"
        assert bool((values[weight == 0] == 0).all()), "zero is exact"


@pytest.mark.parametrize("largest", [3e-2, 3e-3, 3e-4])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_float16_may_be_smaller_than_its_least_normal_number(largest: float, bits: int) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    weight *= largest / weight.abs().max()

    def error(dtype: str) -> float:
        spec = grid_spec(bits, "channel", dtype=dtype)
        grid = find_grid(weight, spec)
        return float((from_grid(round_to_grid(weight, grid, spec), grid) - weight).norm() / weight.norm())

    assert error("float16") < 1.05 * error("bfloat16")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(bits=st.integers(2, 8), rows=st.sampled_from([1, 2, 7]), groups=st.integers(1, 3),
       size=st.sampled_from([2, 5, 16]), symmetric=st.booleans(), strategy=st.sampled_from(STRATEGIES),
       power=st.integers(-30, 30), seed=st.integers(0, 9999))
def test_error_is_at_most_half_a_step(bits: int, rows: int, groups: int, size: int, symmetric: bool,
                                      strategy: str, power: int, seed: int) -> None:
    weight = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    spec = grid_spec(bits, strategy, size, symmetric)
    grid = find_grid(weight, spec)
    error = from_grid(round_to_grid(weight, grid, spec), grid) - weight
    error = error.reshape(grid.scale.numel(), -1).abs()
    # asymmetric: rounding the zero moves both ends by up to half a step
    limit = grid.scale.reshape(-1, 1) * (0.5 if symmetric else 1.0) * (1 + 1e-4)
    assert bool((error <= limit).all())


def test_symmetric_scale_by_hand() -> None:
    weight = torch.tensor([[0.5, -1.5, 0.25, 0.0], [3.0, 1.0, 0.0, -2.0]])
    for bits in range(2, 9):
        grid = find_grid(weight, grid_spec(bits))
        expected = np.array([[1.5], [3.0]]) / ((2**bits - 1) / 2)
        np.testing.assert_allclose(grid.scale.numpy(), expected, rtol=1e-6)
        assert bool((grid.zero == 2 ** (bits - 1)).all())


def test_asymmetric_grid_by_hand() -> None:
    grid = find_grid(torch.tensor([[-1.0, 2.0, 0.0, 0.5], [1.0, 2.0, 3.0, 1.5]]),
                     grid_spec(2, symmetric=False))
    assert grid.scale.tolist() == [[1.0], [1.0]]
    assert grid.zero.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clip_search_lowers_the_error_it_searches(symmetric: bool, strategy: str) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 32, generator=random) ** 3
    importance = torch.rand(32, generator=random) ** 4
    spec = grid_spec(3, strategy, 8, symmetric)

    def cost(**search: object) -> float:
        grid = find_grid(weight, spec, **search)  # type: ignore[arg-type]
        return float(((from_grid(round_to_grid(weight, grid, spec), grid) - weight) ** 2 * importance).sum())

    weighted = cost(importance=importance, shrinks=SHRINKS)
    assert weighted < cost() * 0.98
    assert weighted <= cost(shrinks=SHRINKS)


def test_importance_reaches_the_right_columns() -> None:
    """Only one column counts, so its error must shrink, in every group and chunk."""
    weight = torch.randn(64, 8192, generator=torch.Generator().manual_seed(2))
    importance = torch.zeros(8192)
    importance[::32] = 1.0
    spec = grid_spec(2, "group", 32)
    shrinks = tuple(1 - 0.01 * step for step in range(90))

    def error(**search: object) -> float:
        grid = find_grid(weight, spec, shrinks=shrinks, **search)  # type: ignore[arg-type]
        return float((from_grid(round_to_grid(weight, grid, spec), grid) - weight)[:, ::32].square().mean())

    assert error(importance=importance) < 0.25 * error()


def test_scales_never_make_a_level_overflow() -> None:
    spec = grid_spec(2, dtype="float16")
    scale = round_scale(torch.tensor([[65504 / 1.5]]), torch.tensor([[2.0]]), spec)
    assert float(scale) * 2 <= 65504 and float(scale) * 2 > 65000


def test_a_weight_beyond_the_scales_dtype() -> None:
    with pytest.raises(SpecError, match="65504"):
        find_grid(torch.full((1, 4), 7e4), grid_spec(4, dtype="float16"))
    find_grid(torch.full((1, 4), 7e4), grid_spec(4, dtype="bfloat16"))


@pytest.mark.oracle
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_equals_compressed_tensors(bits: int, symmetric: bool) -> None:
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(bits))
    args = quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="channel")
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale, zero = utils.calculate_qparams(low, high, args)
    grid = find_grid(weight, grid_spec(bits, "channel", symmetric=symmetric))
    torch.testing.assert_close(grid.scale, scale, rtol=1e-6, atol=0)
    assert torch.equal(grid.zero, zero.float() + 2 ** (bits - 1))


def test_whole_rounds_like_torch() -> None:
    halves = torch.arange(-1001, 1002) / 2
    values = torch.cat((halves, torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 300,
                        torch.tensor([0.49999997, -0.49999997, 2.0**21, -(2.0**21), 2.0**21 - 0.5])))
    assert torch.equal(whole_(values.clone()), values.round())
