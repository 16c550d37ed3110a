"""Files of calibration data, read as far as they are needed: text, JSON lines, parquet."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.quantization.calibration.parquet import read_rows
from quantkit.quantization.calibration.rows import KEYS, Document, document, parse_row, parse_value
from quantkit.support.errors import CalibrationError
from quantkit.support.paths import open_regular

ROWS = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
PROSE = (".txt", ".md")
"""What is taken of a folder."""
SHARE = 1 << 18
"""Bytes of a file that are worth opening it for: more than titles and headers."""
_BETWEEN = re.compile(r"\s*(?:,\s*)?")
_LONGEST = 8
"""Letters of JSON's longest word or escape."""
_Row = Callable[[], Document | None]


@dataclass(frozen=True)
class DataFile:
    """A file on this machine.

    Attributes:
        name: how messages and the manifest call it: without this machine's folders.
        path: its place on this machine.
        revision: the commit of the data set that it is of.
    """

    name: str
    path: Path
    revision: str | None = None

    @property
    def size(self) -> int:
        """Bytes. Raises CalibrationError if it isn't there."""
        try:
            with open_regular(self.path) as file:
                return file.seek(0, 2)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise unreadable(self.name, error) from None

    def sha256(self) -> str:
        """Hex digest of the whole file. Raises CalibrationError if it can't be read."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.name, error) from None


def local_files(name: str) -> list[DataFile]:
    """The file that ``name`` is the path of, or every ``.txt`` and ``.md`` below that folder, by path.

    Raises:
        CalibrationError: nothing is there, or no such file in the folder.
    """
    try:
        path = Path(name).expanduser()
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(2, "No such file or directory")
            return [DataFile(path.name, path)]
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not any(
            part.startswith(".") for part in file.relative_to(path).parts))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such user's home
        raise unreadable(name, error) from None
    files = [DataFile(f"{path.name}/{file.relative_to(path).as_posix()}", file) for file in inside
             if file.suffix.lower() in PROSE]
    if not files:
        rows = [file for file in inside if file.suffix.lower() in (*ROWS, PARQUET)]
        raise CalibrationError(f"the folder {name} holds no {' or '.join(PROSE)} file",
                               next=f"name a file of it: {rows[0]}" if rows else "give another folder")
    return files


def read_files(files: Sequence[DataFile], limit: int,
               unusable: list[CalibrationError] | None = None) -> list[tuple[DataFile, list[Document]]]:
    """Every file and the documents at its beginning.

    Args:
        limit: bytes in all.
        unusable: takes an error for each row that can't be used, which is left out. Without it, the first
            one is raised.

    Raises:
        CalibrationError: a file is unreadable, empty, not UTF-8, or has no row that can be used.
    """
    rooms = shares([file.size for file in files], limit)
    return [(file, read_file(file, room, unusable)) for file, room in zip(files, rooms, strict=True)]


def some_of(files: Sequence[DataFile], limit: int, seed: int) -> list[DataFile]:
    """Choose as many files of a folder or data set as hold ``limit`` bytes, where none counts for more than
    ``SHARE``; in the order given. Raises CalibrationError if one isn't there."""
    order, remaining = list(range(len(files))), limit
    taken = set[int]()
    random.Random(seed).shuffle(order)
    for i in order:
        if remaining <= 0:
            break
        taken.add(i)
        remaining -= min(files[i].size, SHARE)
    return [file for i, file in enumerate(files) if i in taken]


