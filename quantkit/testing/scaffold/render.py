"""Renders a plugin's folder and puts it in place at once."""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import Template

from quantkit.plugins import hooks
from quantkit.plugins.manager import current
from quantkit.support.errors import UsageError
from quantkit.support.paths import typed_path
from quantkit.testing.scaffold.kinds import KINDS, TemplateKind
from quantkit.testing.scaffold.names import PluginNames, kind_of, plugin_names, require_free

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"
RECIPES = {"method": "int4-", "transform": "int4-", "format": "int8-"}
"""Kind → what its recipe's name begins with."""


@dataclass(frozen=True)
class NewPlugin:
    """What was made.

    Attributes:
        folder: where it lies.
        names: what it is called.
        kind: what it registers.
        files: relative paths, sorted.
        commands: what to type next, in this order.
    """

    folder: Path
    names: PluginNames
    kind: TemplateKind
    files: tuple[str, ...]
    commands: tuple[str, ...]


def make_plugin(name: str, kind_name: str, parent: Path | None = None) -> NewPlugin:
    """Write the folder ``quantkit-NAME`` of a plugin that installs, passes its tests and does something.

    Args:
        name: of the plugin, see :func:`~quantkit.testing.scaffold.names.plugin_names`.
        kind_name: one of :data:`~quantkit.testing.scaffold.kinds.KINDS`.
        parent: the folder to put it into, the current one by default; made if it is missing.

    Raises:
        UsageError: a bad or taken name, an unknown kind, or a folder that exists.
    """
    kind = kind_of(name=kind_name, kinds=KINDS)
    names = plugin_names(name, kind)
    require_free(names, kind, current())
    parent = typed_path(parent or ".")
    folder = parent / names.distribution
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists already", why="nothing is overwritten",
                         next=f"quantkit plugins new {names.name} --kind {kind.name} --out OTHER_FOLDER")
    files = render(names, kind)
    parent.mkdir(parents=True, exist_ok=True)
    # beside its place, so that a rename puts all of it there at once or none
    temporary = Path(tempfile.mkdtemp(prefix=f".{names.distribution}-", dir=parent))
    try:
        for path, content in files.items():
            target = temporary / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes it private
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return NewPlugin(folder, names, kind, tuple(sorted(files)),
                     ('pip install -e ".[test]"', "pytest", _filled(kind.shows, names)))


def render(names: PluginNames, kind: TemplateKind) -> dict[str, str]:
    """Relative path → content of every file of a plugin.

    Raises:
        UsageError: a class would be called like something that its own file imports.
    """
    fields = {"name": names.name, "key": names.registered, "distribution": names.distribution,
              "package": names.package, "class_name": names.class_name, "kind": kind.name,
              "summary": kind.summary, "shows": _filled(kind.shows, names),
              "source": f"src/{names.package}/{_filled(kind.source, names)}",
              "api": str(getattr(hooks, "API_VERSION", 1))}
    files = {}
    for template in sorted([*(TEMPLATES / "common").iterdir(), *(TEMPLATES / kind.name).iterdir()]):
        if template.suffix == SUFFIX:
            text = template.read_text(encoding="utf-8")
            path = _place(template.name.removesuffix(SUFFIX), names, kind)
            files[str(path)] = _rendered(text, fields, path, names, kind)
    return files


def _rendered(text: str, fields: Mapping[str, str], path: PurePosixPath, names: PluginNames,
              kind: TemplateKind) -> str:
    content = Template(text).substitute(fields)
    if path.suffix == ".py" and (clash := next(_clashes(content), None)) is not None:
        raise UsageError(f"a {kind.name} can't be called {names.name!r}",
                         why=f"its class would be {clash}, which its own file imports",
                         next=f"quantkit plugins new my-{names.name} --kind {kind.name}")
    return content


def _place(file: str, names: PluginNames, kind: TemplateKind) -> PurePosixPath:
    """Where a template's file belongs in the plugin's folder."""
    package = PurePosixPath("src", names.package)
    if file == "recipe.yaml":
        return package / "recipes" / f"{RECIPES.get(kind.name, '')}{names.name}.yaml"
    if file == "suite.yaml":
        return package / "evals" / f"{names.registered}.yaml"
    if file.endswith(".py"):
        return (PurePosixPath("tests") if file.startswith("test_") else package) / file
    return PurePosixPath(file)


def _clashes(content: str) -> Iterator[str]:
    """Names that a file both imports and gives to a class of its own."""
    body = ast.parse(content).body
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}
    yield from (node.name for node in body if isinstance(node, ast.ClassDef) and node.name in imported)


def _filled(text: str, names: PluginNames) -> str:
    return Template(text).substitute(name=names.name, key=names.registered)
