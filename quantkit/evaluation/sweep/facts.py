"""What is known of a model before its weights are read: who it is, and how it splits a text."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import AnyCheckpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.kv.spec import KVSpec, setting_of
from quantkit.models.architecture import tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import check_loadable
from quantkit.sources.base import ModelSource
from quantkit.support.errors import CheckpointError, SourceError
from quantkit.support.paths import local_path
from quantkit.text.tokenizer import Tokenizer

_BLOCK = 1 << 22


@dataclass(frozen=True)
class ModelFacts:
    """A model that takes part in a comparison.

    Attributes:
        uri, revision: as it was named.
        identity: a hash of all of it: of the manifest, which has every file's hash, or of the files;
            ``None``: it wasn't asked for, or nothing says which bytes it is.
        quantized: whether it is a checkpoint.
        config: its shape.
        kv: the setting that its checkpoint says.
        dtype: of activations, as torch writes it without ``torch.``.
        parameters: of all its tensors.
        recipe: that made it in this comparison; ``None``: it was there.
        tokenizer: of it.
    """

    uri: str
    revision: str | None
    identity: str | None
    quantized: bool
    config: ModelConfig
    kv: KVSpec
    dtype: str
    parameters: int
    tokenizer: Tokenizer = field(compare=False, repr=False)
    recipe: str | None = None

    @property
    def place(self) -> str:
        """Its name as workers in other folders find it."""
        path = local_path(self.uri)
        return str(path.absolute()) if path is not None and path.exists() else self.uri

    @property
    def name(self) -> str:
        """How progress and messages call it."""
        return self.recipe or Path(self.uri).name or self.uri


def facts_of(uri: str, revision: str | None = None, dtype: str = "auto", recipe: str | None = None,
             hashed: bool = True) -> ModelFacts:
    """Look at a model's headers, and hash it.

    Args:
        uri, revision: which.
        dtype: of activations, or ``auto``.
        recipe: that it was made by.
        hashed: whether its identity is wanted, for which all of its files may have to be read.

    Raises:
        QuantkitError: it isn't there, or can't be loaded.
    """
    with closing(open_model(uri, revision)) as opened:
        if isinstance(opened, Checkpoint | ForeignCheckpoint):
            checked = check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                                     dtype=dtype, error=CheckpointError)
        else:
            checked = check_loadable(uri, opened.config(), opened.tensors(), opened.side_files(), dtype=dtype,
                                     error=SourceError)
        kv = setting_of(opened.manifest.recipe) if isinstance(opened, Checkpoint) else KVSpec()
        identity = _identity(opened) if hashed else None
        quantized = isinstance(opened, Checkpoint | ForeignCheckpoint)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(checked.config).values())
    return ModelFacts(uri, revision, identity, quantized, checked.config, kv,
                      str(checked.dtype).removeprefix("torch."), parameters, checked.tokenizer, recipe)


def _identity(opened: ModelSource | AnyCheckpoint) -> str | None:
    if isinstance(opened, Checkpoint):
        return hashlib.sha256(opened.manifest.to_bytes()).hexdigest()
    if isinstance(opened, ForeignCheckpoint):  # another tool's, which records no hashes
        return hash_of(opened.path)
    identity = opened.identity()
    if not identity.files and not identity.pinned:
        return None
    # what has no files is made by its name
    content = dict(identity.files) or {"kind": identity.kind, "uri": identity.uri,
                                       "revision": str(identity.revision)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_of(path: Path) -> str | None:
    """Of a file, or of all files at the top of a folder; ``None`` if nothing is there."""
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:
        if part.is_file():
            digest.update(part.name.encode() + b"\0")
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
    return digest.hexdigest()
