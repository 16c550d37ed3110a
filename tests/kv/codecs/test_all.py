"""What holds for every coding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv.codecs.eight_bit import Float8Vectors, Int8Vectors
from quantkit.kv.codecs.kivi import GroupedGrid, pack, packed_bytes, unpack
from quantkit.kv.codecs.rotation import HadamardVectors
from quantkit.support.errors import UsageError

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
