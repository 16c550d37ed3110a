"""``trellis``: symbols of 2 to 4 bits, of which each means something only after those before it.

==================  ===========  ============================================================
suffix              dtype        shape
==================  ===========  ============================================================
``weight_trellis``  int32        ``[out / 64, in, 2 * bits]``: a ring's symbols
``weight_scale``    the model's  ``[out, 1]``
==================  ===========  ============================================================

:mod:`~quantkit.formats.trellis_code` says what symbols mean. Rings are little-endian streams, as in
``pack-quantized``: of a computed code in the order of its places, of a learned table in the order of rows, so
that a weight's state is the 8 bits of the stream that begin with its own. The window is in the configuration.
"""

from __future__ import annotations

import torch

from quantkit.formats import bits as stream
from quantkit.formats import trellis_code
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.fit import FormatBase, Layout
from quantkit.formats.spec import QuantSpec


class TrellisFormat(FormatBase):
    name = "trellis"
    quant_method = "quantkit"

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Anything but a trellis; rows that aren't whole rings."""
        rows, cols = shape
        if spec.kind != "trellis":
            return f"{self.name} holds a trellis, not {spec.kind}; use format pack-quantized"
        if rows < 1 or cols < 1:
            return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
        if rows % trellis_code.RING:
            return (f"it takes out_features in multiples of {trellis_code.RING}, not {rows}; "
                    "use kind int with format pack-quantized")
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        rows, cols = shape
        ring = trellis_code.RING
        return {"weight_trellis": (torch.int32, (rows // ring, cols, stream.words(ring, spec.bits))),
                "weight_scale": (dtype, (rows, 1))}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rings = trellis_code.rings(codes.codes, _window(codes.spec))
        symbols = _stored(rings, codes.spec).reshape(-1, trellis_code.RING)
        words = stream.pack(symbols, codes.spec.bits).reshape(layout["weight_trellis"][1])
        return {"weight_trellis": words, "weight_scale": codes.scale.to(dtype)}

    def unpack(self, packed: QuantizedTensor) -> Codes:
        spec = resolve(packed.spec, packed.dtype)
        words = packed.tensors["weight_trellis"]
        symbols = stream.unpack(words.reshape(-1, words.shape[-1]), spec.bits, trellis_code.RING)
        rings = _stored(symbols.reshape(*words.shape[:2], trellis_code.RING), spec)
        codes = trellis_code.unring(rings, _window(spec))
        return Codes(spec, codes, packed.tensors["weight_scale"].to(torch.float32))

    def dequantize(self, packed: QuantizedTensor) -> torch.Tensor:
        """``value(state) * scale`` in float32 ``[out, in]``."""
        codes = self.unpack(packed)
        return trellis_code.decode(codes.codes, codes.spec.bits, _window(codes.spec)) * codes.scale


def _window(spec: QuantSpec) -> int:
    assert spec.window is not None
    return spec.window


def _stored(rings: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Rings in the order of places ⇄ in the order in which they are stored."""
    return rings.flip(-1) if spec.window == trellis_code.LEARNED else rings


FORMAT = TrellisFormat()
