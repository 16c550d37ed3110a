"""A ``.gguf`` file as a Hugging Face model: names, shapes and RoPE layout of Hugging Face, bfloat16.

GGUF keeps the Q and K rows of Llama models interleaved for its own RoPE; they are put back to the
rotate-half order that ``config.json`` means. What else differs between families is in
:mod:`~quantkit.sources.gguf_families`.
"""

from __future__ import annotations

import copy
import math
import mmap
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.errors import SourceError
from quantkit.paths import local_path
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo
from quantkit.sources.gguf_config import family_of, hf_config
from quantkit.sources.gguf_header import GGUFTensor, open_gguf
from quantkit.sources.gguf_metadata import HF_FOLDER
from quantkit.sources.gguf_tokenizer import tokenizer_files
from quantkit.sources.local import sha256_file

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_ROPE_FREQS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.(weight|bias)")
_PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_CHUNK = 2**20
"""Values dequantized at once: 4 MiB as float32, which stay in the cache, whatever the tensor's size."""
_JOINED = 2**14
"""Values of neighboring rows that are dequantized as one row, at most."""


class GGUFSource:
    """One GGUF file; tensors are dequantized one at a time, straight from a memory map.

    Raises:
        SourceError: malformed, of an unknown architecture, one part of a split model, or with a
            tensor that has no place in it or no known dequantization.
    """

    def __init__(self, path: Path, uri: str, identity: SourceIdentity | None = None) -> None:
        self.path, self.uri = path, uri
        self._identity = identity or SourceIdentity("gguf", uri)
        header, data = open_gguf(path)
        self._map: mmap.mmap | None = data
        self._metadata = header.metadata
        parts = self._metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise SourceError(f"{path} is one of {parts} parts of a model",
                              next=f"llama-gguf-split --merge {path} MERGED.gguf")
        self._family = family_of(self._metadata, str(path))
        self._raw = {self._hf_name(name): tensor for name, tensor in header.tensors.items()
                     if name != _ROPE_FREQS}
        self._check_types(header.tensors)
        factors = header.tensors.get(_ROPE_FREQS)
        self._infos = {name: TensorInfo(name, t.shape, torch.bfloat16) for name, t in self._raw.items()}
        table = None if factors is None else self._dequantize(factors).float().numpy()
        shapes = {name: info.shape for name, info in self._infos.items()}
        self._config = hf_config(self._metadata, shapes, table, str(path))
        self._heads = {name: heads for name in self._infos if (heads := self._permuted_heads(name))}

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that the metadata means."""
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, as bfloat16."""
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, dequantized and rounded to bfloat16, in memory of its own.

        Raises:
            SourceError: the name is unknown, or the source is closed.
        """
        if name not in self._raw:
            raise SourceError(f"{self.path} has no tensor for {name[:120]!r}")
        values = self._dequantize(self._raw[name])
        if self._family.norm_offset and name.endswith("norm.weight"):
            values = values.float() - self._family.norm_offset
        values = values.to(torch.bfloat16)
        if heads := self._heads.get(name):
            half = values.shape[0] // heads // 2
            values = values.reshape(heads, half, 2, -1).transpose(1, 2).reshape(values.shape)
        return values

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer and chat template, made from the metadata."""
        return self._side_files

    def identity(self) -> SourceIdentity:
        """The identity, with the file's sha256."""
        known = self._identity
        return SourceIdentity(known.kind, known.uri, known.revision,
                              {self.path.name: sha256_file(self.path)}, known.pinned)

    def release(self) -> None:
        """What was read of the file needn't stay in memory."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the memory map."""
        self._map = None

    @cached_property
    def _side_files(self) -> dict[str, bytes]:
        tokenizer = {k: v for k, v in self._metadata.items() if k.startswith("tokenizer.")}
        return tokenizer_files(tokenizer, str(self.path), self._config["vocab_size"])

    def _hf_name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        match = _BLOCK.fullmatch(name)
        if match and (place := self._family.tensors.get(match[2])):
            return f"model.layers.{match[1]}.{place}.{match[3]}"
        architecture = str(self._metadata.get("general.architecture"))[:40]
        raise SourceError(f"{self.path} has a tensor {name[:80]!r}",
                          why=f"no place for it is known in {architecture!r} models", next=HF_FOLDER)

    def _check_types(self, tensors: Mapping[str, GGUFTensor]) -> None:
        """Every type is dequantized once, one block of it, before any work begins."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        for kind, name in {tensor.type: name for name, tensor in tensors.items()}.items():
            known = GGMLQuantizationType(kind)
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
            except NotImplementedError:
                raise SourceError(f"{self.path} stores {name!r} as {known.name}",
                                  why="it can't be dequantized here", next=HF_FOLDER) from None

    def _permuted_heads(self, name: str) -> int | None:
        """Heads by which a tensor's rows are interleaved; ``None`` if they aren't."""
        part = name.split(".")[-2]
        if not self._family.interleaved or part not in _PERMUTED:
            return None
        heads, dim = int(self._config[_PERMUTED[part]]), int(self._config["head_dim"])
        rows = self._infos[name].shape[0]
        if rows != heads * dim or dim % 2:
            raise SourceError(f"{self.path}: {name!r} has {rows} rows, not {heads} heads of {dim}",
                              why="the metadata and the tensors disagree", next="use another conversion")
        return heads

    def _dequantize(self, tensor: GGUFTensor) -> torch.Tensor:
        """Values of one tensor: float32 if small, else rounded to bfloat16 piece by piece."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        if self._map is None:
            raise SourceError(f"{self.path} is closed", why=f"{tensor.name!r} was asked for afterwards")
        rows, cols = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).reshape(rows, -1)
        kind, step = GGMLQuantizationType(tensor.type), max(1, _CHUNK // cols)
        # the library takes 16 rows at a time; short ones would cost it a thousand calls a tensor
        joined = math.gcd(rows, 1 << (_JOINED // cols).bit_length() >> 1) or 1
        raw, step = raw.reshape(rows // joined, -1), max(1, step // joined)
        if len(raw) <= step:
            return torch.from_numpy(_owned(dequantize(raw, kind))).reshape(tensor.shape)
        values = torch.empty(len(raw), joined * cols, dtype=torch.bfloat16)
        for begin in range(0, len(raw), step):
            values[begin:begin + step] = torch.from_numpy(_owned(dequantize(raw[begin:begin + step], kind)))
        return values.reshape(tensor.shape)


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
