"""Files of a data set on the Hugging Face hub, pinned to a commit and read as data; no code of it is run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from quantkit.quantization.calibration.files import PARQUET, ROWS, DataFile
from quantkit.quantization.calibration.parquet import GET_PYARROW, has_pyarrow
from quantkit.support.errors import CalibrationError, did_you_mean
from quantkit.support.progress import Listener, ProgressEvent, silent

PREFIX = "hub:"
EXAMPLE = "hub:OWNER/NAME[@REVISION][:SPLIT][:FILE]"
SPLIT = "train"
SUFFIXES = (PARQUET, *ROWS, ".txt")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_FORM = re.compile(rf"hub:(?P<repo>{_PART}/{_PART})(@(?P<revision>[^:]+))?(?P<rest>(:[^:]+){{0,2}})")
_SHA = re.compile(r"[0-9a-f]{40}")
_SHOWN = 8
CONVERTED = "refs/convert/parquet"
"""Where the hub itself puts parquet files of what comes in other forms."""


@dataclass(frozen=True)
class DatasetName:
    """``hub:OWNER/NAME[@REVISION][:SPLIT][:FILE]``, taken apart."""

    repo: str
    revision: str | None = None
    split: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Raises CalibrationError for another form."""
        match = _FORM.fullmatch(text)
        rest = match["rest"].split(":")[1:] if match else []
        # one part is a file if it looks like one
        if len(rest) == 1:
            rest = [None, rest[0]] if PurePosixPath(rest[0]).suffix in SUFFIXES else [rest[0], None]
        split, file = rest or [None, None]
        if match is None or (file is not None and not _is_inside(file)):
            raise CalibrationError(f"{text[:200]!r} names no data set", next=EXAMPLE)
        return cls(match["repo"], match["revision"], split, file)

    def named(self, revision: str | None) -> str:
        """The name of a revision, as :meth:`parse` reads it."""
        at = f"@{revision}" if revision else ""
        return ":".join(filter(None, (f"{PREFIX}{self.repo}{at}", self.split, self.file)))


def dataset_files(text: str, limit: int, listen: Listener = silent) -> list[DataFile]:
    """Download what ``text`` names: that file, or of the split as many files as ``limit`` bytes need.

    Args:
        text: ``hub:OWNER/NAME[@REVISION][:SPLIT][:FILE]``; the split ``train`` if none is named.
        limit: bytes after which no further file of a split is wanted.
        listen: told of each file.

    Raises:
        CalibrationError: it isn't there, can't be reached, or it isn't clear which file is meant.
    """
    from huggingface_hub import hf_hub_download

    name = DatasetName.parse(text)
    if name.file and name.revision and _SHA.fullmatch(name.revision):
        chosen, commit = [name.file], name.revision  # all is known: the hub needn't be asked
    else:
        sizes, commit = _listing(name)
        chosen = _choose(name, sizes, limit)
        if commit != name.revision:
            branch = name.revision or "its main branch"
            warnings.warn(f"{PREFIX}{name.repo} is not pinned: {branch} may be other data tomorrow; "
                          f"for these again: {name.named(commit)}", stacklevel=2)
    files = []
    for done, file in enumerate(chosen):
        listen(ProgressEvent(done, len(chosen), f"downloading {file}"))
        try:
            path = Path(hf_hub_download(name.repo, file, repo_type="dataset", revision=commit))
        except Exception as error:  # whichever HTTP library the hub's client uses raises what it likes
            raise _failed(name, error) from error
        files.append(DataFile(f"{PREFIX}{name.repo}/{file}", path, commit))
    return files


def _listing(name: DatasetName) -> tuple[dict[str, int], str]:
    """Every data file's size, and the commit."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:
        raise _failed(name, error) from error
    return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []
            if PurePosixPath(sibling.rfilename).suffix in SUFFIXES
            and _is_inside(sibling.rfilename)}, str(info.sha)


def _choose(name: DatasetName, sizes: Mapping[str, int], limit: int) -> list[str]:
    if not sizes:
        raise CalibrationError(f"{PREFIX}{name.repo} holds no {', '.join(SUFFIXES)} file",
                               why="a script that makes a data set is never run",
                               next=f"the hub may have converted it: {PREFIX}{name.repo}@{CONVERTED}")
    if name.file is not None:
        if name.file not in sizes:
            raise CalibrationError(f"{PREFIX}{name.repo} has no file {name.file!r}",
                                   why=did_you_mean(name.file, list(sizes)[:100]), next=EXAMPLE)
        return [name.file]
    split = re.compile(rf"(^|[/_.-]){re.escape(name.split or SPLIT)}([/_.-]|$)")
    of_split = sorted(file for file in sizes if split.search(file))
    if not of_split and name.split is None and len(sizes) == 1:
        of_split = list(sizes)
    readable = [file for file in of_split if has_pyarrow() or not file.endswith(PARQUET)]
    if of_split and not readable:
        raise CalibrationError(f"{PREFIX}{name.repo} is in parquet, which needs pyarrow", next=GET_PYARROW)
    alike = {(PurePosixPath(file).parent, PurePosixPath(file).suffix) for file in readable}
    if len(alike) != 1:
        names = readable or sorted(sizes)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CalibrationError(
            f"{PREFIX}{name.repo} has {'several sets' if readable else 'no files'} of the split "
            f"{name.split or SPLIT!r}", why=f"files: {', '.join(names[:_SHOWN])}{more}",
            next=f"name one: {replace(name, split=None, file=names[0]).named(name.revision)}")
    taken: list[str] = []
    room = limit
    for file in readable:
        if taken and room <= 0:
            break
        taken.append(file)
        room -= sizes[file]
    return taken


def _is_inside(file: str) -> bool:
    return not any(part in ("", ".", "..") for part in file.split("/")) and not {"\\", "\0"} & set(file)


def _failed(name: DatasetName, error: Exception) -> CalibrationError:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    shown, why = f"{PREFIX}{name.repo}", (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    page = f"https://huggingface.co/datasets/{name.repo}"
    if isinstance(error, GatedRepoError):
        return CalibrationError(f"{shown} is gated", why="its owner asks for a licence to be accepted",
                                next=f"accept it at {page}, then: hf auth login")
    if isinstance(error, RevisionNotFoundError):
        return CalibrationError(f"{shown} has no revision {name.revision!r}",
                                next=f"take one from {page}/commits")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return CalibrationError(f"no data set {name.repo!r} on the hub", why="it is misspelled or private",
                                next="check the name; for a private one: hf auth login")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return CalibrationError(f"{shown} has no file {name.file!r}", next=f"take one from {page}/tree/main")
    return CalibrationError(f"{shown} can't be downloaded", why=why,
                            next="check the connection and run it again, or name a file of this machine")
