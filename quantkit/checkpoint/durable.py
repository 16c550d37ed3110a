"""Writes files atomically, and locks a folder so that one process writes it at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from quantkit.support.errors import CheckpointError
from quantkit.support.paths import open_regular

TEMPORARY = ".tmp"
_MOMENT = 0.05
"""Seconds until a lock is tried again."""


def step(what: str) -> None:
    """Called before everything that changes the disk. Does nothing: fault tests stop a run here."""


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` survive a power cut (where the system can)."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write ``path`` through a temporary neighbor: written, fsynced, renamed, folder fsynced.

    Returns:
        sha256 hex digest and number of bytes.

    Raises:
        OSError: as the system said. After any error the temporary file is removed, to give back
            its space; after a kill it stays, and the next run removes it.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    digest, size = hashlib.sha256(), 0
    step(f"create {path.name}")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
                step(f"write {path.name}")
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    step(f"rename {path.name}")
    rename(temporary, path)
    return digest.hexdigest(), size


def rename(old: Path, new: Path) -> None:
    """Rename durably. A file replaces one of that name; a folder replaces none that holds anything."""
    old.replace(new)
    sync_folder(new.parent)
    if old.parent != new.parent:
        sync_folder(old.parent)


def hash_file(path: Path, chunk: int = 2**22) -> tuple[str, int]:
    """sha256 hex digest and size of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(chunk):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


@contextlib.contextmanager
def disk_errors(what: str, kept: str) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space, then run the same command again: it resumes"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR):
            remedy = "choose another --out, in a folder that you may write to"
        elif error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP):
            remedy = "choose another --out"
        else:
            remedy = "run the same command again: it resumes"
        raise CheckpointError(what, why=f"{reason}; {kept}", next=remedy) from error


def make_folder(folder: Path) -> None:
    """Make a folder unless it is there, durably. One that is removed meanwhile stays away. Raises OSError."""
    step("create the folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if os.path.lexists(folder):
            raise
    sync_folder(folder.parent)


def names_in(folder: Path) -> set[str]:
    """What is in a folder; nothing if it isn't there, or is being removed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {path.name for path in folder.iterdir()}
    return set()


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder, without what is removed or renamed away meanwhile."""
    size = 0
    for parent, _, files in os.walk(folder):  # passes over a folder that has gone, which rglob doesn't
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                size += (Path(parent) / name).lstat().st_size
    return size


class FolderLock:
    """One writer a folder, held until :meth:`release` or the process's end, however that comes. It is tried
    twice: whoever asks :func:`is_locked` holds the lock for a moment.

    Raises:
        CheckpointError: another process holds it.
        OSError: the lock file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = None
        with contextlib.suppress(FileNotFoundError):  # the holder has just removed the folder
            self._file = os.fdopen(_without_waiting(path), "a")
        if self._file is None or not self._locked(self._file, path):
            self.release()
            raise CheckpointError(f"another quantkit is writing {path.parent}",
                                  why="two writers would spoil each other's work",
                                  next="wait for it to end, or choose another --out")

    def _locked(self, file: IO[str], path: Path) -> bool:
        try:
            try:
                _lock(file)
            except (BlockingIOError, PermissionError):
                time.sleep(_MOMENT)
                _lock(file)
            # the holder may have removed the folder between our open and our lock
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, PermissionError, FileNotFoundError):
            return False

    def release(self) -> None:
        """Let the next writer in."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _without_waiting(path: Path) -> int:
    """Opens a file to append to it; if it is a pipe, it doesn't wait for the other end."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)


def is_locked(path: Path) -> bool:
    """Whether a process holds the :class:`FolderLock` of this file; ``False`` too if that can't be told."""
    try:
        with path.open("r+") as file:
            _lock(file)  # and let go of at once
    except (BlockingIOError, PermissionError):
        return os.access(path, os.W_OK)
    except OSError:
        return False
    return False


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
