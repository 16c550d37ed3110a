"""Stores the finished parts of a comparison beside its report, so that a stopped run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from quantkit.checkpoint.durable import FolderLock
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.paths import read_regular

FILE = "unfinished.jsonl"
MAX_BYTES = 2**30
_FIRST = b'{"key": "'


class Journal:
    """Pieces of work and what they gave, a line of JSON each, durable one by one.

    A line that a kill cut short is done again.

    Args:
        folder: where the report will be; ``None``: nothing is kept.
        key: everything that changes a number.

    Raises:
        UsageError: a comparison of something else was begun there.
        QuantkitError: the folder can't be written, another process is at it, or the file is not one of these.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        self._found: dict[str, Any] = {}
        self._file: IO[str] | None = None
        self._lock: FolderLock | None = None
        if folder is None:
            return
        self._path = folder / FILE
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        with self._writing(), contextlib.ExitStack() as undo:
            undo.callback(self.close)
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._path)
            complete = self._read(self._path, digest)
            self._file = self._path.open("a", encoding="utf-8")
            self._file.truncate(complete)
            if not complete:
                self._line({"key": digest})
            undo.pop_all()

    def piece(self, name: str, make: Callable[[], Any]) -> Any:
        """What a piece of work gave: kept, or made now.

        Args:
            name: of the piece, the only one of that name.
            make: does it; what it gives consists of dicts, lists, texts and numbers.

        Raises:
            QuantkitError: it can't be written; and what ``make`` raises.
        """
        if name not in self._found:
            self._found[name] = make()
            with self._writing():
                self._line({"piece": name, "found": self._found[name]})
        return self._found[name]

    def has(self, name: str) -> bool:
        """Whether a piece is there."""
        return name in self._found

    def close(self) -> None:
        """Finished pieces stay for the next time.

        Raises:
            QuantkitError: the last of them couldn't be written.
        """
        file, lock, self._file, self._lock = self._file, self._lock, None, None
        try:
            if file is not None:
                with self._writing():
                    file.close()
        finally:
            if lock is not None:
                lock.release()

    def _line(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, path: Path, digest: str) -> int:
        """Bytes of whole lines; fills what was found."""
        complete, remove = 0, f"remove {path}, or choose another --out"
        for number, line in enumerate(read_regular(path, MAX_BYTES).splitlines(keepends=True)):
            if not line.endswith(b"\n") and (number or _FIRST.startswith(line[:len(_FIRST)])):
                break  # cut short
            try:
                content = json.loads(line)
                if number:
                    self._found[content["piece"]] = content["found"]
                elif content["key"] != digest:
                    raise UsageError(f"{path.parent} has an unfinished comparison of another kind",
                                     why="the model, the settings, the text or the program were others",
                                     next=remove)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise QuantkitError(f"{path} can't be read", why=f"line {number + 1} is damaged",
                                    next=remove) from error
            complete += len(line)
        return complete

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QuantkitError(f"{self._path} can't be written", why=error.strerror or str(error),
                                next="free some space, or choose another --out: the same command goes on "
                                     "from what is there") from error


def forget(folder: Path) -> None:
    """Delete the journal: the report exists."""
    with contextlib.suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
