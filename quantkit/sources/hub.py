"""A model on the Hugging Face hub, downloaded into the hub's own cache and pinned to its commit: a folder,
``owner/name``, or of several GGUF files that of a type, ``owner/name:Q4_K_M``."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import ADAPTER, CONFIG, SIDE_FILES, LocalSource, refuse_adapter
from quantkit.sources.safetensors_file import INDEX, NO_PICKLE
from quantkit.support.errors import SourceError

PREFIX = "hf:"
PATTERNS = [CONFIG, INDEX, "*.safetensors", *SIDE_FILES, "quantkit.json", "quantize_config.json",
            ADAPTER]
"""What is downloaded; the last ones belong to checkpoints and adapters. No pickle and no code is among it."""
NOT_WANTED = ["*/*", "consolidated*"]
"""Folders hold other formats, ``consolidated`` the same weights under other names."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
                   r"(:[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_GGUF = re.compile(r"(?P<stem>[^:]+?)(-\d{5}-of-\d{5})?\.gguf")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""GGUF files that hold something else: a projector of images, an importance matrix."""
SHOWN = 12
"""Files that an error lists."""
_SHA = re.compile(r"[0-9a-f]{40}")


def _open(uri: str, revision: str | None) -> ModelSource:
    name, _, kind = uri.removeprefix(PREFIX).partition(":")
    if kind:
        return _open_gguf(uri, name, kind, revision)
    with _explained(uri, revision):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS,
                                        ignore_patterns=NOT_WANTED))
    refuse_adapter(folder)
    if not (folder / CONFIG).is_file():
        raise SourceError(f"{name} has no {CONFIG}", why="it is not a model in Hugging Face's layout",
                          next=f"for a GGUF file in it name its type: quantkit inspect {name}:Q4_K_M")
    if not any(folder.glob("*.safetensors")):
        raise SourceError(f"{name} has no safetensors", why=NO_PICKLE,
                          next="look for a copy of the model that has safetensors; for a GGUF file in it "
                               f"name its type: quantkit inspect {name}:Q4_K_M")
    sha = folder.name if _SHA.fullmatch(folder.name) else None
    return LocalSource(folder, uri, _identity(name, revision, sha))


def _open_gguf(uri: str, name: str, kind: str, revision: str | None) -> ModelSource:
    """The GGUF file of a type, of which there may be parts."""
    with _explained(uri, revision):
        from huggingface_hub import hf_hub_download

        sha, there = _listed(name, revision)
        files = gguf_files(name, kind, there)
        if any("mmproj" in file.lower() for file in there):
            warnings.warn(f"{name} is a model of images and text, of which text alone is read: its mmproj "
                          "file is left out", stacklevel=2)
        # by the revision's name, so that without the hub it is known what that was
        paths = [Path(hf_hub_download(name, file, revision=revision)) for file in files]
        if {path.parents[file.count("/")].name for path, file in zip(paths, files)} != {sha}:
            raise SourceError(f"{name} was changed while it was downloaded", next="run it again")
    return GGUFSource(paths[0], uri, _identity(f"{name}:{kind}", revision, sha))


def _listed(name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit and the files of a repository; where the hub can't be reached, those that are here."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        about = HfApi().model_info(name, revision=revision)
        return about.sha or "main", [file.rfilename for file in about.siblings or ()]
    except HfHubHTTPError:  # the hub answers
        raise
    except Exception as error:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            return folder.name, [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        raise error


def gguf_files(name: str, kind: str, files: Iterable[str]) -> list[str]:
    """Of a repository's files those of the GGUF file of a type, in order: ``…Q4_K_M.gguf``, or its parts.

    Raises:
        SourceError: there is none, or more than one.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if (match := _GGUF.fullmatch(file)) and not _NO_MODEL.search(file.rpartition("/")[2]):
            models.setdefault(match["stem"], []).append(file)
    ends = re.compile(rf"(.*[-._/])?{re.escape(kind)}", re.IGNORECASE)
    matching = [stem for stem in models if ends.fullmatch(stem)]
    if len(matching) == 1:
        return models[matching[0]]
    listed = ", ".join((matching or [*models])[:SHOWN])
    if matching:
        raise SourceError(f"{name} has {len(matching)} GGUF files of type {kind}", why=listed,
                          next=f"write more of the one's name: {name}:{_end(matching)}")
    raise SourceError(f"{name} has no GGUF file of type {kind}", why=f"there are: {listed or 'none'}",
                      next="write the end of one's name behind the colon" if models else
                      "look for a repository whose name ends with GGUF")


def _end(stems: Sequence[str]) -> str:
    """As much of the first one's end as tells it from the others."""
    first, *others = stems
    parts = re.split(r"(?<=[-._/])", first)
    ends = ("".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in ends if not any(other.endswith(end) for other in others)), first)


def _identity(name: str, revision: str | None, sha: str | None) -> SourceIdentity:
    """Which model it is, with a warning if the name may mean another one tomorrow."""
    if revision != sha or sha is None:
        warnings.warn(f"{name} is not pinned: {revision or 'its main branch'} may be other weights tomorrow"
                      + (f"; for these again: --revision {sha}" if sha else ""), stacklevel=3)
    return SourceIdentity("hub", f"{PREFIX}{name}", sha or revision, {}, pinned=sha is not None)


@contextlib.contextmanager
def _explained(uri: str, revision: str | None) -> Iterator[None]:
    """Everything that can go wrong on the way, as a SourceError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = uri.removeprefix(PREFIX).partition(":")[0]
    try:
        yield
    except SourceError:
        raise
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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SourceError(f"{name!r} is no folder here, and the hub can't be reached to look there",
                          why=_first_line(error),
                          next="check the path, or the connection") from error
    except Exception as error:  # whichever HTTP library the hub's client uses raises what it likes
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SourceError(f"{name} doesn't fit on the disk", why=_first_line(error),
                              next="free some space, or set HF_HOME to a folder on a larger disk") from error
        again = shlex.join(["quantkit", "inspect", uri, *(["--revision", revision] if revision else [])])
        raise SourceError(f"the download of {name} failed", why=_first_line(error),
                          next=f"run it again, what is there is kept: {again}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _matches(uri: str) -> bool:
    return _NAME.fullmatch(uri.removeprefix(PREFIX)) is not None


KIND = SourceKind(matches=_matches, open=_open, example="owner/name", order=90)
