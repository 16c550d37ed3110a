"""8-bit integers, one scale a token and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quantkit.kv.base import Layout

LEVELS = 127


class Int8:
    """``x ≈ codes · scale``: symmetric, codes int8 in [−127, 127], the scale bfloat16."""

    name = "int8"

    def layout(self, dim: int, dtype: torch.dtype) -> Layout:
        """``codes [dim]`` and one ``scale``: dim + 2 bytes."""
        return {"codes": ((dim,), torch.int8), "scale": ((), torch.bfloat16)}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded half to even; the scale is rounded up, so that nothing is clipped."""
        x = x.float()
        scale = rounded_up(x.abs().amax(-1) / LEVELS)
        codes = (x * (1 / scale.float())[..., None]).round_().clamp_(-LEVELS, LEVELS)
        return {"codes": codes.to(torch.int8), "scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32: one more rounding to half precision would cost as much as the codes themselves."""
        return parts["codes"].float().mul_(parts["scale"].float()[..., None])


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32, not negative → the smallest normal bfloat16 that isn't below it (at most the largest finite).

    Never 0 nor denormal, so that one over it is finite.
    """
    kind, near = torch.finfo(torch.bfloat16), x.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near).clamp_(kind.tiny, kind.max)


CODEC = Int8()
