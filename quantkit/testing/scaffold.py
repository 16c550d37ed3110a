"""Makes the folder of a new plugin from templates: ``quantkit plugins new``."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from quantkit.plugins.hooks import API_VERSION
from quantkit.plugins.manager import current
from quantkit.plugins.registry import RegistryEntry
from quantkit.support.errors import PluginError, UsageError, did_you_mean
from quantkit.support.paths import typed_path

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 24
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_RECIPE_HOOK = '''

@hookimpl
def recipe_dirs() -> list[Path]:
    return [Path(__file__).parent / "recipes"]
'''
_QUANTIZE = "quantkit quantize smollm2 --recipe $recipe --out OUT && quantkit eval smollm2 OUT --windows 4"


@dataclass(frozen=True)
class TemplateKind:
    """A kind of plugin that there are templates for.

    Attributes:
        registry: the registry that its example is in.
        target: the name of the example in its module.
        summary: a sentence that says what the example does.
        example: the name under which the documentation shows the example.
        shows: a command that shows the plugin at work.
        recipe: the beginning of its recipe's name; empty if it has none.
    """

    registry: str
    target: str
    summary: str
    example: str
    shows: str
    recipe: str = ""


KINDS: dict[str, TemplateKind] = {
    "method": TemplateKind("methods", "METHOD", "Rounds weights to nearest with clipped ranges.", "clipped",
                           _QUANTIZE, "int4-"),
    "policy": TemplateKind("kv_policies", "Policy", "Keeps the keys with the smallest norms in the KV cache.",
                           "keynorm", 'quantkit eval smollm2 --kv "none,$key(0.5)" --windows 4'),
    "codec": TemplateKind("kv_codecs", "Codec", "Stores keys and values in 8 bits with an offset.", "uint8",
                          "quantkit eval smollm2 --kv none,$key --windows 4"),
    "format": TemplateKind("formats", "FORMAT", "Stores 8-bit weights with a scale a row.", "rowwise",
                           _QUANTIZE, "int8-"),
    "architecture": TemplateKind("architectures", "ARCHITECTURE",
                                 "Runs models that are Llama under other names.", "renamed",
                                 "quantkit inspect FOLDER_OF_A_MODEL"),
    "metric": TemplateKind("metrics", "METRIC",
                           "Measures how often the likeliest token stays among the top five.", "top5",
                           "quantkit eval smollm2 --suite quick"),
}


@dataclass(frozen=True)
class NewPlugin:
    """A plugin's folder and its name in every spelling.

    Attributes:
        folder: the place where it is.
        kind: the kind of thing that it registers.
        name: with hyphens, ``my-method``; the entry point's name, too.
        files: content by relative path.
    """

    folder: Path
    kind: str
    name: str
    files: dict[str, str] = field(default_factory=dict)

    @property
    def distribution(self) -> str:
        """``quantkit-my-method``."""
        return f"quantkit-{self.name}"

    @property
    def package(self) -> str:
        """``quantkit_my_method``."""
        return self.distribution.replace("-", "_")

    @property
    def key(self) -> str:
        """The registered name; metrics and architectures are written with underscores."""
        return self.name.replace("-", "_") if self.kind in ("metric", "architecture") else self.name

    @property
    def recipe(self) -> str:
        """The name of the recipe that it brings; empty if its kind has none."""
        return KINDS[self.kind].recipe and f"{KINDS[self.kind].recipe}{self.name}"

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands to type next in the folder; the last one shows the plugin at work."""
        shows = Template(KINDS[self.kind].shows).substitute(key=self.key, recipe=self.recipe)
        return 'pip install -e ".[test]"', "pytest", shows


