"""A ``.gguf`` file as a Hugging Face model: names, shapes and RoPE layout of Hugging Face, bfloat16.

As a source its tensors are bfloat16. It is run by the file's own blocks (:meth:`GGUFSource.quantized`).
GGUF keeps the Q and K rows of Llama models interleaved for its own RoPE; they are put back to the
rotate-half order that ``config.json`` means. It keeps all experts of a layer in one tensor; here each is
another. What else differs between families is in :mod:`~quantkit.sources.gguf_families`.
"""

from __future__ import annotations

import copy
import hashlib
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quantkit.formats.base import QuantizedTensor
from quantkit.formats.gguf_blocks import FORMATS
from quantkit.sources.base import (
    ModelSource,
    SourceIdentity,
    SourceKind,
    TensorInfo,
    TensorStorage,
    check_finite,
)
from quantkit.sources.gguf_config import hf_config
from quantkit.sources.gguf_families import BARE, EXPERT, HF_FOLDER, ROPE_TABLES, TOP, family_of
from quantkit.sources.gguf_header import GGUFTensor
from quantkit.sources.gguf_shards import GGUFShard, open_shards
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.sources.local import sha256_file
from quantkit.support.errors import SourceError
from quantkit.support.paths import local_path

_TOP = re.compile(r"([a-z_]+)\.(weight)")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)")
_MAX_EXPERTS = 300_000
"""Tensors of single experts; more is a malformed file, not a model."""
_MAX_TABLE = 2**16
"""Bytes of a RoPE's table."""
_CHUNK = 2**20
"""Values dequantized at once: 4 MiB as float32, which stay in the cache, whatever the tensor's size."""
_JOINED = 2**14
"""Values of neighboring rows that are dequantized as one row, at most."""


class _Place(NamedTuple):
    """Where a tensor's values are: in which file, in which of GGUF's tensors, and of which part of it."""

    shard: GGUFShard
    tensor: GGUFTensor
    part: str
    """Of a layer's tensor: GGUF's name for it, without the layer."""


