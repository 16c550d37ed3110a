"""GPTQ's inner loop in one kernel: the codes of the loop in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops import gpu
from quantkit.quantization.methods import gptq
from quantkit.quantization.methods.base import LayerStats
from quantkit.quantization.methods.gptq_reference import solve_columns
from quantkit_kernels.triton import gptq as kernel
from quantkit_kernels.triton.gptq import LONGEST, solve_block


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the kernel runs: it knows float32 alone."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("there is a GPU: kernels are compiled in this process" if torch.cuda.is_available()
                    else "no GPU")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


# fixtures here hold no state that one example could leave to the next; a failure is the same everywhere
DRAWN = settings(max_examples=12, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


def problem(linears, n, out, groups, device, seed=0):
    """Work, Hessian, its factor, scales, zeros, and the group of each column."""
    random = torch.Generator().manual_seed(seed)
    work = torch.randn(linears, n, out, generator=random) * 0.1
    scale = torch.rand(linears, groups, out, generator=random) * 0.03 + 0.01
    zero = torch.randint(5, 10, (linears, groups, out), generator=random).float()
    x = torch.randn(linears, n, 3 * n, generator=random)
    hessian = x @ x.mT / (3 * n) + 0.01 * torch.eye(n)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.double())).mT.float()
    places = torch.randint(0, groups, (linears, n), generator=random)
    return [tensor.to(device) for tensor in (work, hessian, upper, scale, zero, places)]


def by_the_paper(work, hessian, scale, zero, places, bits):
    """Levels and errors of all columns, float64 ``[linears, n, out]``."""
    solutions = [solve_columns(work[i].T, hessian[i], scale[i].T, zero[i].T, places[i],
                               torch.arange(work.shape[1]), bits) for i in range(len(work))]
    return (torch.stack([solution.levels.T for solution in solutions]),
            torch.stack([solution.errors.T for solution in solutions]))


def check_block(device, linears, n, out, groups, bits, seed=0):
    work, hessian, upper, scale, zero, places = problem(linears, n, out, groups, device, seed)
    wanted, rest = by_the_paper(work, hessian, scale, zero, places, bits)
    levels, errors = torch.empty_like(work), torch.empty_like(work)
    kept = work.clone()
    solve_block(work, upper, scale, zero, places, bits, levels, errors)
    assert torch.equal(work, kept)
    right = (levels.double() == wanted).all(1)  # rows; float32 may tip a level that is nearly halfway
    assert right.float().mean() >= 0.98 or (~right).sum() <= 1
    off = (errors.double() - rest).mT[right].norm()
    assert off <= 1e-4 * rest.norm()


@pytest.mark.parametrize(("linears", "n", "out", "bits"), [(1, 24, 40, 4), (2, 7, 5, 3), (1, 1, 33, 8)])
def test_a_block_equals_the_paper(device, linears, n, out, bits):
    check_block(device, linears, n, out, 3, bits)


@drawn(linears=st.integers(1, 2), n=st.integers(1, 30), out=st.integers(1, 150), groups=st.integers(1, 4),
       bits=st.integers(2, 8), seed=st.integers(0, 99))
@DRAWN
def test_blocks_of_any_size(device, linears, n, out, groups, bits, seed):
    check_block(device, linears, n, out, groups, bits, seed)


def test_a_part_of_a_larger_weight(device):
    """Slices of work, levels and errors, and a factor that lies the other way, as the solver has them."""
    work, _, upper, scale, zero, places = problem(2, 20, 6, 2, device)
    here = slice(8, 16)
    wanted, rest = torch.empty(2, 8, 6, device=device), torch.empty(2, 8, 6, device=device)
    solve_block(work[:, here].contiguous(), upper[:, here, here].contiguous(), scale, zero, places[:, here],
                4, wanted, rest)
    levels = torch.full_like(work, -1)
    errors = torch.full((2, 16, 6), -1.0, device=device)
    solve_block(work[:, here], upper.mT.contiguous().mT[:, here, here], scale, zero, places[:, here], 4,
                levels[:, here], errors[:, :8])
    assert torch.equal(levels[:, here], wanted) and torch.equal(errors[:, :8], rest)
    assert (levels[:, :8] == -1).all() and (levels[:, 16:] == -1).all() and (errors[:, 8:] == -1).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_rows_are_their_own_and_extremes_are_clamped(device):
    work, _, upper, scale, zero, places = problem(1, 5, 40, 2, device)
    work[0, 0, 3], work[0, 1, 4] = 1e30, -3e38
    scale[0, :, 4] = 1e-30
    clean = work.clone()
    clean[0, :, 3:5] = 0
    found = []
    for given in (work, clean):
        levels, errors = torch.empty_like(work), torch.empty_like(work)
        solve_block(given, upper, scale, zero, places, 2, levels, errors)
        assert ((levels >= 0) & (levels <= 3)).all()
        found.append(levels)
    others = [row for row in range(40) if row not in (3, 4)]
    assert torch.equal(found[0][:, :, others], found[1][:, :, others]) and found[0][0, 0, 3] == 3


@pytest.mark.parametrize(("symmetric", "size", "act_order", "block"),
                         [(True, 16, True, 128), (False, 8, True, 20), (False, None, False, 32)])
def test_the_method_gives_the_codes_of_torch(device, monkeypatch, symmetric, size, act_order, block):
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 48, generator=random) * 0.05
    x = torch.randn(200, 48, generator=random) @ torch.randn(48, 48, generator=random)
    stats = LayerStats(200, x.T @ x / 200)
    spec = QuantSpec(bits=4, symmetric=symmetric, scale_dtype="bfloat16", granularity=Granularity(
        strategy="channel" if size is None else "group", size=size))
    options = gptq.GptqOptions(act_order=act_order, block=block, refit=0, descent_passes=0)
    assert stats.hessian is not None
    # else a kernel of the CPU's would solve both
    monkeypatch.setattr(gptq, "solved_by_kernels", lambda *_: False)
    plain = gptq.METHOD.run(weight, stats, spec, options)
    used, solved = [], []
    monkeypatch.setattr(gpu, "SIMULATE", True)
    monkeypatch.setattr(kernel, "solve_block", lambda *given: solved.append(given) or solve_block(*given))
    monkeypatch.setattr(gptq, "_solve_block", lambda *given: used.append(given))
    fused = gptq.METHOD.run(weight.to(device), LayerStats(200, stats.hessian.to(device)), spec, options)
    assert not used and len(solved) == -(-48 // block) and torch.equal(fused.scale.cpu(), plain.scale)
    differ = float((fused.codes.cpu() != plain.codes).float().mean())
    assert differ == 0 if device.type == "cpu" else differ < 0.01  # there matrix products round differently


def test_solve_block_refuses_arguments_that_do_not_match():
    work, _, upper, scale, zero, places = problem(1, 4, 6, 2, torch.device("cpu"))
    good = (work, upper, scale, zero, places, 4, torch.empty_like(work), torch.empty_like(work))
    for at, bad in ((0, work[:, :3]), (0, work.double()), (1, upper[:, :3]), (2, scale[:, :, :5]),
                    (4, places[:, :2]), (5, 9), (6, work.mT)):
        with pytest.raises(ValueError, match="don't fit"):
            solve_block(*good[:at], bad, *good[at + 1:])
    long = torch.zeros(1, LONGEST + 1, 2)
    with pytest.raises(ValueError, match="don't fit"):
        solve_block(long, torch.zeros(1, LONGEST + 1, LONGEST + 1), long[:, :1], long[:, :1],
                    torch.zeros(1, LONGEST + 1, dtype=torch.int64), 4, long.clone(), long.clone())
