"""4-bit floating-point weights by activations that are rounded to 4-bit floats in the same groups.

GPUs whose tensor cores multiply such groups get both packed, see
:mod:`~quantkit_kernels.triton.block_scaled`. Elsewhere weights are decoded as in
:mod:`~quantkit_kernels.triton.fp4`, and rows of x are the values that they were rounded to.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit_kernels.triton import block_scaled, fp4
from quantkit_kernels.triton.fragment import family_of
from quantkit_kernels.triton.packed import TritonWeight
from quantkit_kernels.triton.token_groups import GroupRounding

NATIVE = ("blackwell",)
"""Families with the instruction."""
SIZES = (16, 32, 64, 128)
"""Of groups of activations."""
COARSE, FINE = (replace(decoder, levels=True) for decoder in (fp4.E2M1, fp4.E2M1_FINE))


def pack(codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None = None,
         factor: torch.Tensor | None = None, family: str | None = None, gated: bool = False) -> TritonWeight:
    """Repack once.

    Args:
        codes: uint8 ``[n, k]``, 0 to 15.
        scale: float32 ``[n, k / group]``, powers of 2, group 32, 64 or 128; or float8_e4m3fn
            ``[n, k / 16]``, none negative.
        outer: float32 ``[n]`` or one number: what e4m3 scales are multiples of.
        factor: float32, one number: what e4m3 scales of x are multiplied by before they are rounded.
        family: the GPUs' family; by default that of the tensors' device.
        gated: rows are a gate's, then as many of what it opens.

    Raises:
        ValueError: such groups don't exist.
    """
    family, group = family or family_of(codes.device), codes.shape[1] // scale.shape[1]
    if group not in SIZES or codes.shape[1] % group or (group == SIZES[0]) != (outer is not None) or (
            (outer is None) != (factor is None)):
        raise ValueError("groups must be of 16 with an outer scale and a factor, or of 32, 64 or 128 "
                         f"without, not of {codes.shape[1]} / {scale.shape[1]}")
    number = None if factor is None else factor.float().reshape(1)
    if family in NATIVE and group in block_scaled.GROUPS:
        stored = scale.view(torch.uint8) if outer is not None else _exponents(codes, scale)
        return block_scaled.pack(codes, stored, outer, GroupRounding(group, number, block_scaled.BK), family,
                                 gated)
    how = GroupRounding(group, number)
    if outer is not None:
        return replace(fp4.pack_fine(codes, scale, outer, family, gated), decoder=FINE, inputs=how)
    return replace(fp4.pack(codes, scale, family, gated), decoder=COARSE, inputs=how)


def _exponents(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Powers of 2 as e8m0's bytes. A group of which all is 0 may have any scale."""
    empty = (codes & 7 == 0).view(len(codes), scale.shape[1], -1).all(-1)
    bits = torch.where(empty, 1.0, scale.float()).contiguous().view(torch.int32)
    return (bits >> 23).to(torch.uint8)
