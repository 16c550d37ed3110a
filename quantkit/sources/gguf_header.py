"""Bounds-checks a GGUF file before any other reader sees it.

Counts and lengths in a GGUF header are 64-bit numbers that nothing stops a stranger from
setting; a reader that believes them loops or allocates for ever. Everything is checked against the
file's size here, in one pass. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import SourceError

MAX_TENSORS, MAX_KEYS, MAX_HEADER = 100_000, 100_000, 256 * 2**20
MAX_NAME, MAX_DIMS, MAX_NESTING = 512, 4, 2
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4


def check_gguf(path: Path) -> None:
    """Raise SourceError, naming key or tensor and offset, unless ``path`` is a sound GGUF file."""
    try:
        with path.open("rb") as file:
            _Walk(path, file).header()
    except OSError as error:
        raise SourceError(f"{path} can't be read", why=error.strerror or str(error)) from error


class _Walk:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.where = path, file, "the header"
        self.size = file.seek(0, 2)
        file.seek(0)

    def bad(self, what: str) -> SourceError:
        return SourceError(f"{self.path} is malformed: {self.where}, offset {self.file.tell()}: {what}",
                           why=f"the file has {self.size} bytes", next="download the file again")

    def read(self, count: int) -> bytes:
        if count > self.size - self.file.tell() or self.file.tell() + count > MAX_HEADER:
            raise self.bad(f"{count} bytes are claimed")
        return self.file.read(count)

    def number(self, form: str) -> int:
        value: int = struct.unpack(f"<{form}", self.read(struct.calcsize(form)))[0]
        return value

    def count(self, form: str, limit: int, least: int) -> int:
        """A count of things that take at least ``least`` bytes each."""
        value = self.number(form)
        if value > limit or value * least > self.size:
            raise self.bad(f"a count of {value}")
        return value

    def string(self, limit: int = MAX_HEADER) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.bad(f"a string of {length} bytes")
        return self.read(length).decode("utf-8", "replace")

    def header(self) -> None:
        if self.size < 24 or self.read(4) != b"GGUF":
            raise SourceError(f"{self.path} is not a GGUF file",
                              why="it is empty" if self.size == 0 else "it doesn't begin with GGUF",
                              next="give a .gguf file, or a model's folder")
        if (version := self.number("I")) not in (2, 3):
            raise self.bad(f"version {version} (2 and 3 are read; a big-endian file shows as another)")
        tensors = self.count("Q", MAX_TENSORS, 24)
        alignment = 32
        seen: set[str] = set()
        for _ in range(self.count("Q", MAX_KEYS, 13)):
            self.where = "a metadata key"
            key = self.string(MAX_NAME)
            self.where = f"key {key[:80]!r}"
            if key in seen:
                raise self.bad("it stands twice")
            seen.add(key)
            kind = self.number("I")
            if key == "general.alignment":
                if kind != _UINT32:
                    raise self.bad("it must be a uint32")
                alignment = self.number("I")
                if alignment < 1 or alignment > 2**20 or alignment & (alignment - 1):
                    raise self.bad(f"alignment {alignment}")
            else:
                self.value(kind, 0)
        self.tensors(tensors, alignment)

    def value(self, kind: int, depth: int) -> None:
        if kind in _SIZES:
            self.read(_SIZES[kind])
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY and depth < MAX_NESTING:
            inner = self.number("I")
            if inner in _SIZES:
                self.read(_SIZES[inner] * self.count("Q", self.size, _SIZES[inner]))
            else:
                for _ in range(self.count("Q", self.size, 8)):
                    self.value(inner, depth + 1)
        else:
            raise self.bad(f"value type {kind} at nesting {depth}")

    def tensors(self, count: int, alignment: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        known = {int(t): GGML_QUANT_SIZES[t] for t in GGMLQuantizationType if t in GGML_QUANT_SIZES}
        spans: list[tuple[int, int, str]] = []
        names: set[str] = set()
        for _ in range(count):
            self.where = "a tensor's name"
            name = self.string(MAX_NAME)
            self.where = f"tensor {name[:80]!r}"
            if name in names:
                raise self.bad("it stands twice")
            names.add(name)
            dims = [self.number("Q") for _ in range(self.count("I", MAX_DIMS, 8))]
            kind, offset = self.number("I"), self.number("Q")
            if kind not in known:
                raise self.bad(f"quantization type {kind} is not known")
            block, width = known[kind]
            total = math.prod(dims)
            if not dims or any(d < 1 for d in dims) or total > 2**48 or dims[0] % block:
                raise self.bad(f"shape {dims} of type {kind}")
            if offset % alignment:
                raise self.bad(f"data offset {offset} is not aligned to {alignment}")
            spans.append((offset, offset + total // block * width, name))
        start = -(-self.file.tell() // alignment) * alignment
        end = 0
        for begin, stop, name in sorted(spans):
            self.where = f"tensor {name[:80]!r}"
            if begin < end:
                raise self.bad("its data overlaps another's")
            if start + stop > self.size:
                raise self.bad(f"its data ends at {start + stop}: the file is truncated")
            end = stop
