"""4-bit floats by activations rounded likewise: decoded, and as Blackwell's tensor cores get both."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.triton.embedding import embed
from quantkit_kernels.triton.matmul import multiply
from quantkit_kernels.triton.token_groups import round_groups
from quantkit_kernels.triton.w4a4 import pack

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))
KINDS = {"nvfp4": 16, "mxfp4": 32}
FAMILIES = ("hopper", "blackwell")


def drawn(top, n, k, seed=0):
    return torch.randint(0, top, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def weight(kind, n, k):
    """What is packed, and its numbers in float64."""
    codes, group = drawn(16, n, k), KINDS[kind]
    if kind == "mxfp4":
        scale = (drawn(6, n, k // group, 8).float() - 9).exp2()
        return (codes, scale), E2M1.double()[codes.long()] * scale.double().repeat_interleave(group, 1)
    scale, outer = drawn(127, n, k // group, 7).view(torch.float8_e4m3fn), torch.tensor(3e-4)
    exact = E2M1.double()[codes.long()] * scale.double().repeat_interleave(group, 1) * outer.double()
    return (codes, scale, outer, torch.tensor([[96.0]])), exact


@pytest.fixture(params=[(kind, family) for kind in KINDS for family in FAMILIES], ids="-".join)
def made(request, on):
    """``made(n, k)``: the packed weight, and its numbers."""
    kind, family = request.param
    if on[0].type == "cuda" and family != "hopper":
        pytest.skip("on a GPU weights are packed in that GPU's order, which the other case tries")

    def make(n, k, **how):
        parts, exact = weight(kind, n, k)
        family_here = None if on[0].type == "cuda" else family
        return pack(*(part.to(on[0]) for part in parts), family=family_here, **how), exact

    return make


def values(rows, packed):
    """What rounded rows say, float64 ``[m, k]``, by torch alone."""
    if not packed.inputs.packed:
        return rows.values.double() * rows.scale.double()[:, None]
    columns, group = packed.inputs.columns(packed.k), packed.inputs.group
    codes, stored = rows.values.split((columns // 2, rows.values.shape[1] - columns // 2), 1)
    stored = stored[:, :columns // group]
    levels = E2M1.to(codes.device).double()[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
    scale = stored.contiguous().view(torch.float8_e4m3fn).double() if group == 16 else (
        stored.double() - 127).exp2()
    return ((levels * scale.repeat_interleave(group, 1)) * rows.scale.double()[:, None])[:, :packed.k]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("n", "k", "m"), [(1, 64, 1), (33, 256, 17), (130, 512, 3), (140, 2848, 16),
                                           (70, 320, 140)])
def test_against_float64(on, randn, obeys_the_rule, made, n, k, m):
    packed, exact = made(n, k)
    rows = round_groups(randn(m, k, on=on), packed.inputs)
    x, wide = values(rows, packed), exact.to(on[0])
    plain = (x.to(on[1]) @ wide.to(on[1]).T)
    obeys_the_rule(multiply(rows, packed), plain, x @ wide.T, x.abs() @ wide.abs().T)


@pytest.mark.sampled(4)
def test_all_that_follows_the_sum(on, randn, made):
    n, k, m = 144, 1056, 5
    packed, exact = made(n, k)
    rows = round_groups(randn(m, k, on=on), packed.inputs)
    bias, residual = randn(n, on=on), randn(m, n, on=on)
    out = torch.empty(m, n + 8, dtype=on[1], device=on[0])[:, :n]
    y = multiply(rows, packed, bias=bias, residual=residual, out=out)
    near = values(rows, packed) @ exact.to(on[0]).T + bias.double() + residual.double()
    assert y is out and torch.allclose(y.double(), near, rtol=2e-3, atol=2e-3)


@pytest.mark.sampled(4)
def test_a_gate_beside_what_it_opens(on, randn, made):
    n = 144
    packed, exact = made(n, 512, gated=True)
    rows = round_groups(randn(3, 512, on=on), packed.inputs)
    y = values(rows, packed) @ exact.to(on[0]).T
    near = torch.nn.functional.silu(y[:, :n // 2]) * y[:, n // 2:]
    got = multiply(rows, packed, gated="silu").double()
    assert torch.allclose(got, near, rtol=2e-3, atol=2e-3 * float(near.abs().max()))


@pytest.mark.sampled(8)
def test_a_row_does_not_depend_on_the_others(on, randn, rows_stand_alone, made):
    packed, _ = made(150, 2304)
    rows_stand_alone(packed, randn(16, 2304, on=on), lambda x: round_groups(x, packed.inputs))


@pytest.mark.sampled(8)
def test_one_program_or_many_give_the_same_bits(on, randn, made):
    packed, _ = made(100, 2304)
    x = randn(140, 2304, on=on)
    together = multiply(round_groups(x, packed.inputs), packed)
    for m in (1, 16, 17):
        assert torch.equal(multiply(round_groups(x[:m], packed.inputs), packed), together[:m])


@pytest.mark.sampled(4)
def test_rows_of_an_embedding(on, made):
    packed, exact = made(140, 576)
    ids = torch.tensor([0, 139, 8, 127, 128, 5, 5])
    rows = embed(ids.to(on[0]), packed, on[1]).cpu().double()
    assert torch.allclose(rows, exact[ids], rtol=torch.finfo(on[1]).eps, atol=1e-6)


@pytest.mark.sampled(4)
def test_a_row_that_is_not_finite_says_so(on, randn, made):
    packed, _ = made(130, 256)
    x = randn(3, 256, on=on)
    x[1, 200] = float("inf")
    y = multiply(round_groups(x, packed.inputs), packed)
    assert y[1].isnan().all() and torch.isfinite(y[::2]).all()


def test_bytes_of_both_orders(on):
    """A code has 4 bits; the scale of 16 or 32 has 8; NVFP4's rows have a number each."""
    for kind, each in (("nvfp4", 4.5), ("mxfp4", 4.25)):
        parts, _ = weight(kind, 128, 512)
        for family in FAMILIES:
            packed = pack(*parts, family=family)
            assert packed.nbytes * 8 == each * 128 * 512 + (32 * 128 if kind == "nvfp4" else 0)


def test_an_empty_group_may_have_any_scale():
    codes, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.tensor([[float("nan")], [3.0]])
    for family in FAMILIES:
        packed = pack(codes, scale, family=family)
        assert not embed(torch.tensor([0, 1]), packed, torch.float32).any()


def test_it_refuses_groups_that_do_not_exist():
    (codes, scale, outer, factor), _ = weight("nvfp4", 4, 64)
    powers = torch.ones(4, 2)
    for wrong in ((codes, scale, outer), (codes, powers, outer, factor), (codes, powers, None, factor),
                  (drawn(16, 4, 96), torch.ones(4, 2)), (codes, torch.ones(4, 8))):
        with pytest.raises(ValueError, match="groups must be of 16"):
            pack(*wrong)


def test_it_takes_rows_as_they_were_rounded_for_it(on, randn):
    x, packed = randn(2, 64, on=on), {}
    for family in FAMILIES:
        packed[family] = pack(drawn(16, 4, 64).to(on[0]), torch.ones(4, 2, device=on[0]), family=family)
    for wrong in (x, round_groups(x, packed["hopper"].inputs)):
        with pytest.raises(ValueError, match=r"takes Levels|x must be"):
            multiply(wrong, packed["blackwell"])
    with pytest.raises(ValueError, match="x must be"):
        multiply(round_groups(x, packed["blackwell"].inputs), packed["hopper"])
