"""Amounts of memory, read and written."""

from __future__ import annotations

import pytest

from quantkit.units import human_bytes


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9950, "10 kB"), (1_700_000, "1.7 MB"),
    (999_600, "1.0 MB"), (134_500_000, "134 MB"), (2.5e9, "2.5 GB"), (4e12, "4.0 TB"), (2e15, "2000.0 TB")])
def test_human_bytes(count, text):
    assert human_bytes(count) == text
