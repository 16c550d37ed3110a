"""Parses sizes such as ``16GB``."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]+)", re.ASCII)


def amount(text: str) -> tuple[Fraction, str] | None:
    """A number and a unit in small letters, ``None`` if that isn't what it is."""
    match = _AMOUNT.fullmatch(text.strip().lower())
    return None if match is None else (Fraction(match[1]), match[2])


def bytes_of(text: str) -> int | None:
    """``16GB`` (10⁹) or ``16GiB`` (2³⁰) → bytes; ``None`` if it is no number above 0 with such a unit."""
    number = amount(text)
    if number is None or number[1] not in UNITS:
        return None
    return int(number[0] * UNITS[number[1]]) or None


def human_bytes(count: float) -> str:
    """``1.7 MB``, in powers of 1000, with two digits at least: ``135 MB``, ``0 B``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.1f} {unit}" if abs(count) < 9.95 and unit != "B" else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
