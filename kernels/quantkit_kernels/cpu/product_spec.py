"""Which product a kernel computes."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit_kernels.cpu.scales import FLOAT32, ScaleLayout
from quantkit_kernels.cpu.weight_decoder import WeightDecoder

ARGUMENTS = ("*weights", "*scales", "*outer", "*zeros", "*x", "*x_scales", "*x_sums", "*out", "*bias",
             "*scratch", "add", "x_stride", "out_stride", "stripes", "subgroups", "stripes_a_unit", "rows",
             "rows_a_unit", "x_private", "scratch_private")
"""Of a record. Strides are bytes; ``x_stride`` is that of codes, scales and sums alike; the sums of halves of
subgroups lie behind a row's sums. ``x_private`` and ``scratch_private`` are those from thread to thread."""
MOST_ROWS = 128
"""Rows of activations in a unit, at most: their codes stay in a core's own cache."""


@dataclass(frozen=True)
class ProductSpec:
    """A product by weights: their format and how it is scaled.

    Attributes:
        decoder: the weights' format.
        group: values that share a scale: 16, or a multiple of 32; 0: a whole row; ``None``: there are no
            scales.
        scales: how scales are stored.
        zeros: whether each group has a zero point, in place of the decoder's: uint8 for the family ``bytes``,
            int8 for ``words``, whose codes are signed.
        high: whether 4-bit codes are the high halves of int8: code c means 16 c − 120, the middle of the 16
            int8 that begin so.
    """

    decoder: WeightDecoder
    group: int | None
    scales: ScaleLayout = FLOAT32
    zeros: bool = False
    high: bool = False

    @property
    def name(self) -> str:
        """The function's name, which contains all that its code depends on."""
        group = {None: "", 0: "_channel"}.get(self.group, f"_g{self.group}")
        return f"matmul_{self.decoder.name}{group}_{self.scales.name}{'_zp' if self.zeros else ''}" + (
            "_high" if self.high else "")
