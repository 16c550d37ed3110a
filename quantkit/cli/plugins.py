"""``quantkit plugins``: what is registered by whom, a new plugin's folder, and the checks of a plugin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.present import note, print_json, wrapped
from quantkit.plugins.manager import PluginInfo, PluginManager, current, module_file
from quantkit.plugins.registry import Registry, RegistryEntry
from quantkit.support.errors import FAILED
from quantkit.testing.scaffold import KINDS

if TYPE_CHECKING:
    from quantkit.testing.plugin import CheckResult

SUITES = "evaluation suites"
INDENT = 24


@click.group("plugins")
def command() -> None:
    """List, make and check plugins."""


def plugin_facts() -> dict[str, Any]:
    """Plain data of every plugin and everything it registers; no target is imported.

    Returns:
        ``plugins``: name, distribution, version, module, file, api, error, refused (why something of it isn't
        used), observes (hooks). ``registered``: by kind, entries of kind, name, owner, distribution (the
        same), plugin, version, target, module, file, about. ``recipes`` and ``suites``: kind, name, owner,
        distribution, plugin, version, file.
    """
    manager = current()
    return {
        "plugins": [_plugin(manager, info) for info in manager.plugins],
        "registered": {kind: [_registration(table, entry) for info in manager.plugins
                              for entry in table.entries(info.name, info.distribution)]
                       for kind, table in manager.registries.items()},
        "recipes": _named(manager, "recipe_dirs", "recipe"),
        "suites": _named(manager, "eval_dirs", "evaluation suite"),
    }


def contents(facts: dict[str, Any], plugin: dict[str, Any]) -> dict[str, list[str]]:
    """What one plugin brings, as names by kind; kinds of which it has none are left out."""
    groups = {**facts["registered"], "recipes": facts["recipes"], SUITES: facts["suites"]}
    names = {kind: [entry["name"] for entry in entries
                    if (entry["plugin"], entry["owner"]) == (plugin["name"], plugin["distribution"])]
             for kind, entries in groups.items()}
    return {kind: known for kind, known in {**names, "observes": plugin["observes"]}.items() if known}


def _plugin(manager: PluginManager, info: PluginInfo) -> dict[str, Any]:
    return {"name": info.name, "distribution": info.distribution, "version": info.version,
            "module": info.module, "file": info.file, "api": info.api, "error": info.error,
            "refused": [error.what for error in manager.collisions(info)], "observes": manager.observed(info)}


def _registration(table: Registry[Any], entry: RegistryEntry) -> dict[str, Any]:
    target = entry.target
    module = target.partition(":")[0] if isinstance(target, str) else getattr(
        target, "__module__", type(target).__module__)
    return {"kind": table.kind, "name": entry.name, "owner": entry.owner,
            "distribution": entry.owner, "plugin": entry.plugin, "version": entry.version,
            "target": target if isinstance(target, str) else repr(target),
            "module": module, "file": module_file(str(module)),
            "about": {key: str(value) for key, value in entry.about.items()}}


def _named(manager: PluginManager, hook: str, kind: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "name": path.stem, "owner": info.distribution, "distribution": info.distribution,
             "plugin": info.name, "version": info.version, "file": str(path)}
            for info, path in manager.files(hook)]


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print plugins and registrations as JSON.")
def list_(as_json: bool) -> None:
    """List plugins with their distributions, and everything that each registers.

    Nothing that is listed is imported, so a name appears here before its code has ever run.
    """
    facts = plugin_facts()
    if as_json:
        print_json(facts)
        return
    for plugin in facts["plugins"]:
        click.echo(f"{plugin['distribution']} {plugin['version']} (plugin {plugin['name']!r})")
        if plugin["error"]:
            click.echo(wrapped("  left out", plugin["error"], 21))
        for kind, names in contents(facts, plugin).items():
            click.echo(wrapped(f"  {kind}", ", ".join(names), 21))
        for reason in plugin["refused"]:
            click.echo(wrapped("  not used", reason, 21))


@command.command("new")
@click.argument("kind", metavar="KIND", type=click.Choice(list(KINDS)))
@click.argument("name")
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", default=Path(),
              help="The folder to put it into (the current one).")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def new(kind: str, name: str, out: Path, as_json: bool) -> None:
    """Make the folder of a new plugin, with an example that works and its tests.

    KIND is one of method, policy, codec, format, architecture and metric. NAME is what quantkit will know
    it by: my-method becomes the distribution quantkit-my-method with the package quantkit_my_method.
    """
    from quantkit.testing.scaffold import make_plugin

    plugin = make_plugin(kind, name, out)
    commands = [f"cd {quote(str(plugin.folder))}", *plugin.commands]
    if as_json:
        print_json({"folder": str(plugin.folder), "kind": kind, "name": plugin.key,
                    "distribution": plugin.distribution, "package": plugin.package,
                    "files": list(plugin.files), "next": commands})
        return
    click.echo(f"made {plugin.folder}, a plugin with the {kind} {plugin.key!r}")
    for file in plugin.files:
        click.echo(f"  {file}")
    click.echo("\nnext")
    for line in commands:
        click.echo(f"  {line}")


@command.command("check")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.pass_context
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Put everything that a plugin registers to the checks of quantkit.testing.

    NAME is an installed plugin's or its distribution's. Its code is imported and run. `quantkit plugins check
    quantkit` checks the built-ins, which takes minutes. The exit code is 1 if a check fails.
    """
    from quantkit.testing.plugin import check_all

    results = []
    for result in check_all(current(), name):
        results.append(result)
        # a line as soon as it is known: a plugin of many things takes a while
        note(_line(result)) if as_json else click.echo(_line(result))
    counts = Counter(result.status for result in results)
    if as_json:
        print_json({"plugin": name, "ok": counts["ok"], "failed": counts["failed"],
                    "not_checked": counts["not checked"],
                    "results": [{"kind": result.kind, "name": result.name, "status": result.status,
                                 "why": result.why, "next": result.next} for result in results]})
    else:
        click.echo(f"\n{counts['ok']} ok, {counts['failed']} failed, {counts['not checked']} not checked")
    if counts["failed"]:
        ctx.exit(FAILED)


def _line(result: CheckResult) -> str:
    text = result.status + (f": {result.why}" if result.why else "")
    if result.next and result.status == "failed":
        text += f" (next: {result.next})"
    return wrapped(f"{result.kind} {result.name}".ljust(INDENT - 1) + " ", " ".join(text.split()), INDENT)
