"""4-bit integers in groups of 32 numbers of one token and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.errors import UsageError
from quantkit.kv.base import Layout
from quantkit.kv.codecs.int8 import rounded_up

GROUP = 32
LEVELS = 15
LARGEST = 2.0**126
"""What is farther from 0 is stored as that: 15 steps from its negative to it are still finite."""


class Int4:
    """``x ≈ codes · scale + low``: asymmetric, codes in [0, 15], two a byte, scale and low bfloat16."""

    name = "int4"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes [dim / 2]``, ``scale`` and ``low [dim / 32]``: 0.625 bytes a number."""
        if dim % GROUP:
            raise UsageError(f"the KV codec int4 needs a head dimension divisible by {GROUP}",
                             why=f"this model has {dim}", next="use --kv int8")
        return {"codes": ((dim // 2,), torch.uint8), "scale": ((dim // GROUP,), torch.bfloat16),
                "low": ((dim // GROUP,), torch.bfloat16)}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded half to even; byte j holds number 2j in its low half and 2j + 1 in its high half."""
        groups = x.float().clamp(-LARGEST, LARGEST).unflatten(-1, (-1, GROUP))
        # the lowest is rounded down, so that code 0 reaches it
        low = -_signed_up(-groups.amin(-1))
        scale = rounded_up((groups.amax(-1) - low.float()) / LEVELS)
        steps = (groups - low.float()[..., None]) * (1 / scale.float())[..., None]
        codes = steps.round_().clamp_(0, LEVELS).to(torch.uint8).flatten(-2)
        return {"codes": codes[..., ::2] | (codes[..., 1::2] << 4), "scale": scale, "low": low}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32."""
        codes = parts["codes"]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).unflatten(-1, (-1, GROUP)).float()
        return pairs.mul_(parts["scale"].float()[..., None]).add_(parts["low"].float()[..., None]).flatten(-2)


def _signed_up(x: torch.Tensor) -> torch.Tensor:
    """float32 → the smallest bfloat16 that isn't below it."""
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    # towards +∞: the next pattern for a positive number, the one before for a negative, from ±0 the least
    step = torch.where(near > 0, bits + 1, torch.where(near < 0, bits - 1, 1))
    above = step.to(torch.int16).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near)


CODEC = Int4()
