"""Hashed n-grams against sets of tuples, and what counts as the same passage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.quantization.calibration.overlap import Passages, ngrams, repeated, word_hashes

TEXT = " ".join(f"word{i}" for i in range(40))


def tuples(items, n):
    return [tuple(items[i:i + n]) for i in range(len(items) - n + 1)]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_equal_hashes_mean_equal_ngrams(items, n):
    hashes, expected = ngrams(items, n).tolist(), tuples(items, n)
    assert len(hashes) == len(expected)
    assert len(set(hashes)) == len(set(expected)) == len(set(zip(hashes, expected, strict=True)))


def test_rows_are_hashed_as_each_alone():
    rows = np.random.default_rng(0).integers(0, 50_000, (5, 40))
    assert np.array_equal(ngrams(rows, 32), np.stack([ngrams(row, 32) for row in rows]))
    assert ngrams(rows, 41).shape == (5, 0)


def test_no_collision_among_many():
    random = np.random.default_rng(0).integers(0, 128_256, 1_000_000)
    assert len(np.unique(ngrams(random, 13))) == 1_000_000 - 12


def test_case_punctuation_and_breaks_do_not_hide_a_passage():
    changed = TEXT.upper().replace(" WORD1 ", ",\n\n“word1” ")
    assert Passages(TEXT).share(changed) == 1 and Passages(changed).share(TEXT) == 1


@pytest.mark.parametrize(("text", "share"), [
    (TEXT, 1), ("", 0), (" ".join(TEXT.split()[:12]), 0), (" ".join(TEXT.split()[:13]), 1),
    (" ".join(reversed(TEXT.split())), 0),
    (" ".join(TEXT.split()[:20] + ["else"] * 20), 8 / 28)])
def test_shares(text, share):
    assert Passages(TEXT).share(text) == pytest.approx(share)
    assert Passages("").share(text) == 0


def test_where_words_are_not_spaced_a_letter_is_one():
    text = "人工知能は人間の知能をコンピュータで再現する技術"
    assert len(word_hashes(text)) == len(text) - 12
    assert Passages(text).share("これは" + text) == pytest.approx(12 / 15)


def test_repeated_windows():
    random = np.random.default_rng(0).integers(0, 50_000, (6, 128))
    random[2] = random[0]
    random[4, 40:] = random[1, 20:108]  # 57 of 97 shingles
    random[5, :60] = random[3, :60]  # 29 of 97
    assert repeated(random) == (1, 1)
    assert repeated(random[:2]) == (0, 0)
    assert repeated(np.ones((3, 8), np.int64)) == (2, 0)
    assert repeated(np.tile(np.arange(8), (1, 16))) == (0, 0), "a window that repeats itself is one"
