"""Where the keys and values of a layer lie, and whose they are: what kernels over the cache are given.

A page holds 64 slots of one key head. Some codings encode a page's 64 vectors together; where they do, or
where the newest vectors stay as they are, vectors **wait** in pages of their own. Of n slots a query reads
those in ``[first, border(n))`` as codes, ``border(n) = max(first, ⌊(n − residual_length) / 64⌋ · 64)``, and
the others as vectors. Slots before ``first`` always wait.
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
    """How the vectors of one side are stored.

    Attributes:
        kind: :data:`PLAIN`, the numbers themselves; :data:`INT8` and :data:`FP8` (e4m3), one scale a vector;
            :data:`CHANNEL`, a grid for each channel of 32 tokens; :data:`TOKEN`, a grid for each 32 channels
            of a token; :data:`HADAMARD`, levels of a Gaussian codebook times a scale, of rotated vectors.
        bits: 2, 3 or 4 of the last three; else those of a number.
        centered: 64 tokens share a mean; of :data:`HADAMARD` only.
    """

    kind: str
    bits: int
    centered: bool = False


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer's pages.

    Attributes:
        coding: how.
        codes: ``[P, 64, D]``: plain numbers, int8, or uint8 of e4m3; below 8 bits uint8
            ``[P, 64, D·bits/8]``, lowest code in the lowest bits; of 3 bits all low pairs, then high bits.
        scale: bfloat16: ``[P, 64]`` of int8, fp8 and turned, ``[P, 2, D]`` by channel (a page's first and
            last 32 slots), ``[P, 64, D / 32]`` by token.
        shift: bfloat16, added: the lowest number, of scale's shape, by channel and by token; of turned and
            centered ones the mean ``[P, D]``.
        residual: ``[Q, 64, D]`` as computed; ``None`` where none wait.
    """

    coding: SideLayout
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerPages:
    """A layer's.

    Attributes:
        k, v: both sides; either both have ``residual`` or neither.
        positions: int32 ``[P, 64]``, or ``None`` where a slot's number is its position.
        residual_positions: int32 ``[Q, 64]``, likewise, of those that wait.
    """

    k: Side
    v: Side
    positions: torch.Tensor | None = None
    residual_positions: torch.Tensor | None = None

    @property
    def has_residual(self) -> bool:
        """Whether there are vectors that wait."""
        return self.k.residual is not None


@dataclass(frozen=True)
class SequenceTables:
    """All sequences that are on the device, in all layers. They stay there from step to step.

    Attributes:
        pages: int32 ``[R, L, Hkv, W]``, page numbers of R sequences in the order of slots; behind a head's
            last page anything.
        lengths: int32 ``[R, L, Hkv]``, slots that a head held before this step.
        seen: int32 ``[R]``, tokens that a sequence had before this step: position of its next one.
        residual: int32 ``[R, L, Hkv, V]``, pages of vectors that wait: those of slots before ``first``, then
            those from slot ``starts`` on; ``None`` where none wait.
        starts: int32 ``[R, L, Hkv]``.
        residual_length, first: see above; ``first`` is a multiple of 64.
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
    """The tokens that go through the model now.

    Attributes:
        rows: int32 ``[N, 2]``: of each token, which of the R sequences it belongs to, −1: nobody's (it is
            neither stored nor answered with more than zeros), and its place among that sequence's tokens of
            this step. Its position is ``seen + place``; it goes to slot ``lengths + place`` of every head,
            and its query reads the slots up to that one.
        longest: at least as many slots as any head holds after this step: grids are made for it.
    """

    rows: torch.Tensor
    longest: int


@triton.jit
def border(length: tl.tensor, residual_length: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Of so many slots those in ``[first, border)`` are read as codes."""
    return tl.maximum((length - residual_length) & -64, first)
