"""Amounts of memory, read and written."""

from __future__ import annotations

import pytest

from quantkit.support.units import human_bytes, tokens_of


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9950, "10 kB"), (1_700_000, "1.7 MB"),
    (999_600, "1.0 MB"), (134_500_000, "134 MB"), (2.5e9, "2.5 GB"), (4e12, "4.0 TB"), (2e15, "2000.0 TB")])
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("text", "count"), [
    ("8192", 8192), ("0", 0), (" 8k ", 8000), ("8K", 8192), ("32k", 32_000), ("1m", 10**6), ("1M", 2**20),
    ("1.5k", 1500), ("25.6k", 25_600), ("2g", 2 * 10**9), ("1G", 2**30), ("1t", 10**12), ("1T", 2**40)])
def test_numbers_of_tokens(text, count):
    assert tokens_of(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1.0005k", "8 k", "-8k", "8kk", "1e3", "8ki", "٣k",
                                  "9" * 5000, "0x10", "1_000"])
def test_what_is_no_number_of_tokens(text):
    assert tokens_of(text) is None
