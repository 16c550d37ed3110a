"""A GGUF model in one file or several: ``NAME-00001-of-00003.gguf`` and the others beside it.

The names of the others follow from the name of the file that was given. What the files say is compared with
that and with each other; no path is taken from them. The first has the metadata, all have tensors.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.sources.gguf_header import GGUFHeader, GGUFTensor, open_gguf
from quantkit.support.errors import SourceError
from quantkit.support.paths import FileState, file_state, reading

COUNT = "split.count"
NUMBER = "split.no"
TENSORS = "split.tensors.count"
MAX_SHARDS = 10_000
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class GGUFShard:
    """One of the files.

    Attributes:
        path: the place of the file.
        tensors: the tensors in it, by GGUF's names.
        data: the memory map of the file.
        opened: size, time of the last change and inode of the file that was opened.
    """

    path: Path
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap
    opened: FileState

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from there on. A file that is cut meanwhile gives an error, where its map would end
        the process.

        Raises:
            SourceError: the file isn't the one that was opened, before or afterwards.
        """
        with reading(self.path, SourceError), self.path.open("rb") as file:
            file.seek(offset)
            count = file.readinto(buffer)
            if count < len(buffer) or file_state(os.fstat(file.fileno())) != self.opened:
                raise self._changed()

    def check_unchanged(self) -> None:
        """Raise SourceError if the file isn't the one that was opened."""
        with reading(self.path, SourceError):
            if file_state(self.path.stat()) != self.opened:
                raise self._changed()

    def _changed(self) -> SourceError:
        return SourceError(f"{self.path} was changed while it was read",
                           why="its size, its time or the file itself isn't what it was when it was opened",
                           next="run it again when it is complete")


def open_shards(path: Path) -> tuple[dict[str, Any], list[GGUFShard]]:
    """Open a model by any of its files.

    Args:
        path: the place of one file; those beside it are opened too if it says that it is one of several.

    Returns:
        The metadata, and the files in order.

    Raises:
        SourceError: a file is missing, malformed, of another model or at another's place, or its name doesn't
            say which of them it is. The file is named.
    """
    header, data = open_gguf(path)
    count = header.metadata.get(COUNT, 1)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise SourceError(f"{path} is one of {str(count)[:40]} files", why=f"{COUNT} can't be that",
                          next="download the file again")
    if count <= 1:
        return header.metadata, [GGUFShard(path, header.tensors, data, header.opened)]
    metadata: list[dict[str, Any]] = []
    shards: list[GGUFShard] = []
    for place in _places(path, count):
        opened = (header, data) if place == path else _open_beside(path, place, count)
        _check_place(place, opened[0].metadata, len(shards), count)
        metadata.append(opened[0].metadata)
        shards.append(GGUFShard(place, opened[0].tensors, opened[1], opened[0].opened))
    _check_together(metadata, shards)
    return metadata[0], shards


def _places(path: Path, count: int) -> Iterator[Path]:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        raise SourceError(f"{path} is one of {count} files of a model, and its name doesn't say which",
                          why=f"the first was called NAME-00001-of-{count:05}.gguf when the model was split",
                          next="give all files their names back: by these the others are found")
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}"
        yield path if number == int(match["number"]) else path.with_name(name)


def _open_beside(path: Path, place: Path, count: int) -> tuple[GGUFHeader, mmap.mmap]:
    if not place.is_file():
        raise SourceError(f"{place} is missing", why=f"the model in {path.name} has {count} files",
                          next="download it into the same folder")
    return open_gguf(place)


def _check_place(place: Path, metadata: dict[str, Any], index: int, count: int) -> None:
    """Whether a file says of itself what its name says."""
    stored = metadata.get(NUMBER), metadata.get(COUNT)
    if stored != (index, count):
        shown = " of ".join(str(value)[:40] for value in stored)
        raise SourceError(f"{place} isn't the file that its name says",
                          why=f"it says that it is {shown}, counted from 0, and not {index} of {count}",
                          next="download it again")


def _check_together(metadata: list[dict[str, Any]], shards: list[GGUFShard]) -> None:
    """Whether the files are one model's, and all of it."""
    first, again = metadata[0], "download all files of one model again"
    seen: dict[str, Path] = {}
    for stored, shard in zip(metadata, shards):
        for key in (TENSORS, "general.architecture"):
            if key in stored and stored[key] != first.get(key):
                raise SourceError(f"{shard.path} belongs to another model than {shards[0].path.name}",
                                  why=f"it says {key} {str(stored[key])[:40]!r}, the first file "
                                      f"{str(first.get(key))[:40]!r}", next=again)
        for name in shard.tensors:
            if name in seen:
                raise SourceError(f"{shard.path} has a tensor {name[:80]!r}",
                                  why=f"{seen[name].name} has it too", next=again)
            seen[name] = shard.path
    if first.get(TENSORS) not in (None, len(seen)):
        raise SourceError(f"{shards[0].path} and the files beside it have {len(seen)} tensors",
                          why=f"it says that they have {str(first[TENSORS])[:40]}", next=again)
