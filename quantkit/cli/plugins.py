"""``quantkit plugins``; ``list`` is here, ``new`` and ``check`` have files of their own."""

from __future__ import annotations

from typing import Any

import rich_click as click

from quantkit.cli.plugins_check import check
from quantkit.cli.plugins_new import new
from quantkit.cli.present import print_json, wrapped
from quantkit.plugins import current


@click.group("plugins")
def command() -> None:
    """List, make and check plugins."""


command.add_command(new)
command.add_command(check)


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
            click.echo("  " + wrapped("left out", plugin["error"]))
        for kind, entries in facts["registered"].items():
            names = [e["name"] for e in entries if e["owner"] == plugin["distribution"]]
            if names:
                click.echo(wrapped(f"  {kind}", ", ".join(names), 18))


def plugin_facts() -> dict[str, Any]:
    """Plain data: ``plugins`` (name, distribution, version, error) and ``registered`` by kind, each
    entry with its name, owner, target and what was said about it. Imports no target."""
    manager = current()
    return {
        "plugins": [{"name": p.name, "distribution": p.distribution, "version": p.version,
                     "error": p.error} for p in manager.plugins],
        "registered": {
            kind: [{"name": name, "owner": (entry := table.entry(name)).owner,
                    "target": entry.target if isinstance(entry.target, str) else repr(entry.target),
                    "about": {key: str(value) for key, value in entry.about.items()}} for name in table]
            for kind, table in manager.registries.items()},
    }
