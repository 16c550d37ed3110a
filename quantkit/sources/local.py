"""A Hugging Face model folder on this machine."""

from __future__ import annotations

import copy
import hashlib
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.sources.base import (
    MappedFile,
    ModelSource,
    QuantizedError,
    SourceIdentity,
    SourceKind,
    TensorInfo,
)
from quantkit.sources.safetensors_file import (
    CONVERT,
    INDEX,
    NO_PICKLE,
    PICKLES,
    SINGLE,
    ShardedTensors,
    plain_file,
)
from quantkit.support.errors import SourceError
from quantkit.support.paths import local_path, open_regular, reading
from quantkit.support.strict_json import MAX_CONFIG, read_object

CONFIG, ADAPTER = "config.json", "adapter_config.json"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
              "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
              "chat_template.jinja", "chat_template.json", "processor_config.json",
              "preprocessor_config.json", "video_preprocessor_config.json")
MORE_THAN_WEIGHTS = ("kv_cache_scheme", "transform_config")
"""Of a ``quantization_config``: what counts even if no weight is quantized."""
MAX_SIDE_FILE = 256 * 2**20


class LocalSource:
    """A folder with ``config.json``, safetensors and tokenizer files. Nothing in it is run: an
    ``auto_map`` in its config is data, Python files are not looked at.

    Args:
        folder: the place of the files.
        uri: the name that the user typed.
        identity: kind and revision, when the folder came from elsewhere.
        quantized: take a checkpoint too.

    Raises:
        QuantizedError: it is a checkpoint: its config says so, and its tensors don't say otherwise.
        SourceError: not a model folder, or its files are malformed.
    """

    def __init__(self, folder: Path, uri: str, identity: SourceIdentity | None = None,
                 quantized: bool = False) -> None:
        self.uri, self.folder = uri, folder
        self._identity = identity or SourceIdentity("local", uri)
        _model_folder(folder)
        self._config = read_object(plain_file(folder, CONFIG), MAX_CONFIG, infinities=True)
        if not quantized and (words := _quantization_words(self._config)):
            if not has_leftover_words(folder, self._config):
                raise QuantizedError(folder, self._identity)
            for key in words:
                del self._config[key]
            warnings.warn(f"{folder} holds plain weights: {' and '.join(words)} of its {CONFIG}, by which "
                          "they are quantized, isn't obeyed", stacklevel=2)
        self._tensors = ShardedTensors(folder)

    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors.infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a read-only view of its file. Raises SourceError for an unknown name."""
        return self._tensors.tensor(name)

    def side_files(self) -> Mapping[str, bytes]:
        """The tokenizer's and generation files that are there, unchanged.

        Raises:
            SourceError: one is a link that leaves the folder, unreadable, or absurdly large.
        """
        files: dict[str, bytes] = {}
        for name, path in self._side_paths().items():
            with reading(path, SourceError):
                files[name] = path.read_bytes()
        return files

    def identity(self) -> SourceIdentity:
        """The identity, with the sha256 of the config, the index, every weight file and every side file.

        Raises:
            SourceError: as :meth:`side_files`, and before anything is hashed.
        """
        index = [INDEX] if (self.folder / INDEX).is_file() else []
        paths = {name: plain_file(self.folder, name) for name in (CONFIG, *index, *self._tensors.files)}
        paths |= self._side_paths()
        known = self._identity
        return SourceIdentity(known.kind, known.uri, known.revision,
                              {name: sha256_file(path) for name, path in paths.items()}, known.pinned)

    @property
    def file_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self._tensors.files.values())

    def prefetch(self, names: Iterable[str]) -> None:
        for name in names:
            self._tensors.prefetch(name)

    def release(self) -> None:
        self._tensors.release()

    def mapped_files(self) -> Sequence[MappedFile]:
        return [*self._tensors.files.values()]

    def close(self) -> None:
        self._tensors.close()

    def _side_paths(self) -> dict[str, Path]:
        files = {name: plain_file(self.folder, name) for name in SIDE_FILES if (self.folder / name).exists()}
        for path in files.values():
            if path.stat().st_size > MAX_SIDE_FILE:
                raise SourceError(f"{path} is larger than {MAX_SIDE_FILE:,} bytes",
                                  why="no file of this kind needs to be")
        return files


def has_leftover_words(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` speaks of quantization and no tensor of its folder is quantized: each is of
    plain floats, and none is a scale. Tools that dequantize or merge a model often leave these words."""
    words = [config[key] for key in _quantization_words(config)]
    if not words or any(isinstance(table, dict) and any(table.get(key) for key in MORE_THAN_WEIGHTS)
                        for table in words):
        return False
    try:
        tensors = ShardedTensors(folder)
    except SourceError:  # whoever reads it is told
        return False
    try:
        return all(info.dtype.is_floating_point and info.dtype.itemsize > 1
                   and "scale" not in name.rpartition(".")[2] for name, info in tensors.infos.items())
    finally:
        tensors.close()


