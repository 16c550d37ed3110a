"""Codecs of keys and values: what holds for all of them, and how near each comes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.codecs.kivi import GroupedGrid, pack, packed_bytes, unpack
from quantkit.kv.codecs.per_token import LARGEST, Float8Vectors, Int8Vectors, PlainVectors, rounded_up
from quantkit.kv.codecs.rotation import CURVES, HadamardVectors, levels
from quantkit.ops.hadamard import apply_hadamard, undo_hadamard
from quantkit.support.errors import UsageError
from quantkit_kernels.cpu import kv_codecs

INT8, NONE, BF16 = Int8Vectors(), PlainVectors(None), PlainVectors(torch.bfloat16)
VECTORS = ("normal", "zeros", "minus zeros", "denormal", "tiniest", "equal", "one outlier", "fp16 max",
         "fp32 large", "mixed signs of zero", "offset", "positive", "negative", "wide range")


def awkward(kind: str, rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """float32 ``[rows, dim]``, finite."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=random)
    if kind == "one outlier" and x.numel():
        x[0, seed % dim] = 6e4
    signs = torch.where(x < 0, -1.0, 1.0)
    return {"normal": x, "zeros": x * 0, "minus zeros": x.abs() * -0.0, "denormal": x * 1e-39,
            "tiniest": signs * 2.0**-149, "equal": x[:, :1].expand(-1, dim).clone(), "one outlier": x,
            "fp16 max": signs * 65504, "fp32 large": x.clamp(-3, 3) / 3 * 8e37,
            "mixed signs of zero": signs * 0.0, "offset": 1000.001 + 1e-3 * x, "positive": x.abs() + 1,
            "negative": -x.abs() - 1,
            "wide range": x * 10.0**(20 * torch.rand(rows, 1, generator=random) - 10)}[kind]


