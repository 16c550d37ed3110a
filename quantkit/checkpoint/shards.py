"""Writes safetensors files as a stream, so that no shard is ever in memory as a whole.

The layout: eight bytes of header length (little-endian), a JSON header padded with spaces, then the
tensors' bytes without holes. https://github.com/huggingface/safetensors#format

Tensors lie in the order of falling item size, which keeps each aligned to its own dtype, as readers
that map the file need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.sources.base import TensorInfo
from quantkit.sources.safetensors_file import DTYPES
from quantkit.support.errors import CheckpointError
from quantkit.support.strict_json import parse_object

SHARD_BYTES = 5 * 10**9
CHUNK = 2**22
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside a file that this package wrote: ``nbytes`` from ``offset`` on."""

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is written, so that it is alone in memory."""

    info: TensorInfo
    read: Callable[[], torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def tensor(self) -> torch.Tensor:
        """Read it. Raises CheckpointError if it isn't what was announced."""
        tensor = self.read()
        if (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            raise CheckpointError(f"tensor {self.info.name} is {tensor.dtype} {list(tensor.shape)}",
                                  why=f"its source announced {self.dtype} {list(self.shape)}")
        return tensor


def tensor_chunks(tensors: Mapping[str, torch.Tensor | LazyTensor]) -> Iterator[bytes | memoryview]:
    """One safetensors file holding ``tensors``, in pieces. Raises CheckpointError for a dtype it lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}",
                                  why=f"safetensors files hold {', '.join(map(str, _CODES))}")
    names = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    yield _header([(n, _CODES[tensors[n].dtype], tuple(tensors[n].shape),
                    math.prod(tensors[n].shape) * tensors[n].dtype.itemsize) for n in names])
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, LazyTensor):  # a view would keep it in memory while the next one is read
            yield from map(bytes, _pieces(tensor.tensor()))
        else:
            yield from _pieces(tensor)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        yield data[start:start + CHUNK]


def stored_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a file that :func:`tensor_chunks` wrote and whose hash is known to be right."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = parse_object(handle.read(length), f"the header of {file}", error=CheckpointError)
    header.pop("__metadata__", None)
    return [StoredTensor(name, entry["dtype"], tuple(entry["shape"]),
                         entry["data_offsets"][1] - entry["data_offsets"][0], file,
                         8 + length + entry["data_offsets"][0]) for name, entry in header.items()]


def split(tensors: Iterable[StoredTensor], limit: int = SHARD_BYTES) -> list[list[StoredTensor]]:
    """Fill shards of at most ``limit`` bytes in order; a tensor above it has a shard of its own."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def shard_chunks(tensors: Sequence[StoredTensor]) -> Iterator[bytes]:
    """One shard, copied piece by piece from the files that the tensors lie in."""
    ordered = sorted(tensors, key=lambda t: -DTYPES[t.code].itemsize)  # stable: keeps the given order
    yield _header([(t.name, t.code, t.shape, t.nbytes) for t in ordered])
    for tensor in ordered:
        with tensor.file.open("rb") as handle:
            handle.seek(tensor.offset)
            remaining = tensor.nbytes
            while remaining:
                piece = handle.read(min(CHUNK, remaining))
                if not piece:
                    raise CheckpointError(f"{tensor.file} ends inside tensor {tensor.name}",
                                          next=f"rm {tensor.file.with_suffix('.json')}, then run again")
                remaining -= len(piece)
                yield piece


def index_json(shards: Sequence[Sequence[StoredTensor]]) -> bytes:
    """``model.safetensors.index.json``: which shard each tensor lies in."""
    names = shard_names(len(shards))
    where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, sort_keys=True,
                      indent=2).encode() + b"\n"


def _header(entries: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, code, shape, nbytes in entries:
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
