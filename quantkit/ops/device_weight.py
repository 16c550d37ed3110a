"""What a Linear keeps of a weight that a program took to a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceWeight:
    """Its kernel's name and its shape ``(out, in)``; the program alone multiplies by it."""

    name: str
    shape: tuple[int, int]