def make_plugin(kind: str, name: str, parent: Path | None = None) -> NewPlugin:
    """Write the folder ``quantkit-NAME`` of a plugin that installs, passes its tests and does something.

    Args:
        kind: one of :data:`KINDS`.
        name: the plugin's name: ``my-method``, ``my_method`` or ``quantkit-my-method``.
        parent: the folder to put it into, the current one by default; made if it is missing.

    Raises:
        UsageError: a bad or taken name, an unknown kind, or a folder that exists.
    """
    parent = typed_path(parent or ".")
    plugin = render(kind, name, parent)
    _check_free(plugin)
    if plugin.folder.exists() or plugin.folder.is_symlink():
        raise UsageError(f"{plugin.folder} exists already", why="nothing is overwritten",
                         next=f"quantkit plugins new {kind} {plugin.name} --out OTHER_FOLDER")
    parent.mkdir(parents=True, exist_ok=True)
    # beside its place, so that a rename puts all of it there at once or none
    temporary = Path(tempfile.mkdtemp(prefix=f".{plugin.distribution}-", dir=parent))
    try:
        for path, content in plugin.files.items():
            target = temporary / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes it private
        temporary.rename(plugin.folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return plugin


def render(kind: str, name: str, parent: Path = Path()) -> NewPlugin:
    """The plugin that :func:`make_plugin` writes. Raises UsageError for an unknown kind or a bad name."""
    if kind not in KINDS:
        raise UsageError(f"no kind of plugin is called {kind!r}", why=did_you_mean(kind, KINDS),
                         next="quantkit plugins new --help")
    about = KINDS[kind]
    short = name.replace("_", "-").removeprefix("quantkit-")
    if not _NAME.fullmatch(short) or len(short) > LONGEST or keyword.iskeyword(short):
        raise UsageError(f"a plugin can't be called {name[:100]!r}",
                         why=f"a name has at most {LONGEST} small letters, digits and single hyphens, "
                             "begins with a letter and is no keyword of Python",
                         next=f"quantkit plugins new {kind} my-{kind}")
    plugin = NewPlugin(parent / f"quantkit-{short}", kind, short)
    fields = {
        "name": short, "key": plugin.key, "distribution": plugin.distribution, "package": plugin.package,
        "class_name": "".join(part.capitalize() for part in short.split("-")), "kind": kind,
        "registry": about.registry, "target": about.target, "summary": about.summary,
        "shows": plugin.commands[-1],
        "about": f',\n             check_config="{plugin.package}.architecture:EXAMPLE"'
                 if kind == "architecture" else "",
        "path_import": "\nfrom pathlib import Path\n" if plugin.recipe else "", "api": str(API_VERSION),
        "recipe_hook": _RECIPE_HOOK if plugin.recipe else ""}
    for template in sorted([*(TEMPLATES / "common").iterdir(), *(TEMPLATES / kind).iterdir()]):
        file = template.name.removesuffix(".tmpl")
        folder = "tests/" if file.startswith("test_") else f"src/{plugin.package}/"
        path = f"{folder}recipes/{plugin.recipe}.yaml" if file == "recipe.yaml" else (
            f"{folder}{file}" if file.endswith(".py") else file)
        text = Template(template.read_text(encoding="utf-8")).substitute(fields)
        plugin.files[path] = text.rstrip() + "\n"
    return plugin


def _check_free(plugin: NewPlugin) -> None:
    """Raise UsageError if the distribution is installed, or the registered name is taken or malformed."""
    manager, other = current(), f"quantkit plugins new {plugin.kind} my-{plugin.name}"
    if plugin.distribution in {info.distribution for info in manager.plugins}:
        raise UsageError(f"{plugin.distribution} is installed already", why="a name means one thing",
                         next=f"quantkit plugins check {plugin.distribution}")
    registry = KINDS[plugin.kind].registry
    # --kv takes policies and codecs alike
    for kind in ("kv_policies", "kv_codecs") if registry.startswith("kv_") else (registry,):
        table = manager.registries[kind]
        if plugin.key in table:
            owner = table.entry(plugin.key).owner
            raise UsageError(f"{table.kind} {plugin.key!r} exists already, in {owner}",
                             why="a name means one thing", next=other)
    try:
        RegistryEntry(plugin.kind, plugin.key, "module:NAME", plugin.distribution)
    except PluginError as error:
        raise UsageError(f"a {plugin.kind} can't be called {plugin.name!r}", why=error.why,
                         next=other) from error
