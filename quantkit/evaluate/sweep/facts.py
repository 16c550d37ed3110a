"""What is known of a model before its weights are read: who it is, and how it splits a text."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, SourceError
from quantkit.models.loadable import check_loadable
from quantkit.spec import KVSpec
from quantkit.text.tokenizer import Tokenizer

_BLOCK = 1 << 22


@dataclass(frozen=True)
class ModelFacts:
    """A model that takes part in a comparison.

    Attributes:
        uri, revision: as it was named.
        identity: a hash of all of it: of the manifest, which has every file's hash, or of the files.
        kv: the setting that its checkpoint says.
        dtype: of activations, as torch writes it without ``torch.``.
        context: tokens that it was made for.
        vocab: tokens that it knows.
        parameters: of all its tensors.
        recipe: that made it in this comparison; ``None``: it was there.
        tokenizer: of it.
    """

    uri: str
    revision: str | None
    identity: str
    kv: KVSpec
    dtype: str
    context: int
    vocab: int
    parameters: int
    recipe: str | None = None
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """How progress and messages call it."""
        return self.recipe or Path(self.uri).name or self.uri


def facts_of(uri: str, revision: str | None = None, dtype: str = "auto",
             recipe: str | None = None) -> ModelFacts:
    """Look at a model's headers and hash it.

    Args:
        uri, revision: which.
        dtype: of activations, or ``auto``.
        recipe: that it was made by.

    Raises:
        QuantkitError: it isn't there, or can't be loaded.
    """
    from quantkit.models.architecture import tensor_shapes

    with closing(open_model(uri, revision)) as opened:
        if isinstance(opened, Checkpoint | ForeignCheckpoint):
            checked = check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                                     dtype=dtype, error=CheckpointError)
        else:
            checked = check_loadable(uri, opened.config(), opened.tensors(), opened.side_files(), dtype=dtype,
                                     error=SourceError)
        kv = KVSpec()
        if isinstance(opened, Checkpoint):
            identity, kv = hashlib.sha256(opened.manifest.to_bytes()).hexdigest(), opened.manifest.kv
        elif isinstance(opened, ForeignCheckpoint):
            # another tool's, which records no hashes
            identity = str(hash_of(opened.path))
        else:
            files = asdict(opened.identity())["files"]
            identity = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    config = checked.config
    sizes = 0
    for shape in tensor_shapes(config).values():
        size = 1
        for length in shape:
            size *= length
        sizes += size
    return ModelFacts(uri, revision, identity, kv, str(checked.dtype).removeprefix("torch."),
                      config.max_position_embeddings, config.vocab_size, sizes, recipe, checked.tokenizer)


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
