"""A model on the Hugging Face hub, downloaded into the hub's own cache and pinned to its commit."""

from __future__ import annotations

import errno
import re
import shlex
import warnings
from pathlib import Path

from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.local import ADAPTER, CONFIG, SIDE_FILES, LocalSource, refuse_adapter
from quantkit.sources.safetensors_file import INDEX, NO_PICKLE
from quantkit.support.errors import SourceError

PREFIX = "hf:"
PATTERNS = [CONFIG, INDEX, "*.safetensors", *SIDE_FILES, "quantkit.json", "quantize_config.json",
            ADAPTER]
"""What is downloaded; the last ones belong to checkpoints and adapters. No pickle and no code is among it."""
NOT_WANTED = ["*/*", "consolidated*"]
"""Folders hold other formats, ``consolidated`` the same weights under other names."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHA = re.compile(r"[0-9a-f]{40}")


def _open(uri: str, revision: str | None) -> ModelSource:
    name = uri.removeprefix(PREFIX)
    folder = _download(name, revision)
    refuse_adapter(folder)
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{name} has no {CONFIG}", why="it is not a model in Hugging Face's layout",
                          next=f"for a .gguf in it: hf download {name} FILE.gguf --local-dir .")
    if not any(folder.glob("*.safetensors")):
        raise SourceError(f"{name} has no safetensors", why=NO_PICKLE,
                          next="look for a copy of the model that has safetensors")
    sha = folder.name if _SHA.fullmatch(folder.name) else None
    if revision != sha or sha is None:
        warnings.warn(f"{name} is not pinned: {revision or 'its main branch'} may be other weights tomorrow"
                      + (f"; for these again: --revision {sha}" if sha else ""), stacklevel=2)
    return LocalSource(folder, uri, SourceIdentity("hub", f"{PREFIX}{name}", sha or revision, {},
                                                   pinned=sha is not None))


def _download(name: str, revision: str | None) -> Path:
    """The snapshot's folder. Raises SourceError for everything that can go wrong on the way."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS,
                                      ignore_patterns=NOT_WANTED))
    except GatedRepoError as error:
        raise SourceError(f"{name} is gated", why="its owner asks for a licence to be accepted",
                          next=f"accept it at https://huggingface.co/{name}, then: hf auth login") from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{name} has no revision {revision!r}",
                          next=f"take one from https://huggingface.co/{name}/commits") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SourceError(f"no model {name!r} on the hub, and no such folder here",
                          why="it is misspelled, private, or a local path that doesn't exist",
                          next="check the name; for a private model: hf auth login") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(f"{name!r} is no folder here, and the hub can't be reached to look there",
                          why=_first_line(error),
                          next="check the path, or the connection") from error
    except Exception as error:  # whichever HTTP library the hub's client uses raises what it likes
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(f"{name} doesn't fit on the disk", why=_first_line(error),
                              next="free some space, or set HF_HOME to a folder on a larger disk") from error
        again = shlex.join(["quantkit", "inspect", name, *(["--revision", revision] if revision else [])])
        raise SourceError(f"the download of {name} failed", why=_first_line(error),
                          next=f"run it again, what is there is kept: {again}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _matches(uri: str) -> bool:
    return _NAME.fullmatch(uri.removeprefix(PREFIX)) is not None


KIND = SourceKind(matches=_matches, open=_open, example="owner/name", order=90)
