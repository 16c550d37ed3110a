"""Keys and values in pages, encoded simply: what attention is measured over."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quantkit_kernels import reference
from quantkit_kernels.triton.cache import (
    CHANNEL,
    FP8,
    HADAMARD,
    INT8,
    PAGE,
    PLAIN,
    TOKEN,
    LayerPages,
    SequenceTables,
    Side,
    SideLayout,
    StepTokens,
)

CODINGS = {
    "bf16": (SideLayout(PLAIN, 16), SideLayout(PLAIN, 16)),
    "int8": (SideLayout(INT8, 8), SideLayout(INT8, 8)), "fp8": (SideLayout(FP8, 8), SideLayout(FP8, 8)),
    "int4": (SideLayout(CHANNEL, 4), SideLayout(TOKEN, 4)),
    "hadamard4": (SideLayout(HADAMARD, 4, True), SideLayout(HADAMARD, 4))}
"""Of keys and of values."""
FIRST, THIRD = 0.240464, 0.00209768
"""Level c of rotated vectors' 4-bit codes is ``u (FIRST + THIRD u²)``, u = c − 7.5."""
Encoded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]


def encoded(x: torch.Tensor, coding: SideLayout) -> Encoded:
    """``x [P, 64, D]`` → codes, scale and shift as in :class:`~quantkit_kernels.triton.cache.Side`, and what
    they stand for in float32."""
    wide = x.float()
    if coding.kind == PLAIN:
        return x, None, None, wide
    if coding.kind == INT8:
        codes, scale = reference.encode_int8(wide)
        return codes, scale, None, codes.float() * scale.float()[..., None]
    if coding.kind == FP8:
        scale = (wide.abs().amax(-1) / 440).clamp(min=1e-30).to(torch.bfloat16)
        floats = (wide / scale.float()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return floats.view(torch.uint8), scale, None, floats.float() * scale.float()[..., None]
    if coding.kind == HADAMARD:
        return _hadamard(wide, coding.centered)
    at = -2 if coding.kind == CHANNEL else -1
    groups = wide.unflatten(at, (-1, 32))
    low = groups.amin(at, keepdim=True).to(torch.bfloat16)
    scale = ((groups.amax(at, keepdim=True) - low.float()) / 15).clamp(min=1e-30).to(torch.bfloat16)
    codes = ((groups - low.float()) / scale.float()).round().clamp(0, 15)
    decoded = codes * scale.float() + low.float()
    return (_packed(codes.flatten(at - 1, at)), scale.squeeze(at), low.squeeze(at),
            decoded.flatten(at - 1, at))


def _hadamard(x: torch.Tensor, centered: bool) -> Encoded:
    mean = x.mean(-2).to(torch.bfloat16) if centered else None
    if mean is not None:
        x = x - mean.float()[:, None]
    u = torch.arange(16, device=x.device) - 7.5
    book = u * (FIRST + THIRD * u * u)
    scale = x.square().mean(-1).sqrt().to(torch.bfloat16)
    codes = torch.bucketize(x / scale.float()[..., None], (book[1:] + book[:-1]) / 2)
    decoded = book[codes] * scale.float()[..., None]
    return _packed(codes), scale, mean, decoded if mean is None else decoded + mean.float()[:, None]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two a byte, lowest first."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def paged(k: torch.Tensor, v: torch.Tensor, codings: tuple[SideLayout, SideLayout],
          new: int = 1) -> tuple[LayerPages, SequenceTables, StepTokens, torch.Tensor, torch.Tensor]:
    """``k, v [B, Hkv, S, D]`` in shuffled pages; of each sequence the last ``new`` tokens are the step's.

    Where codings go by whole pages, the vectors of the last page wait if it isn't full. Returns what
    attention is given, and keys and values as they are read, in k's dtype.
    """
    batch, heads, length, dim = k.shape
    device, each = k.device, -(-length // PAGE)
    count = batch * heads * each
    has_residual = min(coding.bits for coding in codings) < 8
    order = torch.randperm(count, device=device)
    table = order.to(torch.int32).view(batch, 1, heads, each)
    sides, read = [], []
    for x, coding in zip((k, v), codings):
        rows = F.pad(x, (0, 0, 0, each * PAGE - length)).reshape(count, PAGE, dim)
        *parts, decoded = encoded(rows, coding)
        decoded = decoded.view(batch, heads, -1, dim)[:, :, :length].to(x.dtype)
        residual = None
        if has_residual:
            decoded[:, :, length // PAGE * PAGE:] = x[:, :, length // PAGE * PAGE:]
            residual = _placed(rows, order)
        codes, scale, shift = (None if part is None else _placed(part, order) for part in parts)
        assert codes is not None
        sides.append(Side(coding, codes, scale, shift, residual))
        read.append(decoded)
    # vectors of all slots wait here, those before the last page beside their codes: they aren't read
    before = torch.full((batch, 1, heads), length - new, dtype=torch.int32, device=device)
    tables = SequenceTables(table, before, before[:, 0, 0].clone(), table if has_residual else None,
                            torch.zeros_like(before) if has_residual else None)
    whose = [[row, place] for row in range(batch) for place in range(new)]
    step = StepTokens(torch.tensor(whose, dtype=torch.int32, device=device), length)
    return LayerPages(sides[0], sides[1]), tables, step, read[0], read[1]


def _placed(part: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Pages in another order."""
    out = torch.empty_like(part)
    out[order] = part
    return out


def cloned(pages: LayerPages) -> LayerPages:
    """The same elsewhere in memory."""
    def side(of: Side) -> Side:
        scale, shift, residual = (None if part is None else part.clone()
                                  for part in (of.scale, of.shift, of.residual))
        return Side(of.coding, of.codes.clone(), scale, shift, residual)

    return LayerPages(side(pages.k), side(pages.v))


def slot_bytes(pages: LayerPages) -> float:
    """Bytes of a slot of one head: its codes, and its share of what a page stores beside them."""
    parts = [part for side in (pages.k, pages.v) for part in (side.codes, side.scale, side.shift)]
    return sum(part[0].numel() * part.element_size() for part in parts if part is not None) / PAGE
