"""The layout of the paged KV cache as kernels see it: a layer's pages, and which sequences they belong to.

A page holds 64 slots of one key head. Some layouts encode a page's 64 vectors together. Where they do, or
where the newest vectors stay unquantized (KIVI's residual window), vectors that aren't encoded yet, the
**residual**, are in separate pages. Of n slots a query reads those in ``[first, border(n))`` as codes, with
``border(n) = max(first, ⌊(n − residual_length) / 64⌋ · 64)``, and the others as vectors. Slots before
``first`` are never encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PAGE = 64
PLAIN, INT8, FP8 = "plain", "int8", "fp8"
CHANNEL, TOKEN, HADAMARD = "channel", "token", "hadamard"


@dataclass(frozen=True)
class SideLayout:
    """How the vectors of one side, keys or values, are stored.

    Attributes:
        kind: :data:`PLAIN`, unquantized numbers; :data:`INT8` and :data:`FP8` (e4m3), one scale per vector;
            :data:`CHANNEL`, a grid for each channel of 32 tokens; :data:`TOKEN`, a grid for each 32 channels
            of a token; :data:`HADAMARD`, levels of a Gaussian codebook times a scale, for Hadamard-rotated
            vectors.
        bits: 2, 3 or 4 for the last three kinds; otherwise the bits of a number.
        centered: whether 64 tokens share a mean; only for :data:`HADAMARD`.
    """

    kind: str
    bits: int
    centered: bool = False


@dataclass(frozen=True)
class Side:
    """Keys or values in a layer's pages.

    Attributes:
        coding: how they are stored.
        codes: ``[P, 64, D]``: plain numbers, int8, or uint8 with the bits of e4m3. Below 8 bits uint8
            ``[P, 64, D·bits/8]``, the first code in the lowest bits; codes of 3 bits have the low two bits
            of all codes first, then the high bits.
        scale: bfloat16: ``[P, 64]`` for int8, fp8 and hadamard, ``[P, 2, D]`` for channel (a page's first
            and last 32 slots), ``[P, 64, D / 32]`` for token.
        shift: bfloat16, added to the scaled codes: for channel and token the lowest number, with scale's
            shape; for centered hadamard the mean ``[P, D]``.
        residual: ``[Q, 64, D]``, vectors as they were computed; ``None`` if all are encoded at once.
    """

    coding: SideLayout
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer.

    Attributes:
        k, v: both sides; either both have ``residual`` or neither.
        positions: int32 ``[P, 64]``, or ``None`` where a slot's number is its position.
        residual_positions: the residual's positions, int32 ``[Q, 64]``.
    """

    k: Side
    v: Side
    positions: torch.Tensor | None = None
    residual_positions: torch.Tensor | None = None

    @property
    def has_residual(self) -> bool:
        """Whether the layer has pages for vectors that aren't encoded yet."""
        return self.k.residual is not None


@dataclass(frozen=True)
class SequenceTables:
    """Page tables and lengths of all sequences in all layers. They stay on the device from step to step.

    Attributes:
        pages: int32 ``[R, L, Hkv, W]``, page numbers of R sequences in the order of slots; entries behind a
            head's last page are undefined.
        lengths: int32 ``[R, L, Hkv]``, slots that a head had before this step.
        seen: int32 ``[R]``, tokens that a sequence had before this step, which is the position of its next.
        residual: int32 ``[R, L, Hkv, V]``, pages of the residual: those of slots before ``first``, then those
            from slot ``starts`` on; ``None`` if there is no residual.
        starts: int32 ``[R, L, Hkv]``.
        residual_length, first: see this module's description; ``first`` is a multiple of 64.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    seen: torch.Tensor
    residual: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    residual_length: int = 0
    first: int = 0


@dataclass(frozen=True)
class StepTokens:
    """The tokens that go through the model in this step.

    Attributes:
        rows: int32 ``[N, 2]``: for each token the index of its sequence among the R, and its place among
            that sequence's tokens of this step. Its position is ``seen + place``; it is stored in slot
            ``lengths + place`` of every head, and its query reads the slots up to that one. A sequence of −1
            means that the token belongs to none: it isn't stored, and its result is zeros.
        longest: upper limit of the slots that any head has after this step; launch grids are sized by it.
    """

    rows: torch.Tensor
    longest: int


@triton.jit
def border(length: tl.tensor, residual_length: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Return where encoded slots end: of ``length`` slots those in ``[first, border)`` are read as codes."""
    return tl.maximum((length - residual_length) & -64, first)
