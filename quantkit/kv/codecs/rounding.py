"""bfloat16 scales and offsets that leave nothing outside of the grid."""

from __future__ import annotations

import torch

LARGEST = 2.0**126
"""What is farther from 0 is stored as that: 15 steps from its negative to it are still finite."""


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32, not negative → the smallest normal bfloat16 that isn't below it (at most the largest finite).

    Never 0 nor denormal, so that one over it is finite.
    """
    kind, near = torch.finfo(torch.bfloat16), x.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near).clamp_(kind.tiny, kind.max)


def rounded_down(x: torch.Tensor) -> torch.Tensor:
    """float32 → the largest bfloat16 that isn't above it."""
    return -_signed_up(-x)


def _signed_up(x: torch.Tensor) -> torch.Tensor:
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    # towards +∞: the next pattern for a positive number, the one before for a negative, from ±0 the least
    step = torch.where(near > 0, bits + 1, torch.where(near < 0, bits - 1, 1))
    above = step.to(torch.int16).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near)