def shares(sizes: Sequence[int], limit: int) -> list[int]:
    """``limit`` shared out evenly; what small files leave goes to the others."""
    shares, remaining = [0] * len(sizes), limit
    for done, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[i] = min(sizes[i], remaining // (len(sizes) - done))
        remaining -= shares[i]
    return shares


def read_file(file: DataFile, limit: int, unusable: list[CalibrationError] | None = None) -> list[Document]:
    """The documents in the first ``limit`` bytes of a file; its suffix says what it is.

    Args:
        file, limit, unusable: as for :func:`read_files`.

    Raises:
        CalibrationError: as :func:`read_files`.
    """
    suffix = file.path.suffix.lower()
    documents: list[Document] = []
    broken: list[CalibrationError] = []
    if suffix not in (*ROWS, PARQUET):
        documents = _whole(file, limit)
    else:
        for row in _parquet(file, limit) if suffix == PARQUET else _rows(file, limit):
            try:
                if (parsed := row()) is not None:
                    documents.append(parsed)
            except CalibrationError as error:
                if unusable is None:
                    raise
                broken.append(error)
    if not documents and broken:
        raise broken[0]
    if unusable is not None:
        unusable += broken
    if not documents:
        raise CalibrationError(f"the calibration data {file.name} is empty",
                               next="give a file with text in it, or 'builtin'")
    return documents


def unreadable(name: str, error: Exception) -> CalibrationError:
    return CalibrationError(f"the calibration data {name} can't be read",
                            why=getattr(error, "strerror", None) or str(error),
                            next="give a text file, a folder, a .jsonl or .parquet file, "
                                 "hub:OWNER/NAME, or 'builtin'")


def _bytes(file: DataFile, limit: int) -> tuple[bytes, bool]:
    """The beginning, and whether that is all."""
    try:
        with file.path.open("rb") as opened:
            data = opened.read(limit + 1)
    except OSError as error:
        raise unreadable(file.name, error) from None
    return data[:limit], len(data) <= limit


def _whole(file: DataFile, limit: int) -> list[Document]:
    data, all_of_it = _bytes(file, limit)
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, all_of_it)
    except UnicodeDecodeError as error:
        raise CalibrationError(f"the calibration data {file.name} is not UTF-8",
                               why=f"byte {error.start}: {error.reason}",
                               next="convert it, or use 'builtin'") from None
    return [Document(file.name, text)] if text.strip() else []


def _rows(file: DataFile, limit: int) -> Iterator[_Row]:
    """What parses each row of a file of JSON."""
    data, all_of_it = _bytes(file, limit)
    data = data.removeprefix(codecs.BOM_UTF8)
    if (values := _values(data, all_of_it)) is not None:
        for number, value in enumerate(values, 1):
            yield partial(parse_value, value, f"{file.name} item {number}")
        return
    lines = data.split(b"\n")
    if not all_of_it and len(lines) == 1:
        raise CalibrationError(f"the first line of {file.name} is longer than {limit:,} bytes",
                               why="of a file only so much is read as the windows need",
                               next="give more --windows or fewer files, or, if it is not one object a line: "
                                    "jq -c '.[]' FILE > FILE.jsonl")
    for number, line in enumerate(lines if all_of_it else lines[:-1], 1):
        if line.strip():
            yield partial(parse_row, line, f"{file.name} line {number}")


def _values(data: bytes, all_of_it: bool) -> list[Any] | None:
    """The items of a file that is one JSON array, or its objects where these stand on several lines each;
    ``None`` if it isn't wholly so, or has a row a line."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, all_of_it).strip()
        if not text.startswith("["):
            json.loads(text.partition("\n")[0])
            return None  # a row a line
    except UnicodeDecodeError:
        return None
    except (ValueError, RecursionError):
        pass
    values: list[Any] = []
    decoder, array = json.JSONDecoder(), text.startswith("[")
    position = 1 if array else 0
    while True:
        between = _BETWEEN.match(text, position)
        assert between is not None  # nothing at all is a match, too
        position = between.end()
        if array and position == len(text) - 1 and text[position] == "]":
            return values
        if position == len(text):
            return None if array and all_of_it else values
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return values if values and not all_of_it and _is_cut(error, text) else None
        values.append(value)


def _is_cut(error: Exception, text: str) -> bool:
    """Whether JSON is wrong only because reading ended within it: at a text, or at a word's or escape's
    beginning."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST)


def _parquet(file: DataFile, limit: int) -> Iterator[_Row]:
    for number, row in enumerate(read_rows(file.path, file.name, sorted(KEYS), limit), 1):
        yield partial(document, row, f"{file.name} row {number}")
