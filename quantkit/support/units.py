"""Parses sizes such as ``16GB``, and numbers of tokens such as ``8k``."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TOKENS = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgtKMGT]?)", re.ASCII)
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


def times_smaller(before: float, after: float) -> str:
    """``1.7 times smaller``, ``1.8 times larger``; within 5% ``as large``."""
    ratio = max(before, 1) / max(after, 1)
    if abs(ratio - 1) < 0.05:
        return "as large"
    factor = max(ratio, 1 / ratio)
    digits = 0 if factor >= 9.95 else 1 if factor >= 1.95 else 2
    return f"{factor:.{digits}f} times {'smaller' if ratio > 1 else 'larger'}"


def tokens_of(text: str) -> int | None:
    """``8k`` (8,000), ``8K`` (8,192), ``1.5m`` or ``8192`` → a number of tokens; ``None`` if it is none.

    Suffixes are those of vLLM's ``--max-model-len``: small letters are powers of 1000, capitals powers of
    1024, and only powers of 1000 take a fraction, if what comes out is whole.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        return None
    number, suffix = Fraction(match[1]), match[2]
    if "." in match[1] and not suffix.islower():
        return None
    count = number * (1000 if suffix.islower() else 1024) ** " kmgt".index(suffix.lower() or " ")
    return int(count) if count.denominator == 1 else None
