"""Which of llama.cpp's types hold a quantized weight exactly, and its blocks in one of them.

Nothing is rounded. MXFP4's levels and scales are llama.cpp's too. A type of integers holds a weight if all of
its scales, and minima if it has them, are float16 numbers and all levels have a place; scales of larger
groups are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.export.layouts import InexactError, signed_levels
from quantkit.formats import e2m1
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.ggml_layout import BlockParts, packed_blocks
from quantkit.formats.level_values import middle
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.plugins.manager import registry

BLOCK = 32
"""Weights that share a scale in the types below."""
_MXFP4 = "MXFP4"
_AT_ONCE = 2**22
"""Weights whose blocks are made at once."""
_BETTER = {2: "gguf-q4_k", 3: "gguf-q4_k", 4: "gguf-q4_k", 5: "gguf-q5_k", 6: "gguf-q6_k"}
"""The format to quantize by, for widths that llama.cpp has a better type for than a plain one."""


@dataclass(frozen=True)
class _BlockType:
    """A type of blocks of :data:`BLOCK` weights.

    Attributes:
        name: the name that llama.cpp gives it.
        bits: the bits of a level.
        minimum: whether levels count from a minimum, and not from the middle one.
    """

    name: str
    bits: int
    minimum: bool = False

    @property
    def middle(self) -> int:
        """The level that means 0 in types without minima."""
        return 1 << (self.bits - 1)


_TYPES = (_BlockType("Q4_0", 4), _BlockType("Q4_1", 4, True), _BlockType("Q5_0", 5),
          _BlockType("Q5_1", 5, True), _BlockType("Q8_0", 8))
"""From the smallest to the largest."""


def ggml_type(format_name: str) -> str | None:
    """The type whose blocks a format stores as they are; ``None`` if it stores something else."""
    kind: str | None = getattr(registry("formats").get(format_name), "ggml_type", None)
    return kind


def reason_against(format_name: str, spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    """Why no type holds such a weight, as far as that can be told without reading it; ``None`` if one may."""
    if ggml_type(format_name) is not None:
        return None
    if spec.rotation:
        return "its inputs are rotated, which llama.cpp has no place for; use no rotation:"
    if spec.activations:
        return f"its inputs are rounded too; {_remedy(spec)}"
    mxfp4 = (spec.grid == "fp4" and spec.scale_dtype == "e8m0"
             and spec.granularity == Granularity(strategy="group", size=BLOCK))
    if (spec.kind != "int" and not mxfp4) or spec.superblock or (spec.minimum and spec.bits > 5):
        return f"llama.cpp has no type for {spec.label()}; {_remedy(spec)}"
    if shape[1] % BLOCK:
        return f"llama.cpp has blocks of {BLOCK}, which don't divide in_features {shape[1]}; keep that layer"
    if spec.granularity.size is not None and spec.granularity.size % BLOCK:
        return f"llama.cpp has blocks of {BLOCK}, whose scales groups of {spec.granularity.size} don't have"
    return None


def exact_types(name: str, packed: QuantizedTensor) -> tuple[str, ...]:
    """Types that hold a weight exactly, the smallest first.

    Args:
        name: the layer's name, for errors.
        packed: a weight that :func:`reason_against` has nothing against.

    Raises:
        InexactError: there are none.
    """
    if (kind := ggml_type(packed.format)) is not None:
        return (kind,)
    codes: Codes = registry("formats").get(packed.format).unpack(packed)
    if codes.spec.kind == "fp":
        return _mxfp4_types(name, codes)
    lost = ~_in_float16(codes.scale)
    if bool(lost.any()):
        example = codes.scale[lost][0].item()
        raise InexactError(f"layer {name} has scales that float16 doesn't hold exactly",
                           why=f"{int(lost.sum())} of {lost.numel()}, such as {example:.9g}; llama.cpp keeps "
                               "scales in float16",
                           next=f"quantize the original by a recipe with format: {_format(codes.spec)}, or "
                                "scale_dtype: float16")
    kinds = [block_type.name for block_type in _TYPES if _fits(block_type, codes)]
    if not kinds and codes.minimum is not None:
        raise InexactError(f"layer {name} has minima that float16 doesn't hold exactly",
                           why="llama.cpp's types keep them in float16", next=_remedy(codes.spec))
    if not kinds:
        signed = signed_levels(codes)
        raise InexactError(
            f"layer {name} has levels from {int(signed.min())} to {int(signed.max())} around its zero points",
            why="no type of llama.cpp's holds them: Q8_0 has levels from -128 to 127",
            next="quantize the original with symmetric: true")
    return tuple(kinds)


def _mxfp4_types(name: str, codes: Codes) -> tuple[str, ...]:
    if not bool(codes.scale.isfinite().all()):
        raise InexactError(f"layer {name} has scales that are no numbers",
                           why="llama.cpp would take them for powers of 2", next="make the checkpoint again")
    return (_MXFP4,)


def _fits(block_type: _BlockType, codes: Codes) -> bool:
    """Whether a type has a place for all levels, and for the minima if it has them."""
    if not block_type.minimum:
        signed = signed_levels(codes)
        return (codes.minimum is None and -block_type.middle <= int(signed.min())
                and int(signed.max()) < block_type.middle)
    return (not codes.spec.symmetric and int(codes.codes.max()) < 2 ** block_type.bits
            and bool(_in_float16(_minimum(codes)).all()))


def _in_float16(values: torch.Tensor) -> torch.Tensor:
    """Which of these float32 numbers float16 holds exactly; of infinities and NaN none."""
    return (values.to(torch.float16).float() == values) & values.isfinite()


def blocks_of(packed: QuantizedTensor, kind: str) -> torch.Tensor:
    """A weight in blocks.

    Args:
        packed: the weight as it is stored.
        kind: one of its :func:`exact_types`.

    Returns:
        uint8 ``[out, bytes of a row]``.
    """
    if ggml_type(packed.format) is not None:
        (blocks,) = packed.tensors.values()
        return blocks
    codes: Codes = registry("formats").get(packed.format).unpack(packed)
    if kind == _MXFP4:
        return _mxfp4_blocks(codes)
    block_type = next(block_type for block_type in _TYPES if block_type.name == kind)
    rows, cols = codes.codes.shape
    shape = (rows, codes.scale.shape[1])
    scale, minimum = codes.scale.expand(shape), _minimum(codes).expand(shape)
    if not block_type.minimum:
        levels = (signed_levels(codes) + block_type.middle).to(torch.uint8)
    else:
        levels = codes.codes
    repeats, step = cols // BLOCK // shape[1], max(1, _AT_ONCE // cols)
    made = []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        repeated = scale[part].repeat_interleave(repeats, dim=1).reshape(-1)
        low = minimum[part].repeat_interleave(repeats, dim=1).reshape(-1) if block_type.minimum else None
        blocks = packed_blocks(kind, BlockParts(levels[part].reshape(-1, BLOCK), repeated, low))
        made.append(blocks.reshape(len(scale[part]), -1))
    return torch.cat(made)


def _mxfp4_blocks(codes: Codes) -> torch.Tensor:
    """uint8 ``[out, in / 32 · 17]``: of each block the scale's exponent, then 16 bytes, each with a level of
    the first half in its lower bits and one of the second above."""
    rows, cols = codes.codes.shape
    first, second = codes.codes.view(rows, cols // BLOCK, 2, BLOCK // 2).unbind(2)
    exponents = e2m1.encode_e8m0(codes.scale).unsqueeze(2)
    return torch.cat((exponents, first | second << 4), 2).flatten(1)


def _minimum(codes: Codes) -> torch.Tensor:
    """The value of level 0 of each group, float32, shape of the scales."""
    if codes.minimum is not None:
        return codes.minimum
    zero = torch.full(codes.scale.shape, middle(codes.spec)) if codes.zero is None else codes.zero
    return -zero.to(torch.float32) * codes.scale


def _format(spec: QuantSpec) -> str:
    return _BETTER.get(spec.bits, "gguf-q8_0")


def _remedy(spec: QuantSpec) -> str:
    return f"quantize the original by a recipe with format: {_format(spec)}"