class GGUFSource:
    """One GGUF file, or one of a model's and those beside it; tensors are dequantized one at a time, straight
    from a memory map.

    Attributes:
        file_bytes: the bytes of all its files, as they are.

    Raises:
        SourceError: malformed, of an unknown architecture, not all files of a split model, or with a
            tensor that has no place in it or no known dequantization.
    """

    def __init__(self, path: Path, uri: str, identity: SourceIdentity | None = None) -> None:
        from gguf.constants import GGMLQuantizationType

        self.path, self.uri = path, uri
        self._identity = identity or SourceIdentity("gguf", uri)
        self._metadata, self._shards = open_shards(path)
        self._files = [shard.path for shard in self._shards]
        self._closed = False
        self._family = family_of(self._metadata, str(path))
        self._places = dict(self._all_places())
        self._check_types()
        self._infos = {name: TensorInfo(name, place.tensor.shape, torch.bfloat16)
                       for name, place in self._places.items()}
        self._stored = {name: TensorStorage(GGMLQuantizationType(place.tensor.type).name, place.tensor.nbytes)
                        for name, place in self._places.items()}
        self.file_bytes = sum(len(shard.data) for shard in self._shards)
        shapes = {name: info.shape for name, info in self._infos.items()}
        self._config = hf_config(self._metadata, shapes, self._rope_tables(), str(path))
        self._heads = {name: heads for name, place in self._places.items()
                       if (heads := self._permuted_heads(name, place.part))}

    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def stored(self) -> Mapping[str, TensorStorage]:
        """GGUF's type of every tensor and its bytes in the file, by its Hugging Face name."""
        return self._stored

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, dequantized and rounded to bfloat16, in memory of its own.

        Raises:
            SourceError: the name is unknown, the source is closed, or a value is NaN or infinite.
        """
        place = self._place(name)
        values = self._dequantize(place)
        if self._family.norm_offset and name.endswith("norm.weight"):
            values = values.float() - self._family.norm_offset
        values = values.to(torch.bfloat16)
        check_finite(values, place.tensor.name, place.shard.path)
        return self._in_order(name, values)

    def quantized(self, layer: str) -> QuantizedTensor:
        """The weight of a layer whose type is one of :data:`~quantkit.formats.gguf_blocks.FORMATS`, in its
        file's own blocks, in memory of its own.

        Raises:
            SourceError: the source is closed, the file isn't the one that was opened, or a scale is NaN or
                infinite.
        """
        name = f"{layer}.weight"
        place = self._place(name)
        form, (rows, columns) = FORMATS[self._stored[name].type], place.tensor.shape
        blocks = torch.empty(rows, place.tensor.nbytes // rows, dtype=torch.uint8)
        place.shard.read(place.tensor.offset, blocks.numpy().reshape(-1).data)
        weight = QuantizedTensor(form.name, form.spec, (rows, columns), torch.bfloat16,
                                 {"blocks": self._in_order(name, blocks)})
        if not form.is_finite(weight):
            raise SourceError(f"{place.shard.path}: {place.tensor.name!r} has a scale that is not finite",
                              why="the model can't answer anything", next="download the file again")
        return weight

    def fingerprint(self) -> str:
        """A hash of what can be told of the files without reading their weights: sizes, times, headers.

        Raises:
            SourceError: a file isn't the one that was opened.
        """
        digest = hashlib.sha256()
        for shard in self._shards:
            shard.check_unchanged()
            start = min((tensor.offset for tensor in shard.tensors.values()), default=0)
            digest.update(repr((shard.path.name, shard.opened)).encode() + shard.data[:start])
        return digest.hexdigest()

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer and chat template, made from the metadata."""
        return self._side_files

    def identity(self) -> SourceIdentity:
        """The identity, with the sha256 of each file."""
        known = self._identity
        hashes = {file.name: sha256_file(file) for file in self._files}
        return SourceIdentity(known.kind, known.uri, known.revision, hashes, known.pinned)

    def release(self) -> None:
        if not self._closed and hasattr(mmap, "MADV_DONTNEED"):
            for shard in self._shards:
                shard.data.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._closed = True
        self._places.clear()
        self._shards.clear()

    @cached_property
    def _side_files(self) -> dict[str, bytes]:
        tokenizer = {key: value for key, value in self._metadata.items()
                     if key.startswith("tokenizer.") or key == "general.name"}
        return tokenizer_files(tokenizer, str(self.path), self._config["vocab_size"])

    def _all_places(self) -> Iterator[tuple[str, _Place]]:
        """Every tensor by its Hugging Face name."""
        experts = 0
        for shard in self._shards:
            for tensor in shard.tensors.values():
                if tensor.name in ROPE_TABLES:
                    continue
                name, part = self._hf_name(tensor.name)
                if EXPERT not in name:
                    yield name, _Place(shard, tensor, part)
                    continue
                experts += tensor.shape[0]
                self._check_experts(tensor, experts)
                for number, expert in enumerate(_slices(tensor)):
                    yield name.replace(EXPERT, str(number)), _Place(shard, expert, part)

    def _hf_name(self, name: str) -> tuple[str, str]:
        """Hugging Face's name, with :data:`EXPERT` in it for a tensor of experts, and GGUF's in a layer."""
        if (match := _TOP.fullmatch(name)) and match[1] in TOP:
            return f"{TOP[match[1]]}.{match[2]}", ""
        match = _BLOCK.fullmatch(name)
        if match and (place := self._family.tensors.get(match[2])):
            if place not in BARE:
                return f"model.layers.{match[1]}.{place}.{match[3]}", match[2]
            if match[3] == "weight":
                return f"model.layers.{match[1]}.{place}", match[2]
        raise SourceError(f"{self.path} has a tensor {name[:80]!r}", next=HF_FOLDER,
                          why=f"no place for it is known in a {self._family.model_type} model")

    def _check_experts(self, tensor: GGUFTensor, total: int) -> None:
        count = self._metadata.get(f"{self._family.architecture}.expert_count")
        bias = tensor.name.endswith(".bias")
        if len(tensor.shape) != (2 if bias else 3) or tensor.shape[0] != count or total > _MAX_EXPERTS:
            raise SourceError(f"{self.path}: {tensor.name[:80]!r} has shape {list(tensor.shape)}",
                              why=f"a {'row' if bias else 'matrix'} for each of {str(count)[:40]} experts is "
                                  f"needed, and {_MAX_EXPERTS:,} are allowed in all",
                              next="use another conversion")

    def _rope_tables(self) -> dict[str, np.ndarray]:
        tables = {}
        for shard in self._shards:
            for name in ROPE_TABLES:
                if (tensor := shard.tensors.get(name)) is None:
                    continue
                if tensor.nbytes > _MAX_TABLE or len(tensor.shape) > 1:
                    raise SourceError(f"{self.path} has a {name} of shape {list(tensor.shape)}",
                                      why="a number for each frequency is needed", next=HF_FOLDER)
                tables[name] = self._dequantize(_Place(shard, tensor, "")).float().numpy()
        return tables

    def _check_types(self) -> None:
        """Every type is dequantized once, one block of it, before any work begins."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kinds = {tensor.type: tensor.name for shard in self._shards for tensor in shard.tensors.values()}
        for kind, name in kinds.items():
            known = GGMLQuantizationType(kind)
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
            except NotImplementedError:
                raise SourceError(f"{self.path} stores {name!r} as {known.name}",
                                  why="it can't be dequantized here", next=HF_FOLDER) from None

    def _permuted_heads(self, name: str, part: str) -> int | None:
        """Heads by which a tensor's rows are interleaved; ``None`` if they aren't."""
        if part not in self._family.permuted:
            return None
        heads, dim = int(self._config[self._family.permuted[part]]), int(self._config["head_dim"])
        rows = self._infos[name].shape[0]
        if rows != heads * dim or dim % 2:
            raise SourceError(f"{self.path}: {name!r} has {rows} rows, not {heads} heads of {dim}",
                              why="the metadata and the tensors disagree", next="use another conversion")
        return heads

    def _place(self, name: str) -> _Place:
        if name not in self._infos:
            raise SourceError(f"{self.path} has no tensor for {name[:120]!r}")
        if self._closed:
            raise SourceError(f"{self.path} is closed", why=f"{name!r} was asked for afterwards")
        return self._places[name]

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor, or of its blocks, in the order that Hugging Face's has."""
        if (heads := self._heads.get(name)) is None:
            return rows
        half = rows.shape[0] // heads // 2
        return rows.reshape(heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)

    def _raw(self, place: _Place) -> np.ndarray:
        """The bytes of a tensor's rows, as they lie in the file."""
        tensor = place.tensor
        return np.frombuffer(place.shard.data, np.uint8, tensor.nbytes, tensor.offset).reshape(
            math.prod(tensor.shape[:-1]), -1)

    def _dequantize(self, place: _Place) -> torch.Tensor:
        """Values of one tensor: float32 if small, else rounded to bfloat16 piece by piece."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = place.tensor
        rows, cols = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
        raw, kind = self._raw(place), GGMLQuantizationType(tensor.type)
        step = max(1, _CHUNK // cols)
        # the library takes 16 rows at a time; short ones would cost it a thousand calls a tensor
        joined = math.gcd(rows, 1 << (_JOINED // cols).bit_length() >> 1) or 1
        raw, step = raw.reshape(rows // joined, -1), max(1, step // joined)
        if len(raw) <= step:
            return torch.from_numpy(_owned(dequantize(raw, kind))).reshape(tensor.shape)
        values = torch.empty(len(raw), joined * cols, dtype=torch.bfloat16)
        for begin in range(0, len(raw), step):
            values[begin:begin + step] = torch.from_numpy(_owned(dequantize(raw[begin:begin + step], kind)))
        return values.reshape(tensor.shape)


def _slices(tensor: GGUFTensor) -> Iterator[GGUFTensor]:
    """The parts of a tensor along its outermost dimension, which lie one after another."""
    count, nbytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    for number in range(count):
        yield GGUFTensor(tensor.name, tensor.shape[1:], tensor.type, tensor.offset + number * nbytes, nbytes)


def _owned(values: np.ndarray) -> np.ndarray:
    """Float32 in memory of its own: for plain types the library returns a view of the file."""
    return np.require(values, np.float32, ["C", "A", "W"])


def _open(uri: str, revision: str | None) -> ModelSource:
    if revision is not None:
        raise SourceError(f"--revision {revision} makes no sense for a file", next="leave it out")
    path = local_path(uri)
    if path is None or not path.is_file():
        exists = path is not None and path.exists()
        raise SourceError(f"{uri[:200]} is not a file" if exists else f"{uri[:200]} doesn't exist",
                          next="give a .gguf file, or a model's folder")
    return GGUFSource(path, uri)


KIND = SourceKind(matches=lambda uri: uri.lower().endswith(".gguf") and not uri.startswith("pkg:"),
                  open=_open, example="model.gguf", order=30)
