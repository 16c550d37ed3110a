"""Activations rounded in groups: number by number what torch's operators give."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats import e2m1
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.ops import tokens
from quantkit_kernels.triton.rms_norm import rms_norm, rms_norm_groups
from quantkit_kernels.triton.token_groups import GroupRounding, round_groups

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LEVELS = torch.cat((LEVELS, -LEVELS))
KINDS = {"nvfp4": (16, 64.0), "nvfp4, another's number": (16, 77.3), "mxfp4": (32, None),
         "e2m1 in 64": (64, None), "e2m1 in 128": (128, None)}
SQUARES = QuantSpec(kind="fp", bits=8, granularity=Granularity(strategy="tile", size=128),
                    activations="group")


def spec_of(group):
    return QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=group),
                     scale_dtype="e4m3" if group == 16 else "e8m0", activations="group")


def expected(x, group, number):
    factor = None if number is None else torch.tensor([[number]], device=x.device)
    return tokens.round_groups(x, spec_of(group), factor)


def rounding(x, group, number, packed=0):
    return GroupRounding(group, None if number is None else torch.tensor([number], device=x.device), packed)


def decoded(rows, group, columns):
    """Levels and scales ``[m, columns]`` of packed rows, by the formats' own decoders."""
    codes = e2m1.unpack(rows.values[:, :columns // 2].contiguous())
    stored = rows.values[:, columns // 2:columns // 2 + columns // group].contiguous()
    scale = stored.view(torch.float8_e4m3fn).float() if group == 16 else e2m1.decode_e8m0(stored)
    return LEVELS.to(codes.device)[codes.long()], scale.repeat_interleave(group, 1)


def awkward(on, columns=512):
    """Rows of all sizes, with zeros, ties, numbers out of e4m3's reach, subnormal ones and outliers."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(14, columns, generator=random) * torch.exp(2 * torch.randn(14, columns, generator=random))
    x[0], x[1, :40] = 0, -0.0
    x[2] *= 1e-7 if on[1] == torch.float16 else 1e-30
    x[3] *= 1e3 if on[1] == torch.float16 else 1e30
    x[4] = torch.tensor([1.75, 1.7499, 3.5, 7.0]).repeat(columns // 4)
    x[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(columns // 8)
    x[6] = -x[5] * 1.5
    x[7] = torch.arange(columns) * 2.0**-24
    x[8, 50] = 60000
    x[9] = x[5] * 2.0**-13
    if on[1] != torch.float16:
        x[10], x[11, 3] = torch.arange(columns) * 2.0**-149, 3.4e38
        x[12] *= 2.0**-120
    top = float(torch.finfo(on[1]).max)
    return x.clamp(-top, top).to(on[1]).to(on[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_as_torch_rounds(on, kind):
    group, number = KINDS[kind]
    x = awkward(on)
    rows = round_groups(x, rounding(x, group, number))
    want, got = expected(x, group, number), rows.values.float() * rows.scale[:, None]
    assert rows.dtype == rows.values.dtype == x.dtype and torch.equal(rows.scale, rows.scale[:1].expand(14))
    if kind == "nvfp4, another's number":  # rounded once more
        assert torch.allclose(got, want, rtol=3e-7, atol=0)
    elif number is None and x.dtype == torch.float16:
        odd = want.abs() % 2.0**-23 != 0
        assert torch.equal(got[~odd], want[~odd])
        assert (got - want)[odd].abs().le(2.0**-24).all() and odd.sum() < 50
    else:
        assert torch.equal(got, want)


def test_8_bits_as_torch_rounds(on, randn):
    x = awkward(on, 320)
    x[6, 70] = float("inf")
    how = GroupRounding(128, bits=8)
    want = tokens.round_groups(x, SQUARES).to(x.dtype)
    values = round_groups(x, how).values
    assert torch.equal(values.isnan(), want.isnan()) and want.isnan().sum() == 128
    assert torch.equal(values.nan_to_num(), want.nan_to_num())
    x, weight = randn(3, 320, on=on), randn(320, seed=1, on=on)
    assert torch.equal(rms_norm_groups(x, weight, 1e-5, how)[0].values,
                       round_groups(rms_norm(x, weight, 1e-5)[0], how).values)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4, another's number", "mxfp4"])
@pytest.mark.parametrize("columns", [64, 512, 2080])
def test_packed_as_torch_rounds(on, kind, columns):
    group, number = KINDS[kind]
    x = awkward(on, columns)
    how = rounding(x, group, number, packed=256)
    rows, filled = round_groups(x, how), how.columns(columns)
    assert rows.values.shape[1] % 16 == 0 and rows.values.dtype == torch.uint8 and rows.dtype == x.dtype
    level, scale = decoded(rows, group, filled)
    assert not level[:, columns:].any() and torch.isfinite(scale).all()
    if number is not None:
        scale = scale / number
        assert torch.allclose(rows.scale, torch.full_like(rows.scale, 1 / number), rtol=1e-7)
    assert torch.equal((level * scale)[:, :columns], expected(x, group, number))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("ruin", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_is_nan_and_no_other(on, kind, ruin):
    group, number = KINDS[kind]
    x = awkward(on)
    x[6, 70] = ruin
    broken = expected(x, group, number).isnan()
    assert broken.sum() == group
    values = round_groups(x, rounding(x, group, number)).values
    assert torch.equal(values.isnan(), broken)
    rows = round_groups(x, rounding(x, group, number, packed=256))
    level, scale = decoded(rows, group, 512)
    assert torch.equal(scale.isnan(), broken) and torch.isfinite(rows.scale).all()
    assert torch.isfinite(level).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("packed", [0, 256])
@pytest.mark.parametrize("n", [32, 512, 576, 16416])
def test_behind_a_norm(on, randn, kind, packed, n):
    group, number = KINDS[kind]
    x, weight = randn(3, n, on=on), randn(n, seed=1, on=on)
    how = rounding(x, group, number, packed)
    added = () if n == 512 else (randn(3, n, seed=2, on=on), randn(n, seed=3, on=on))
    (rows, h), (y, h_too) = rms_norm_groups(x, weight, 1e-5, how, *added), rms_norm(x, weight, 1e-5, *added)
    apart = round_groups(y, how)
    used = how.columns(n) // 2 + how.columns(n) // group if packed else n
    assert torch.equal(rows.values[:, :used], apart.values[:, :used])
    assert torch.equal(rows.scale, apart.scale) and rows.dtype == x.dtype and torch.equal(h, h_too)
    with pytest.raises(ValueError, match="don't fit"):
        rms_norm_groups(x, weight[1:], 1e-5, how)


@pytest.mark.parametrize("packed", [0, 256])
def test_rows_that_lie_apart_and_none_at_all(on, randn, packed):
    x = randn(3, 128, on=on)
    how = rounding(x, 32, None, packed)
    used = how.columns(128) // 2 + how.columns(128) // 32 if packed else 128
    straight = round_groups(x, how).values
    for apart in (x.T.contiguous().T, torch.cat((x, x), 1)[:, :128]):
        assert torch.equal(round_groups(apart, how).values[:, :used], straight[:, :used])
    assert round_groups(x[:0], how).values.shape == (0, straight.shape[1])


def test_groups_and_numbers_go_together(on, randn):
    x = randn(2, 64, on=on)
    for wrong in (GroupRounding(16), rounding(x, 32, 1.0)):
        with pytest.raises(ValueError, match="have a factor"):
            round_groups(x, wrong)
