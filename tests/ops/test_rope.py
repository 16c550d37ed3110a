"""Rotation is by position times frequency, in the rotate-half pairing."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.ops import rope


def test_each_pair_turns_by_its_angle():
    dim, positions = 8, torch.tensor([[0, 1, 5], [3, 100, 7]])
    inverse = rope.frequencies(10000.0, dim)
    x = torch.randn(2, 3, 3, dim, generator=torch.Generator().manual_seed(0))
    got = rope.apply_rope(x, *rope.tables(positions, inverse, 1.0, torch.float32))
    for b in range(2):
        for t in range(3):
            for i in range(dim // 2):
                angle = positions[b, t].item() * 10000.0 ** (-2 * i / dim)
                pair = torch.complex(x[b, :, t, i].double(), x[b, :, t, i + dim // 2].double())
                turned = pair * complex(math.cos(angle), math.sin(angle))
                assert torch.allclose(got[b, :, t, i].double(), turned.real, atol=2e-5)
                assert torch.allclose(got[b, :, t, i + dim // 2].double(), turned.imag, atol=2e-5)


def test_narrow_tables_leave_the_rest_of_a_head_alone():
    x = torch.randn(2, 3, 4, 10, generator=torch.Generator().manual_seed(0))
    tables = rope.tables(torch.arange(4).expand(2, 4), rope.frequencies(100.0, 6), 1.0, torch.float32)
    got = rope.apply_rope(x, *tables)
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert torch.equal(got[..., :6], rope.apply_rope(x[..., :6], *tables))


def test_longrope_stretches_every_pair_by_its_own_factor():
    made = rope.longrope_frequencies(10000.0, 8, [1.0, 2.0, 4.0, 8.0])
    torch.testing.assert_close(made, rope.frequencies(10000.0, 8) / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_only_distances_matter():
    inverse, random = rope.frequencies(500.0, 16), torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 1, 16, generator=random), torch.randn(1, 1, 1, 16, generator=random)

    def product(p_q, p_k):
        turned = [rope.apply_rope(x, *rope.tables(torch.tensor([[p]]), inverse, 1.0, torch.float32))
                  for x, p in ((q, p_q), (k, p_k))]
        return (turned[0] * turned[1]).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain = rope.frequencies(5e5, 128)
    scaled = rope.llama3_frequencies(5e5, 128, 8.0, 1.0, 4.0, 8192)
    wavelength = 2 * math.pi / plain
    assert torch.equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    long = wavelength > 8192
    assert torch.allclose(scaled[long], plain[long] / 8)
    between = ~long & (wavelength > 8192 / 4)
    assert between.any() and (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_yarn_is_a_ramp_between_plain_and_stretched():
    plain, scaled = rope.frequencies(1e4, 64), rope.yarn_frequencies(1e4, 64, 4.0, 32.0, 1.0, 2048)
    ratio = scaled / plain
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(0.25)
    assert (ratio.diff() <= 1e-6).all()


def test_the_scale_multiplies_the_result():
    x, positions = torch.ones(1, 1, 2, 4), torch.tensor([[0, 3]])
    once, twice = (rope.apply_rope(x, *rope.tables(positions, rope.frequencies(10.0, 4), s, torch.float32))
                   for s in (1.0, 2.0))
    assert torch.allclose(twice, 2 * once)
