"""Weights ready to be multiplied, whatever they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from quantkit_kernels.triton.token_groups import GroupRounding

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TritonDecoder:
    """How the words of a weight become numbers.

    Attributes:
        tile: jitted ``(w, s, magic, D, K, MODE, WIDE)``: words and scales of a tile → float32 scales
            ``[128]`` and numbers ``[128, K]`` of dtype D. Weights without groups are given anything for
            scales, and nobody looks at those that they return; nor where scales aren't its own affair.
        number: jitted ``(tile, s, row, col, K, MODE, WIDE)``: pointers to tiles → float32 numbers, scaled if
            scales are its own affair.
        takes: dtypes of the activations.
        levels: activations are :class:`~quantkit_kernels.triton.levels.QuantizedActivations` of these dtypes.
        zero_level: numbers of weights with minima are less than levels by it.
        product: a kernel of its own instead of :func:`~quantkit_kernels.triton.matmul.matmul_kernel`, with
            the same runtime arguments.
    """

    tile: Any
    number: Any
    takes: tuple[torch.dtype, ...] = FLOATS
    levels: bool = False
    zero_level: float = 0.0
    product: Any = None


@dataclass(frozen=True)
class TritonWeight:
    """A weight ready for :func:`~quantkit_kernels.triton.matmul.multiply`.

    Attributes:
        words: ``[n / 128, tiles, words]``, n rounded up: int32, or the numbers themselves.
        scale: float32, or int32 of two 16-bit numbers, ``[k / group, rows]``; without groups float32
            ``[rows]`` or none at all. ``rows`` are those of all tiles.
        n, k: the logical shape.
        bk: columns of a tile.
        group: columns that share a scale; 0: a scale a row, or none.
        mode: the decoder's own choice.
        family: the GPUs it was packed for, as :func:`~quantkit_kernels.triton.fragment.family_of` names them.
        decoder: unpacks the words.
        gated: rows of a gate and of what it opens lie in turn: y has half as many columns.
        layout: the scales' layout. ``word`` is the decoder's own. ``fine``: float32 ``[rows]``, then those of
            16 columns each. ``rings``: a scale a row, and the decoder loads words itself; see
            :mod:`~quantkit_kernels.triton.trellis`. Others: see
            :mod:`~quantkit_kernels.triton.group_scales`.
        inputs: how rows of x are rounded in groups before they are multiplied; ``None``: they aren't.
        table: what the decoder looks levels up in, beside the weight's own bytes; ``None``: nothing.
    """

    words: torch.Tensor
    scale: torch.Tensor | None
    n: int
    k: int
    bk: int
    group: int
    mode: str
    family: str
    decoder: TritonDecoder
    gated: bool = False
    layout: str = "word"
    inputs: GroupRounding | None = None
    table: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Numbers in a row of what it is multiplied with: k, or bytes of codes and scales."""
        return self.k if self.inputs is None else self.inputs.width(self.k)

    @property
    def nbytes(self) -> int:
        """Bytes read by one multiply."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.scale) if t is not None)

    @property
    def outputs(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n


def bits(w: TritonWeight) -> int:
    """Of a code."""
    return w.words.shape[2] * w.words.element_size() * 8 // (128 * w.bk)
