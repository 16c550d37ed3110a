"""A model on the Hugging Face hub, downloaded into the hub's own cache and pinned to its commit."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from quantkit.errors import SourceError
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.local import SIDE_FILES, LocalSource

PREFIX = "hf:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHA = re.compile(r"[0-9a-f]{40}")
PATTERNS = ["config.json", "*.safetensors", "model.safetensors.index.json", *SIDE_FILES]
"""What is downloaded. No pickle and no code is among it."""


def _open(uri: str, revision: str | None) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = uri.removeprefix(PREFIX)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS))
    except GatedRepoError as error:
        raise SourceError(f"{name} is gated", why="its owner asks for a licence to be accepted",
                          next=f"accept it at huggingface.co/{name}, then: hf auth login") from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{name} has no revision {revision!r}", next="give a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"no model {name!r} on the hub, and no such folder here",
                          why="it is misspelled, private, or a local path that doesn't exist",
                          next="check the name; for a private model: hf auth login") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise SourceError(f"{name!r} is no folder here, and the hub can't be reached to look there",
                          why=str(error).strip().splitlines()[0][:200],
                          next="check the path or the connection; a downloaded model's folder works offline"
                          ) from error
    sha = folder.name if _SHA.fullmatch(folder.name) else None
    pinned = revision is not None and sha is not None and revision == sha
    if not pinned:
        warnings.warn(f"{name} is not pinned; this is commit {sha}: --revision {sha}", stacklevel=2)
    return LocalSource(folder, uri, SourceIdentity("hub", f"{PREFIX}{name}", sha or revision, {}, sha is not None))


def _matches(uri: str) -> bool:
    return _NAME.fullmatch(uri.removeprefix(PREFIX)) is not None


KIND = SourceKind(matches=_matches, open=_open, example="owner/name", order=90)