def _quantization_words(config: Mapping[str, Any]) -> list[str]:
    return [key for key in ("quantization_config", "quantization") if config.get(key) is not None]


def refuse_adapter(folder: Path) -> None:
    """Raise SourceError for a folder of PEFT's: what it adds to a model, which isn't in it."""
    if not (folder / ADAPTER).is_file() or any((folder / name).exists() for name in (SINGLE, INDEX)):
        return
    base = str(read_object(plain_file(folder, ADAPTER), MAX_CONFIG).get("base_model_name_or_path"))[:200]
    merge = (f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
             ".merge_and_unload().save_pretrained('MERGED')")
    raise SourceError(f"{folder} is an adapter of {base}, not a model",
                      why=f"it has {ADAPTER}, and the weights of that model aren't in it",
                      next=f"merge it, and copy the tokenizer's files too: python -c {shlex.quote(merge)}")


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in pieces. Raises SourceError if it can't be read."""
    with reading(path, SourceError), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_folder(folder: Path) -> None:
    """Raise SourceError unless ``folder`` has a ``config.json``; say what it is instead."""
    if folder.is_file():
        pickle = folder.suffix in PICKLES
        raise SourceError(f"{folder} is a file, not a model's folder", why=NO_PICKLE if pickle else None,
                          next=CONVERT if pickle else f"give its folder: {shlex.quote(str(folder.parent))}")
    if not folder.is_dir():
        raise SourceError(f"{folder} doesn't exist", next="give a model's folder, or its .gguf file")
    with reading(folder, SourceError):
        inside = sorted(path.name for path in folder.iterdir())
    refuse_adapter(folder)
    if CONFIG in inside:
        return
    if not inside:
        raise SourceError(f"{folder} is empty", next="give a model's folder, or its .gguf file")
    gguf = [name for name in inside if name.lower().endswith(".gguf")]
    raise SourceError(f"{folder} is not a model folder",
                      why=f"it has no {CONFIG}, but {', '.join(inside[:5])}",
                      next=f"give the file itself: {shlex.quote(str(folder / gguf[0]))}" if gguf
                      else f"give the folder that holds {CONFIG}")


def _open(uri: str, revision: str | None) -> ModelSource:
    if revision is not None:
        raise SourceError(f"--revision {revision} makes no sense for a local folder, which {uri[:200]} is",
                          next="leave it out; for a model of that name on the hub write hf:owner/name")
    path = local_path(uri)
    if path is None:
        raise SourceError(f"{uri[:200]!r} can't be a path", next="give a model's folder, or its .gguf file")
    return LocalSource(path, uri)


def _matches(uri: str) -> bool:
    path = local_path(uri)
    return (path is not None and path.exists()) or uri.startswith((".", "/", "~"))


KIND = SourceKind(matches=_matches, open=_open, example="a model's folder", order=40)
