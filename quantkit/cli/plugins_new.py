"""``quantkit plugins new NAME --kind KIND``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import rich_click as click

from quantkit.cli.present import print_json
from quantkit.testing.scaffold.kinds import KINDS


@click.command("new")
@click.argument("name")
@click.option("--kind", "-k", required=True, metavar="KIND",
              type=click.Choice(list(KINDS)), help="What it registers.")
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", default=Path(),
              help="The folder to put it into (the current one).")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def new(name: str, kind: str, out: Path, as_json: bool) -> None:
    """Make the folder of a new plugin, with an example that works and its tests.

    NAME is what quantkit will know it by: my-method becomes the distribution quantkit-my-method with the
    package quantkit_my_method. KIND is one of method, transform, format, kernel, policy, codec,
    drafter, metric, reporter, source, architecture, command, recipe and suite.
    """
    from quantkit.testing.scaffold.render import make_plugin

    plugin = make_plugin(name, kind, out)
    names = plugin.names
    commands = [f"cd {quote(str(plugin.folder))}", *plugin.commands]
    if as_json:
        print_json({"folder": str(plugin.folder), "kind": kind, "name": names.registered,
                    "distribution": names.distribution, "package": names.package,
                    "files": list(plugin.files), "next": commands})
        return
    click.echo(f"made {plugin.folder}, a plugin with the {kind} {names.registered!r}")
    for file in plugin.files:
        click.echo(f"  {file}")
    click.echo("\nnext")
    for command in commands:
        click.echo(f"  {command}")
