"""The packed order is that of the registers: checked against the definition, lane by lane."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantkit_kernels.triton.fragment import arrange, columns, family_of, lane_columns, rows, shuffle


def places(bits, k, wide, adjacent):
    """(row, column) of every number, by word and field, found by packing the digits of both."""
    row = torch.arange(128)[:, None].expand(128, k)
    column = torch.arange(k).expand(128, k)
    found = []
    for value in (row, column):
        digits = [(value >> 4 * i & 15).to(torch.uint8) for i in range(3)]
        packed = [shuffle(d, bits, k, wide, adjacent).reshape(-1).tolist() for d in digits]
        found.append([[sum((word >> bits * at & 15) << 4 * i for i, word in enumerate(words))
                       for at in range(32 // bits)] for words in zip(*packed)])
    return [list(zip(rows, cols)) for rows, cols in zip(*found)]


@pytest.mark.parametrize(("bits", "k", "adjacent"), [
    (4, 128, False), (4, 64, False), (4, 64, True), (4, 32, False), (8, 64, False), (8, 32, False)])
@pytest.mark.parametrize("wide", [2, 4])
def test_a_lane_loads_its_own_numbers(bits, k, wide, adjacent):
    words = places(bits, k, wide, adjacent)
    everything = [place for word in words for place in word]
    assert sorted(everything) == list(itertools.product(range(128), range(k)))
    for number, word in enumerate(words):
        lane, warp = number // 4 % 32, number // 128 % 4
        g, t = lane // 4, lane % 4
        for row, column in word:
            assert row % 64 // 16 == warp and row % 8 == g
            assert (column % 8 // 2 if wide == 2 else column % 16 // 4) == t


@pytest.mark.parametrize("adjacent", [False, True])
def test_a_pair_is_one_register(adjacent):
    """The two numbers that a mask leaves side by side are neighboring columns of one row."""
    step, others = (1, (0, 2, 4, 6)) if adjacent else (4, (0, 1, 2, 3))
    for word in places(4, 64, 2, adjacent):
        for at in others:
            (row, column), (row_too, next_column) = word[at], word[at + step]
            assert row == row_too and next_column == column + 1 and column % 2 == 0


def test_tiles_follow_each_other():
    codes = torch.randint(0, 16, (384, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = shuffle(codes, 4, 64, 2)
    assert packed.shape == (3, 4, 1024) and packed.dtype == torch.int32
    assert torch.equal(packed[1, 2], shuffle(codes[128:256, 128:192].contiguous(), 4, 64, 2)[0, 0])


def test_a_load_covers_the_whole_tile():
    assert [columns(4, 128), columns(4, 64), columns(4, 32), columns(8, 64)] == [64, 64, 32, 32]


def test_families():
    assert family_of(torch.device("cpu")) == "hopper"
    assert [lane_columns(f) for f in ("ampere", "hopper", "blackwell", "cdna")] == [4, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_plain_numbers_lie_as_the_instruction_wants_them(dtype):
    """A lane's 16 bytes are its four registers: rows g and g + 8, then the same of the columns behind."""
    e = 4 // dtype.itemsize
    number = torch.arange(128 * 64).reshape(128, 64)
    parts = [arrange((number >> 7 * at & 127).to(dtype), 64).flatten().tolist() for at in range(2)]
    found = [int(low) + 128 * int(high) for low, high in zip(*parts)]
    assert sorted(found) == list(range(128 * 64))
    for at in range(0, len(found), 4 * e):
        lane, warp = at // (4 * e) % 32, at // (4 * e) // 32 % 4
        for register in range(4):
            first = at + register * e
            row, column = divmod(found[first], 64)
            assert found[first:first + e] == [found[first] + i for i in range(e)]
            assert row % 64 == warp * 16 + lane // 4 + register % 2 * 8
            assert column % (8 * e) == lane % 4 * e + register // 2 * 4 * e


def test_gates_and_what_they_open_take_turns():
    laid = rows(torch.arange(1, 41)[:, None], gated=True)[:, 0]
    assert laid.shape == (128,)
    assert laid[:40].tolist() == [*range(1, 9), *range(21, 29), *range(9, 17), *range(29, 37), *range(17, 21),
                                  *[0] * 4]
    assert laid[40:44].tolist() == list(range(37, 41)) and (laid[44:] == 0).all()
    assert torch.equal(rows(torch.ones(3, 2))[:4, 0], torch.tensor([1.0, 1, 1, 0]))
