"""Reads the header of a GGUF file, and checks every count, size and offset in it.

Counts and lengths in a GGUF header are 64-bit numbers that nothing stops a stranger from setting; a
reader that believes them loops or allocates for ever. Here each is checked against the file's size
and a cap before it is used. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.support.errors import SourceError
from quantkit.support.paths import FileState, file_state, reading

MAX_HEADER = 128 * 2**20
MAX_TENSORS = 100_000
MAX_KEYS = 10_000
MAX_VALUES = 4_000_000
"""Elements of all arrays together; a tokenizer of 262,144 tokens with its merges has 1.3 million."""
MAX_NAME = 512
MAX_DIMS = 4
MAX_NESTING = 2
MAX_SIZE = 2**48
_FORMS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
          12: "<f8"}
_LENGTH = struct.Struct("<Q")
_UINT32 = 4
_BOOL = 7
_STRING = 8
_ARRAY = 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        name: the name that GGUF has for it.
        shape: outermost dimension first, as torch has it.
        type: a value of ``gguf.GGMLQuantizationType``.
        offset: the place of its first byte, from the start of the file.
        nbytes: the bytes that it takes there.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key (numbers, strings, lists of them) and tensors by GGUF's name; ``opened`` is the
    :func:`file_state` of the file that they were read of."""

    opened: FileState
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> tuple[GGUFHeader, mmap.mmap]:
    """Map a GGUF file and read its header, in time and memory bounded by the constants above.

    Raises:
        SourceError: unreadable, not GGUF, truncated, malformed or hostile; key or tensor and the
            offset are named.
    """
    with reading(path, SourceError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if file.read(4) != b"GGUF":
            raise _not_gguf(path, size)
        opened = file_state(os.fstat(file.fileno()))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Reader(str(path), data, size).header(opened), data


def _not_gguf(path: Path, size: int) -> SourceError:
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    if pointer:
        return SourceError(f"{path} is a Git LFS pointer, not the weights",
                           why="the repository was cloned without its large files", next="git lfs pull")
    return SourceError(f"{path} is not a GGUF file", next="give a .gguf file, or a model's folder",
                       why="it is empty" if size == 0 else "it doesn't begin with GGUF")


class _Reader:
    """A position in the file, and where that is in words."""

    def __init__(self, name: str, data: mmap.mmap, size: int) -> None:
        self.name = name
        self.data = data
        self.size = size
        self.at = 0
        self.where = "the header"
        self.values = 0

    def bad(self, what: str) -> SourceError:
        return SourceError(f"{self.name} is malformed: {self.where}, offset {self.at}: {what}",
                           why=f"the file has {self.size:,} bytes", next="download the file again")

    def take(self, count: int) -> int:
        """Claim ``count`` bytes; returns the offset of the first."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.bad(f"{count} bytes are claimed: the file is truncated, or lies")
        if end > MAX_HEADER:
            raise self.bad(f"the header is larger than {MAX_HEADER:,} bytes")
        self.at = end
        return start

    def number(self, form: str) -> int:
        value: int = struct.unpack_from(f"<{form}", self.data, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, form: str, limit: int, least: int) -> int:
        """A count of things that take at least ``least`` bytes each."""
        value = self.number(form)
        if value > limit or value * least > self.size - self.at:
            raise self.bad(f"a count of {value}")
        return value

    def string(self, limit: int = MAX_HEADER) -> bytes:
        length = self.number("Q")
        if length > limit:
            raise self.bad(f"a string of {length} bytes")
        start = self.take(length)
        return self.data[start:start + length]

    def strings(self, count: int) -> list[str]:
        """Texts one after another, as :meth:`string` reads each: a vocabulary has a hundred thousand."""
        data = self.data
        end = min(self.size, MAX_HEADER)
        length = _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            start = self.at + _LENGTH.size
            if start > end or (stop := start + length(data, self.at)[0]) > end:
                self.string()  # raises, and says what is wrong
            texts.append(data[start:stop].decode("utf-8", "replace"))
            self.at = stop
        return texts

    def identifier(self) -> str:
        try:
            return self.string(MAX_NAME).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("a name that is not UTF-8") from None

    def header(self, opened: FileState) -> GGUFHeader:
        self.take(4)
        if (version := self.number("I")) not in (2, 3):
            raise self.bad(f"version {version} (2 and 3 are read; a big-endian file shows as another)")
        tensors = self.count("Q", MAX_TENSORS, 24)
        metadata: dict[str, Any] = {}
        for _ in range(self.count("Q", MAX_KEYS, 13)):
            self.where = "a metadata key"
            key = self.identifier()
            self.where = f"key {key[:80]!r}"
            if key in metadata:
                raise self.bad("it stands twice")
            kind = self.number("I")
            if key == _ALIGNMENT and kind != _UINT32:
                raise self.bad("it must be a uint32")
            metadata[key] = self.value(kind, 0)
        alignment = metadata.get(_ALIGNMENT, 32)
        if not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.bad(f"an alignment of {alignment}")
        return GGUFHeader(opened, version, metadata, self.tensors(tensors, alignment))

    def value(self, kind: int, depth: int) -> Any:
        if kind in _FORMS:
            return self.numbers(kind, 1)[0]
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        if kind != _ARRAY or depth >= MAX_NESTING:
            raise self.bad(f"value type {kind} at nesting {depth}")
        inner = self.number("I")
        count = self.count("Q", MAX_VALUES, np.dtype(_FORMS[inner]).itemsize if inner in _FORMS else 8)
        self.values += count
        if self.values > MAX_VALUES:
            raise self.bad(f"its arrays hold more than {MAX_VALUES:,} values")
        if inner in _FORMS:
            return self.numbers(inner, count)
        return self.strings(count) if inner == _STRING and depth < MAX_NESTING else [
            self.value(inner, depth + 1) for _ in range(count)]

    def numbers(self, kind: int, count: int) -> list[Any]:
        form = np.dtype("u1" if kind == _BOOL else _FORMS[kind])  # a bool may hold any byte
        start = self.take(form.itemsize * count)
        values = np.frombuffer(self.data[start:self.at], form)
        return [bool(v) for v in values] if kind == _BOOL else values.tolist()

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(count):
            self.where = "a tensor's name"
            name = self.identifier()
            self.where = f"tensor {name[:80]!r}"
            if name in tensors:
                raise self.bad("it stands twice")
            dims = [self.number("Q") for _ in range(self.count("I", MAX_DIMS, 8))]
            kind, offset = self.number("I"), self.number("Q")
            if kind not in sizes:
                raise self.bad(f"quantization type {kind} is not known")
            block, width = sizes[kind]
            total = math.prod(dims)
            if not dims or total < 1 or total > MAX_SIZE or dims[0] % block:
                raise self.bad(f"shape {dims} of type {kind}, whose blocks have {block} values")
            if offset % alignment or offset > MAX_SIZE:
                raise self.bad(f"data offset {offset} is not aligned to {alignment}, or absurd")
            tensors[name] = GGUFTensor(name, tuple(reversed(dims)), kind, offset, total // block * width)
        return self.placed(tensors, -(-self.at // alignment) * alignment)

    def placed(self, tensors: dict[str, GGUFTensor], start: int) -> dict[str, GGUFTensor]:
        """The same with offsets from the file's start; none overlaps another or the file's end."""
        end = start
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            self.where, self.at = f"tensor {tensor.name[:80]!r}", start + tensor.offset
            if self.at < end:
                raise self.bad("its data overlaps another's")
            end = self.at + tensor.nbytes
            if end > self.size:
                raise self.bad(f"its data ends at {end}: the file is truncated")
        return {t.name: GGUFTensor(t.name, t.shape, t.type, start + t.offset, t.nbytes)
                for t in tensors.values()}
