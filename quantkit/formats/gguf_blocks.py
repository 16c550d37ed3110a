"""Weights in the blocks of llama.cpp's types, byte for byte as a GGUF file has them.

======  =========  ========================================
suffix  dtype      shape
======  =========  ========================================
blocks  uint8      ``[out, bytes of a row]``
======  =========  ========================================

:mod:`~quantkit.formats.ggml_layout` has the blocks. In a checkpoint of ours they are read by quantkit only;
``quantkit export --to gguf`` puts them into one file for llama.cpp and the programs that are built on it.
"""

from __future__ import annotations

import torch

from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import resolve
from quantkit.formats.finite import all_finite
from quantkit.formats.fit import FormatBase, Layout
from quantkit.formats.ggml_layout import BlockParts, packed_blocks, unpacked_blocks
from quantkit.formats.spec import Granularity, Kind, QuantSpec


class GgufFormat(FormatBase):
    """One of llama.cpp's types.

    Attributes:
        name: ``gguf-`` and the type in small letters.
        ggml_type: the type as llama.cpp spells it.
        spec: the only one that it holds.
        block: weights in a block.
        block_bytes: bytes of one.
    """

    quant_method = "quantkit"
    scales = "float16"

    def __init__(self, ggml_type: str, block_bytes: int, spec: QuantSpec) -> None:
        self.name = f"gguf-{ggml_type.lower()}"
        self.ggml_type = ggml_type
        self.spec = spec
        self.block, self.block_bytes = spec.superblock or spec.granularity.size or 0, block_bytes

    def reason_against(self, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
        """Any other spec than the type's, and rows that aren't whole blocks."""
        rows, cols = shape
        if resolve(spec, form=self) != self.spec:
            return f"{self.name} holds {self.spec.label()} with float16 scales, not {spec.label()}"
        if rows < 1 or cols < 1:
            return f"a weight of shape [{rows}, {cols}] is empty; keep it out with method: null"
        if cols % self.block:
            return f"{self.name} has blocks of {self.block}, which don't divide in_features {cols}"
        return None

    def stored_layout(self, spec: QuantSpec, shape: tuple[int, int], dtype: torch.dtype) -> Layout:
        return {"blocks": (torch.uint8, (shape[0], shape[1] // self.block * self.block_bytes))}

    def stored_tensors(self, codes: Codes, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        blocks = packed_blocks(self.ggml_type, self._parts(codes))
        return {"blocks": blocks.view(layout["blocks"][1])}

    def _parts(self, codes: Codes) -> BlockParts:
        levels = codes.codes.reshape(-1, self.block)
        if codes.outer is None:
            minimum = None if codes.minimum is None else codes.minimum.reshape(-1)
            return BlockParts(levels, codes.scale.reshape(-1), minimum)
        count = self.block // (self.spec.granularity.size or 1)
        outer = codes.outer.reshape(-1)
        multiples = (codes.scale.reshape(-1, count) / outer.unsqueeze(1)).round().to(torch.int16)
        if codes.minimum is None or codes.outer_minimum is None:
            return BlockParts(levels, outer, multiples=multiples)
        depth = codes.outer_minimum.reshape(-1)
        depths = (-codes.minimum.reshape(-1, count) / depth.unsqueeze(1)).round().to(torch.uint8)
        return BlockParts(levels, outer, depth, multiples, depths)

    def unpack(self, packed: QuantizedTensor) -> Codes:
        rows = packed.tensors["blocks"].shape[0]
        parts = unpacked_blocks(self.ggml_type, packed.tensors["blocks"].reshape(-1, self.block_bytes))
        levels, scale = parts.levels.reshape(rows, -1), parts.scale.view(rows, -1)
        if parts.multiples is None:
            minimum = None if parts.minimum is None else parts.minimum.view(rows, -1)
            return Codes(self.spec, levels, scale, minimum=minimum)
        scales = (parts.scale.unsqueeze(1) * parts.multiples).view(rows, -1)
        if parts.minimum is None or parts.depths is None:
            return Codes(self.spec, levels, scales, outer=scale)
        minimum = (-parts.minimum.unsqueeze(1) * parts.depths).view(rows, -1)
        return Codes(self.spec, levels, scales, minimum=minimum, outer=scale,
                     outer_minimum=parts.minimum.view(rows, -1))

    def is_finite(self, packed: QuantizedTensor) -> bool:
        """Whether all float16 numbers of the blocks are."""
        blocks = packed.tensors["blocks"].reshape(-1, self.block_bytes)
        start = self.block_bytes - 2 if self.ggml_type == "Q6_K" else 0
        numbers = blocks[:, start:start + (4 if self.spec.minimum else 2)].contiguous().view(torch.float16)
        return all_finite(numbers)

    def rows(self, packed: QuantizedTensor, ids: torch.Tensor) -> torch.Tensor:
        """Only these rows of the weight, float32 ``[n, in]``."""
        some = QuantizedTensor(packed.format, packed.spec, (len(ids), packed.shape[1]), packed.dtype,
                               {"blocks": packed.tensors["blocks"][ids]})
        return self.dequantize(some)


def _spec(bits: int, size: int = 32, *, kind: Kind = "int", minimum: bool = False,
          scale_bits: int | None = None) -> QuantSpec:
    return QuantSpec(kind=kind, bits=bits, symmetric=not minimum, minimum=minimum,
                     signed=kind == "int" and not minimum and scale_bits is None,
                     granularity=Granularity(strategy="group", size=size), scale_dtype="float16",
                     superblock=None if scale_bits is None else 256, scale_bits=scale_bits)


Q8_0 = GgufFormat("Q8_0", 34, _spec(8))
Q4_0 = GgufFormat("Q4_0", 18, _spec(4))
Q4_1 = GgufFormat("Q4_1", 20, _spec(4, minimum=True))
Q5_0 = GgufFormat("Q5_0", 22, _spec(5))
Q5_1 = GgufFormat("Q5_1", 24, _spec(5, minimum=True))
Q4_K = GgufFormat("Q4_K", 144, _spec(4, minimum=True, scale_bits=6))
Q5_K = GgufFormat("Q5_K", 176, _spec(5, minimum=True, scale_bits=6))
Q6_K = GgufFormat("Q6_K", 210, _spec(6, 16, scale_bits=8))
IQ4_NL = GgufFormat("IQ4_NL", 18, _spec(4, kind="iq"))
FORMATS = {form.ggml_type: form for form in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, IQ4_NL)}
"""By type."""
