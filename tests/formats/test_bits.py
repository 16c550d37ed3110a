"""The bit stream against an independent packer that works bit by bit in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.formats import bits as stream

COUNTS = [1, 2, 7, 8, 9, 13, 31, 32, 33, 64, 97]


def numpy_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    flat = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits].reshape(len(codes), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_equals_an_independent_packer(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits * 100 + count).integers(0, 2**bits, (3, count), dtype=np.uint8)
    packed = stream.pack(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert packed.shape == (3, stream.words(count, bits))
    np.testing.assert_array_equal(packed.numpy(), numpy_pack(codes, bits))


def test_golden_words() -> None:
    """Written out by hand: 4-bit nibbles from the low end, 3-bit codes that straddle a word."""
    nibbles = torch.arange(8, dtype=torch.uint8).unsqueeze(0)
    assert stream.pack(nibbles, 4).tolist() == [[0x76543210]]
    ones = torch.full((1, 11), 7, dtype=torch.uint8)
    assert stream.pack(ones, 3).tolist() == [[-1, 1]]
    assert stream.pack(torch.tensor([[255, 0, 0, 128]], dtype=torch.uint8), 8).tolist() == [[-2**31 + 255]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 140), st.integers(0, 2**31))
def test_round_trip(bits: int, rows: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(seed))
    assert torch.equal(stream.unpack(stream.pack(codes, bits), bits, count), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpack_reads_a_view(bits: int) -> None:
    """Zero points arrive transposed, so not contiguous."""
    codes = torch.randint(0, 2**bits, (4, 50), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(bits))
    view = stream.pack(codes, bits).T.contiguous().T
    assert torch.equal(stream.unpack(view, bits, 50), codes)
    one = stream.pack(codes[:, :2], bits).T.contiguous().T  # a single word: any stride counts as contiguous
    assert torch.equal(stream.unpack(one, bits, 2), codes[:, :2])


@pytest.mark.oracle
@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for count in COUNTS:
        codes = torch.randint(0, 2**bits, (5, count), dtype=torch.uint8,
                              generator=torch.Generator().manual_seed(count))
        signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        assert torch.equal(stream.pack(codes, bits), helpers.pack_to_int32(signed, bits))


@pytest.mark.parametrize("bits", range(2, 9))
def test_single_codes_are_taken_from_their_words(bits):
    codes = torch.randint(0, 2**bits, (5, 77), dtype=torch.uint8)
    index = torch.tensor([0, 76, 10, 10, 5, 31, 32])
    assert torch.equal(stream.take(stream.pack(codes, bits), bits, index), codes[:, index])
    every = torch.arange(77)
    assert torch.equal(stream.take(stream.pack(codes, bits), bits, every), codes)


def test_many_codes_are_packed_some_rows_at_a_time(monkeypatch):
    codes = torch.randint(0, 8, (50, 33), dtype=torch.uint8)
    whole = stream.pack(codes, 3)
    monkeypatch.setattr(stream, "_AT_ONCE", 100)
    assert torch.equal(stream.pack(codes, 3), whole)