@pytest.fixture
def vectors():
    """A strategy of ``(kind, x [rows, dim])`` with dim a multiple of what is given."""
    def make(multiple: int = 1):
        return st.builds(lambda kind, rows, dim, seed: (kind, awkward(kind, rows, dim * multiple, seed)),
                         st.sampled_from(VECTORS), st.integers(0, 5), st.integers(1, 96 // multiple),
                         st.integers(0, 2**16))
    return make


CODINGS = [Int8Vectors(), Float8Vectors(), *(GroupedGrid(bits, channels) for bits in (2, 3, 4)
                                             for channels in (True, False)),
           *(HadamardVectors(bits, centered) for bits in (2, 3, 4) for centered in (True, False))]


def page(x):
    """Vectors repeated to a page of 64, all of them in it."""
    rows = x if len(x) else torch.zeros(1, x.shape[1])
    return rows.repeat(-(-64 // len(rows)), 1)[:64]


@pytest.mark.parametrize("coding", CODINGS, ids=lambda one: one.name)
def test_it_writes_to_nothing(coding):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    parts = coding.encode(x)
    copies = {name: part.clone() for name, part in parts.items()}
    coding.decode(parts)
    assert torch.equal(x, before) and all(torch.equal(parts[name], copies[name]) for name in parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("coding", CODINGS, ids=lambda one: one.name)
def test_layouts_are_what_is_made_and_everything_is_finite(coding, vectors):
    @settings(max_examples=60, deadline=None)
    @given(vectors(32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def holds(made, dtype):
        x = page(made[1]).to(dtype).nan_to_num_()
        parts = coding.encode(x)
        layout, shared = coding.layout(x.shape[-1], dtype), coding.shared(x.shape[-1], dtype)
        assert parts.keys() == layout.keys() | shared.keys()
        for name, (shape, kind) in layout.items():
            assert parts[name].shape == (64, *shape) and parts[name].dtype == kind, name
        for name, (shape, kind) in shared.items():
            assert parts[name].shape == shape and parts[name].dtype == kind, name
        back = coding.decode(parts)
        assert back.shape == x.shape and torch.isfinite(back).all()
        assert all(torch.isfinite(part.float()).all() for part in parts.values())
        if "zero" in made[0]:
            assert not back.any()

    holds()


@pytest.mark.parametrize("coding", CODINGS, ids=lambda one: one.name)
def test_pages_and_heads_are_apart(coding):
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    whole = coding.encode(x)
    for name, part in coding.encode(x[1, 2]).items():
        assert torch.equal(part, whole[name][1, 2])
    assert torch.equal(coding.decode(whole)[1, 2], coding.decode(coding.encode(x[1, 2])))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("coding", CODINGS[2:], ids=lambda one: one.name)
@pytest.mark.parametrize("dim", [1, 16, 31, 33, 80])
def test_a_head_dimension_that_does_not_fit_is_refused(coding, dim):
    with pytest.raises(UsageError, match="divisible by 32") as caught:
        coding.layout(dim, torch.bfloat16)
    assert str(dim) in caught.value.why and "int8" in caught.value.next


@pytest.mark.parametrize("bits", [2, 3, 4])
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 99))
def test_packing(bits, eights, rows, seed):
    codes = torch.randint(0, 2**bits, (rows, 8 * eights), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_bytes(8 * eights, bits)) and torch.equal(unpack(packed, bits), codes)


def test_where_bits_lie():
    """Lowest first; of 3 bits all low pairs, then all high bits."""
    codes = torch.tensor([[1, 2, 3, 0, 5, 6, 7, 4]], dtype=torch.uint8)
    assert pack(codes & 3, 2).tolist() == [[0b00111001, 0b00111001]]
    assert pack(codes, 3).tolist() == [[0b00111001, 0b00111001, 0b11110000]]
    assert pack(codes, 4).tolist() == [[0x21, 0x03, 0x65, 0x47]]


def check_int8(x):
    parts = INT8.encode(x)
    layout = INT8.layout(x.shape[-1], x.dtype)
    assert parts.keys() == layout.keys()
    for name, (shape, dtype) in layout.items():
        assert parts[name].shape == (*x.shape[:-1], *shape) and parts[name].dtype == dtype, name
    back, wide = INT8.decode(parts), x.double()
    assert back.shape == x.shape and torch.isfinite(back).all() and torch.isfinite(parts["scale"]).all()
    assert int(parts["codes"].min()) >= -127 if x.numel() else True
    scale = parts["scale"].double()[..., None]
    # beside half a step, float32's rounding of the product
    assert ((back.double() - wide).abs() <= scale / 2 * (1 + 1e-4)).all()
    # the scale is the smallest that reaches the largest number, in bfloat16's steps and not denormal
    most = wide.abs().amax(-1, keepdim=True)
    assert (scale <= torch.maximum(most / 127 * (1 + 2**-6), torch.tensor(2.0**-126))).all()
    return parts, back


def test_int8_is_within_half_a_step(vectors):
    @settings(max_examples=250, deadline=None)
    @given(vectors(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def holds(made, dtype):
        kind, x = made
        x = x.to(dtype).nan_to_num_()
        parts, back = check_int8(x)
        if "zero" in kind:
            assert torch.equal(back, torch.zeros_like(back)) and not parts["codes"].any()
        if kind == "equal" and dtype == torch.bfloat16:
            assert torch.allclose(back, x.float(), rtol=2**-7)

    holds()


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e38, 3e38])
def test_the_largest_float32_stays_finite_as_int8(largest):
    check_int8(torch.tensor([[largest, -largest, 1.0, 0.0]]))
    check_int8(torch.linspace(0.5, 1, 999)[:, None] * largest)


def test_int8_codes_already_on_the_grid_come_back():
    codes = torch.arange(-127, 128).float()
    parts = INT8.encode(codes * 0.5)
    assert torch.equal(parts["codes"].float(), codes) and float(parts["scale"]) == 0.5
    assert torch.equal(INT8.decode(parts), codes * 0.5)


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 2.0**127, width=32))
def test_rounded_up_is_the_least_bfloat16_above(x):
    up = rounded_up(torch.tensor([x]))
    below = (up.view(torch.int16) - 1).view(torch.bfloat16)
    assert float(up) >= x
    assert float(below) < x or float(up) == 2.0**-126


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("channels", [True, False])
def test_grids_are_within_half_a_step(bits, channels, vectors):
    coding, top = GroupedGrid(bits, channels), 2**bits - 1

    @settings(max_examples=80, deadline=None)
    @given(vectors(32), st.sampled_from([torch.float32, torch.bfloat16]))
    def holds(made, dtype):
        x = page(made[1]).to(dtype).nan_to_num_()
        parts = coding.encode(x)
        at = -2 if channels else -1
        wide, back = (t.double().clamp(-LARGEST, LARGEST).unflatten(at, (-1, 32))
                      for t in (x, coding.decode(parts)))
        scale, low = (parts[name].double().unsqueeze(at) for name in ("scale", "low"))
        rounding = (wide.abs() + low.abs()) * 2**-23  # float32's, of the difference and of the sum
        assert (low <= wide).all() and (low + top * scale >= wide - rounding).all()
        assert ((back - wide).abs() <= scale / 2 * (1 + 1e-4) + rounding).all()

    holds()


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e38, 3e38])
def test_the_largest_float32_stays_finite_in_grids(largest):
    for coding in (GroupedGrid(4, True), GroupedGrid(2, False)):
        x = torch.tensor([largest, -largest, 1.0, 0.0] * 8).expand(64, 32)
        assert torch.isfinite(coding.decode(coding.encode(x))).all()
        assert torch.isfinite(coding.decode(coding.encode(-x.abs()))).all()


