"""Mixtures of experts: routing, and a product with each one's weight, in any company."""

from __future__ import annotations

import pytest
import torch

from quantkit.models.layers import route as route_in_torch
from quantkit_kernels.triton import experts, w4a16, w8a16, w16a16
from quantkit_kernels.triton.experts import APART, combine, multiply_experts, padded_rows, route

EXPERTS, K = 5, 96


def owners(n, nobody=()):
    rows = torch.zeros(n, 2, dtype=torch.int32)
    for token in nobody:
        rows[token, 0] = -1
    return rows


def filled(parts, gated):
    """Experts' rows one below the other: all gates, then all that they open."""
    halves = [part.chunk(2) if gated else (part,) for part in parts]
    return torch.cat([torch.nn.functional.pad(half, (0, 0, 0, padded_rows(len(half), gated) - len(half)))
                      for side in zip(*halves) for half in side])


def plain(generator, n, gated, on):
    parts = [(64 * torch.randn(n, K, generator=generator)).round() / 64 for _ in range(EXPERTS)]
    return w16a16.pack(filled(parts, gated).to(*on), gated=gated), [part.double() for part in parts]


def int4(generator, n, gated, on):
    codes = [torch.randint(0, 16, (n, K), generator=generator, dtype=torch.uint8) for _ in range(EXPERTS)]
    scales = [(0.01 * (0.5 + torch.rand(n, K // 32, generator=generator))).half().float() for _ in codes]
    exact = [(code.double() - 8) * scale.double().repeat_interleave(32, 1)
             for code, scale in zip(codes, scales)]
    return w4a16.pack(filled(codes, gated).to(on[0]), filled(scales, gated).to(on[0]), gated=gated), exact


def int8(generator, n, gated, on):
    codes = [torch.randint(-128, 128, (n, K), generator=generator, dtype=torch.int8) for _ in range(EXPERTS)]
    scales = [0.01 * (0.5 + torch.rand(n, 1, generator=generator)) for _ in codes]
    exact = [code.double() * scale.double() for code, scale in zip(codes, scales)]
    scale = filled(scales, gated)[:, 0]
    return w8a16.pack(filled(codes, gated).to(on[0]), scale.to(on[0]), gated=gated), exact


KINDS = {"plain": plain, "int4": int4, "int8": int8}


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("n", [1, 40])
def test_the_most_likely_experts(on, randn, n, normalized):
    scores = randn(n, EXPERTS, on=on)
    scores[0, 2] = scores[0, 4] = 5.0  # equals: the first comes first
    pairs = route(scores, owners(n).to(on[0]), 3, normalized)
    chosen, share = route_in_torch(scores, 3, normalized)
    assert torch.equal(pairs.chosen.long(), chosen) and chosen[0, :2].tolist() == [2, 4]
    assert torch.allclose(pairs.share, share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["ampere", "hopper"])
@pytest.mark.parametrize("n", [3, 40, 300])
def test_every_pair_is_in_one_tile_of_its_expert(on, randn, monkeypatch, n, family):
    monkeypatch.setattr(experts, "family_of", lambda device: family)
    pairs = route(randn(n, EXPERTS, on=on), owners(n, nobody=(1,)).to(on[0]), 2, True)
    chosen, order = pairs.chosen.flatten().tolist(), pairs.order.tolist()
    seen = []
    for expert, begin, count in pairs.tiles.tolist():
        assert 0 <= count <= pairs.size
        seen += order[begin:begin + count]
        assert {chosen[pair] for pair in order[begin:begin + count]} <= {expert}
    assert sorted(seen) == [pair for pair in range(2 * n) if pair // 2 != 1]
    assert (n * 2 <= APART) == (len(pairs.tiles) == 2 * n)
    assert n < 300 or pairs.size == {"ampere": 32, "hopper": 64}[family]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "gated"), [(72, None), (128, None), (144, "silu")])
@pytest.mark.parametrize("tokens", [3, pytest.param(45, marks=pytest.mark.slow)])
def test_against_float64(on, randn, obeys_the_rule, kind, n, gated, tokens):
    generator = torch.Generator().manual_seed(1)
    weight, exact = KINDS[kind](generator, n, gated is not None, on)
    x = randn(tokens, K, on=on)
    pairs = route(randn(tokens, EXPERTS, seed=3, on=on), owners(tokens).to(on[0]), 2, True)
    bias = randn(EXPERTS, n, seed=5, on=on)
    y = multiply_experts(x, weight, pairs, experts=EXPERTS, outputs=n // 2 if gated else n, bias=bias,
                         gated=gated, chosen=2)

    def product(x, weights, bias):
        rows = [x[pair // 2] @ weights[expert].T + bias[expert]
                for pair, expert in enumerate(pairs.chosen.flatten().tolist())]
        whole = torch.stack(rows)
        if gated is None:
            return whole
        gate, up = whole.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    obeys_the_rule(y, product(x, [part.to(*on) for part in exact], bias),
                   product(x.double(), [part.to(on[0]) for part in exact], bias.double()))


@pytest.mark.parametrize("largest", [16, 64])
def test_a_pair_has_the_same_bits_in_any_company(on, randn, monkeypatch, largest):
    monkeypatch.setattr(experts, "largest_tile", lambda family: largest)
    weight, _ = int4(torch.Generator().manual_seed(1), 64, False, on)
    x, scores = randn(100, K, on=on), randn(100, EXPERTS, seed=3, on=on)

    def products(tokens, nobody=()):
        pairs = route(scores[tokens].contiguous(), owners(len(tokens), nobody).to(on[0]), 2, True)
        y = multiply_experts(x[tokens], weight, pairs, experts=EXPERTS, outputs=64, chosen=2)
        return combine(y, pairs, x[tokens][:, :64])

    alone = products([7])
    assert torch.equal(products([*range(100)])[7:8], alone)
    assert torch.equal(products([*range(99, -1, -1)])[92:93], alone)
    assert torch.equal(products([7, 3, 4], nobody=(1,))[:1], alone)
    assert (products([7, 3, 4], nobody=(1,))[1] == 0).all()


def test_results_are_added_by_their_shares(on, randn, obeys_the_rule):
    pairs = route(randn(4, EXPERTS, on=on), owners(4).to(on[0]), 3, False)
    x, residual = randn(12, 700, seed=2, on=on), randn(4, 700, seed=4, on=on)
    exact = (x.double().view(4, 3, 700) * pairs.share.double()[..., None]).sum(1)
    plain_sum = (x.view(4, 3, 700) * pairs.share.to(on[1])[..., None]).sum(1)
    obeys_the_rule(combine(x, pairs), plain_sum, exact)
    obeys_the_rule(combine(x, pairs, residual), plain_sum + residual, exact + residual.double())


def test_what_does_not_fit_is_refused(on, randn):
    weight, _ = int4(torch.Generator().manual_seed(1), 64, False, on)
    pairs = route(randn(3, EXPERTS, on=on), owners(3).to(on[0]), 2, True)
    for changes in ({"experts": 4}, {"chosen": 1}, {"gated": "silu"}):
        with pytest.raises(ValueError, match=r"fit together|packed so"):
            multiply_experts(randn(3, K, on=on), weight, pairs,
                             **{"experts": EXPERTS, "outputs": 64, "chosen": 2} | changes)
