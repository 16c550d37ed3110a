"""Opens the model or checkpoint that a name means: ours or another tool's, on this machine or on the hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.manifest import MANIFEST
from quantkit.checkpoint.reader import Checkpoint, foreign_method, is_checkpoint
from quantkit.checkpoint.unfinished import is_unfinished, refuse_unfinished
from quantkit.sources.base import (
    ModelSource,
    QuantizedError,
    SourceIdentity,
    outer_of,
    quantized_types,
)
from quantkit.sources.open import open_source
from quantkit.support.errors import SourceError, UsageError
from quantkit.support.paths import local_path, typed_path

AnyCheckpoint = Checkpoint | ForeignCheckpoint


def model_around(opened: ModelSource | AnyCheckpoint) -> str | None:
    """The ``model_type`` of the model of images and text that a text model is a part of, if it is."""
    if isinstance(opened, Checkpoint):
        return None if opened.manifest.outer is None else opened.manifest.outer.model_type
    outer = None if isinstance(opened, ForeignCheckpoint) else outer_of(opened)
    return None if outer is None else str(outer.config["model_type"])


def open_checkpoint(folder: str | Path, identity: SourceIdentity | None = None) -> AnyCheckpoint:
    """The checkpoint in a folder, whoever made it.

    Raises:
        CheckpointError, SourceError: it is unfinished, damaged, or can't be read.
        UsageError: no such path can be.
    """
    path = typed_path(folder)
    refuse_unfinished(path)
    if (path / MANIFEST).is_file() or is_unfinished(path) or foreign_method(path) is None:
        return Checkpoint.open(path)
    return ForeignCheckpoint(path, identity)


def open_quantized(uri: str, revision: str | None = None, recipe: str = "int4") -> AnyCheckpoint:
    """A checkpoint to export.

    Args:
        uri: its folder or name.
        revision: the revision of a name on the hub.
        recipe: the recipe that is advised for a model that isn't quantized.

    Raises:
        UsageError: it isn't quantized.
        QuantkitError: it isn't there or can't be read.
    """
    opened = open_model(uri, revision)
    if isinstance(opened, Checkpoint | ForeignCheckpoint):
        return opened
    types = quantized_types(opened)
    opened.close()
    if types:
        raise UsageError(f"{uri} is a GGUF file with {', '.join(types)}, which can't be exported",
                         why="only a checkpoint of integers and scales has another layout; what is in a GGUF "
                             "file is read as 16-bit numbers",
                         next=f"llama-server -m FILE.gguf takes it as it is; quantkit quantize "
                              f"{shlex.quote(uri)} --recipe {recipe} --out OUT makes a checkpoint of it")
    raise UsageError(f"{uri} is not quantized", why="only a checkpoint can be exported",
                     next=f"quantkit quantize {shlex.quote(uri)} --recipe {recipe} --out OUT")


def open_model(uri: str, revision: str | None = None) -> ModelSource | AnyCheckpoint:
    """A checkpoint, or anything a source takes.

    Raises:
        UsageError: a revision of a checkpoint's folder.
        QuantkitError: it isn't there or can't be read.
    """
    folder = local_path(uri)
    if folder is not None and "/" in uri:  # before anything is asked of the hub
        refuse_unfinished(folder)
    if folder is not None and is_checkpoint(folder):
        if revision is not None:
            raise UsageError(f"--revision {revision} makes no sense for a checkpoint's folder",
                             next="leave it out")
        return open_checkpoint(folder)
    try:
        return open_source(uri, revision)
    except QuantizedError as error:
        return open_checkpoint(error.folder, error.identity)
    except SourceError:
        if folder is not None:  # a package's model may have the name of an unfinished run
            refuse_unfinished(folder)
        raise