def test_a_large_channel_costs_keys_nothing_and_values_a_lot():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    error = {by: (one.decode(one.encode(x)) - x)[:, 6:32].square().mean()
             for by, one in (("channel", GroupedGrid(4, True)), ("token", GroupedGrid(4, False)))}
    assert error["channel"] < 0.02 and error["token"] > 50 * error["channel"]


@pytest.mark.parametrize("codec", [NONE, BF16], ids=lambda c: c.name)
def test_floats_are_as_they_are_or_rounded(vectors, codec):
    @settings(max_examples=100, deadline=None)
    @given(vectors(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def holds(made, dtype):
        x = made[1].to(dtype).nan_to_num_()
        parts = codec.encode(x)
        (name, (shape, stored)), = codec.layout(x.shape[-1], dtype).items()
        assert parts[name].shape == (*x.shape[:-1], *shape) and parts[name].dtype == stored
        back = codec.decode(parts)
        assert torch.isfinite(back).all()
        if codec is NONE or dtype == torch.bfloat16:
            assert back.dtype == dtype and torch.equal(back, x) and torch.equal(back.signbit(), x.signbit())
        else:
            assert ((back.double() - x.double()).abs() <= x.double().abs() * 2**-8 + 2.0**-133).all()

    holds()


def test_what_is_too_large_for_bfloat16_becomes_the_largest():
    most = torch.finfo(torch.float32).max
    got = BF16.decode(BF16.encode(torch.tensor([most, -most])))
    assert got.tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max]


BEST = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Least mean squared error of any codebook of so many bits for a Gaussian of variance 1: Max 1960."""


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks_are_near_the_best(bits):
    normal = torch.distributions.Normal(0, 1).icdf((torch.arange(100000) + 0.5) / 100000)
    book = levels(bits)
    assert len(book) == 2**bits and (book.diff() > 0).all() and torch.equal(book, -book.flip(0))
    error = (normal[:, None] - book).abs().amin(1).square().mean()
    assert BEST[bits] * 0.99 < error < BEST[bits] * 1.025


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_that_of_the_codebook_whatever_comes(bits):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=make) * torch.randn(128, generator=make).exp()
    coding = HadamardVectors(bits, centered=False)
    back = undo_hadamard(coding.decode(coding.encode(apply_hadamard(x))))
    assert (back - x).square().sum() / x.square().sum() < 1.1 * BEST[bits]
    straight = GroupedGrid(bits, channels=False)
    assert (straight.decode(straight.encode(x)) - x).square().sum() > 1.3 * (back - x).square().sum()


def test_what_tokens_have_in_common_costs_nothing():
    make = torch.Generator().manual_seed(0)
    apart = torch.randn(64, 64, generator=make)
    for common in (0.0, 100.0):
        x = apply_hadamard(apart + common * torch.randn(1, 64, generator=make))
        coding = HadamardVectors(3, centered=True)
        error = (coding.decode(coding.encode(x)) - x).square().mean()
        # beside the codebook's, the mean's own rounding to bfloat16
        assert error < 0.04 + (common * 2**-8) ** 2 / 4
        alone = HadamardVectors(3, centered=False)
        assert common == 0 or (alone.decode(alone.encode(x)) - x).square().mean() > 10 * error


def test_kernels_and_reference_have_the_same_curves():
    assert kv_codecs.CURVES == CURVES
