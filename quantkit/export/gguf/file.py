"""The bytes of a GGUF file in front of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

VERSION, ALIGNMENT = 3, 32
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]
"""Of a key. Whole numbers are written as uint32, and lists of them as int32; other numbers as float32."""
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name: the name that GGUF gives it.
        kind: the name of its type, ``Q8_0``.
        shape: outermost dimension first, as torch has it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values, without what fills the space up to the next tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        weights, width = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // weights * width

    @property
    def padding(self) -> int:
        """Bytes between its values and the next tensor's."""
        return -self.nbytes % ALIGNMENT


def header_bytes(metadata: Mapping[str, Value], tensors: Sequence[FileTensor]) -> bytes:
    """Everything in front of the first tensor's values, which follow one after another, each with its
    :attr:`FileTensor.padding`.

    Args:
        metadata: the keys, in the order in which they are written.
        tensors: in the order of their values.
    """
    from gguf.constants import GGMLQuantizationType

    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, raw = _packed(value)
        parts += [_text(key), struct.pack("<I", kind), raw]
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        parts += [_text(tensor.name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims),
                  struct.pack("<IQ", GGMLQuantizationType[tensor.kind], offset)]
        offset += tensor.nbytes + tensor.padding
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % ALIGNMENT)


def _packed(value: Value) -> tuple[int, bytes]:
    """A value's type, and its bytes."""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    if not value or isinstance(value[0], str):  # the only list that may be empty is that of merges
        return _ARRAY, struct.pack("<IQ", _STRING, len(value)) + b"".join(_text(str(item)) for item in value)
    inner, form = (_FLOAT32, "<f4") if isinstance(value[0], float) else (_INT32, "<i4")
    return _ARRAY, struct.pack("<IQ", inner, len(value)) + np.asarray(value, form).tobytes()


def _text(value: str) -> bytes:
    raw = value.encode(errors="replace")  # a folder's name may be no text
    return struct.pack("<Q", len(raw)) + raw
