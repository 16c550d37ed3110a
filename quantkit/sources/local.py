"""A Hugging Face model folder on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo
from quantkit.sources.safetensors_file import ShardedTensors, plain_file
from quantkit.sources.strict_json import read_object

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
              "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
              "chat_template.jinja", "chat_template.json")
MAX_CONFIG = 4 * 2**20
MAX_SIDE_FILE = 256 * 2**20


class LocalSource:
    """A folder with ``config.json``, safetensors and tokenizer files.

    Args:
        folder: the folder.
        uri: what the user typed.
        identity: kind and revision, when the folder came from elsewhere.

    Raises:
        SourceError: not a model folder, already quantized, or its files are malformed.
    """

    def __init__(self, folder: Path, uri: str, identity: SourceIdentity | None = None) -> None:
        self.uri, self.folder = uri, folder
        self._identity = identity or SourceIdentity("local", uri)
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder", next="give a model's folder, or its .gguf file")
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
            raise SourceError(f"{folder} is not a model folder", why=f"it has no config.json (but {found})",
                              next="give the folder that holds config.json")
        self._config = read_object(folder / "config.json", MAX_CONFIG)
        if "quantization_config" in self._config:
            raise SourceError(f"{folder} is already quantized", why="quantizing twice only adds error",
                              next=f"quantkit inspect {uri}")
        self._tensors = ShardedTensors(folder)

    def config(self) -> dict[str, Any]:
        """A copy of ``config.json``."""
        return dict(self._config)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self._tensors.infos

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a view of its file."""
        return self._tensors.tensor(name)

    def side_files(self) -> Mapping[str, bytes]:
        """The tokenizer's and generation files that are there."""
        found: dict[str, bytes] = {}
        for name in SIDE_FILES:
            if (self.folder / name).exists():
                path = plain_file(self.folder, name)
                if path.stat().st_size > MAX_SIDE_FILE:
                    raise SourceError(f"{path} is larger than {MAX_SIDE_FILE} bytes")
                found[name] = path.read_bytes()
        return found

    def identity(self) -> SourceIdentity:
        """With the sha256 of the config, every weight file and every side file."""
        names = ["config.json", *self._tensors.files, *self.side_files()]
        known = self._identity
        return SourceIdentity(known.kind, known.uri, known.revision,
                              {name: sha256_file(self.folder / name) for name in names}, known.pinned)

    def close(self) -> None:
        """Close the weight files."""
        self._tensors.close()


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(uri: str, revision: str | None) -> ModelSource:
    if revision is not None:
        raise SourceError(f"--revision {revision} makes no sense for a local folder",
                          next=f"leave it out: quantkit inspect {uri}")
    return LocalSource(Path(uri).expanduser(), uri)


def _matches(uri: str) -> bool:
    path = Path(uri).expanduser()
    return path.exists() or uri.startswith((".", "/", "~"))


KIND = SourceKind(matches=_matches, open=_open, example="a model's folder", order=40)
