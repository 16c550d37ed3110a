"""Windows: chosen by the seed, never overlapping, without padding; errors that give the numbers."""

import pytest
import torch

from quantkit.quantization.calibration.data import Encoded, cut_windows
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.support.errors import CalibrationError


def documents(*lengths: int) -> list[Encoded]:
    """Token ``1000 · document + position`` each."""
    return [Encoded(f"line {i}", list(range(1000 * i, 1000 * i + n))) for i, n in enumerate(lengths, 1)]


def test_a_stream_is_cut_without_overlap():
    windows = cut_windows(CalibrationSpec(windows=9, window=10), documents(100), "stream")
    assert windows.tokens.dtype == torch.int64 and windows.tokens.shape == (9, 10)
    starts = (windows.tokens[:, 0] - 1000).tolist()
    assert len(set(starts)) == 9 and all(start % 10 == 0 for start in starts)
    assert torch.equal(windows.tokens, windows.tokens[:, :1] + torch.arange(10))
    assert windows.origins == tuple(f"line 1, from token {start}" for start in starts)
    assert (windows.available, windows.cut, windows.lost) == (100, 0, 0)


def test_a_stream_goes_on_from_document_to_document():
    windows = cut_windows(CalibrationSpec(windows=3, window=10), documents(4, 16, 0, 12), "stream")
    by_start = {row[0]: (row, origin) for row, origin in zip(windows.tokens.tolist(), windows.origins)}
    assert by_start == {
        1000: ([*range(1000, 1004), *range(2000, 2006)], "line 1, from token 0"),
        2006: ([*range(2006, 2016)], "line 2, from token 6"),
        4000: ([*range(4000, 4010)], "line 4, from token 0")}


def test_a_window_begins_with_a_document_and_is_filled_with_the_next():
    many = documents(*[7] * 40, 25)
    windows = cut_windows(CalibrationSpec(windows=5, window=20), many, "documents")
    begins = {one.where: one.ids for one in many}
    for row, origin in zip(windows.tokens.tolist(), windows.origins, strict=True):
        first = begins[origin][:20]
        assert row[:len(first)] == first
        starts = [at for at, token in enumerate(row) if token % 1000 == 0]
        assert starts == ([0, 7, 14] if len(first) == 7 else [0])
    assert len(set(windows.tokens.flatten().tolist())) == 100, "no document is used twice"
    assert windows.cut == 5 and windows.lost == sum(
        len(begins[origin]) - 20 if len(begins[origin]) == 25 else 1 for origin in windows.origins)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_the_seed_chooses(packing):
    many = documents(*[8] * 50)
    one, same, other = (cut_windows(CalibrationSpec(windows=4, window=8, seed=seed), many, packing).tokens
                        for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_what_is_to_be_avoided_is_left_out_and_counted(packing):
    windows = cut_windows(CalibrationSpec(windows=2, window=10), documents(*[10] * 5), packing,
                          lambda ids: ids[0] in (1000, 2000, 4000))
    assert sorted(windows.tokens[:, 0].tolist()) == [3000, 5000]
    assert windows.avoided == 3 if packing == "stream" else windows.avoided <= 3  # of those looked at
    spec = CalibrationSpec(windows=3, window=10, avoid=("exam.txt",))
    with pytest.raises(CalibrationError, match="has 50 tokens") as caught:
        cut_windows(spec, documents(*[10] * 5), packing, lambda ids: ids[0] in (1000, 2000, 4000))
    assert "3 were left out for what they share with exam.txt" in caught.value.why


@pytest.mark.parametrize(("size", "packing", "advice"), [
    (39, "stream", "--windows 3,"), (9, "stream", "--windows 1 --window 9,"),
    (39, "documents", "--windows 3,"), (9, "documents", "--windows 1 --window 9,")])
def test_too_short_says_by_how_much(size, packing, advice):
    lengths = [size] if packing == "stream" else [3] * (size // 3)
    with pytest.raises(CalibrationError, match=f"has {size} tokens, 40 are needed") as caught:
        cut_windows(CalibrationSpec(windows=4, window=10), documents(*lengths), packing)
    assert advice in caught.value.next
