"""``quantkit plugins``; ``list`` is here, ``new`` and ``check`` have files of their own."""

from __future__ import annotations

import rich_click as click

from quantkit.cli.plugin_facts import contents, plugin_facts
from quantkit.cli.plugins_check import check
from quantkit.cli.plugins_new import new
from quantkit.cli.present import print_json, wrapped


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
            click.echo(wrapped("  left out", plugin["error"], 21))
        for kind, names in contents(facts, plugin).items():
            click.echo(wrapped(f"  {kind}", ", ".join(names), 21))
        for reason in plugin["refused"]:
            click.echo(wrapped("  not used", reason, 21))
