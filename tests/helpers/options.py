"""Every option of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from quantkit.cli.main import main
from quantkit.plugins.manager import registry


def leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from leaves(command.get_command(context, name), f"{path} {name}")


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command, with the command's name."""
    for name in main.list_commands(click.Context(main)):
        for path, command in leaves(registry("commands").get(name), name):
            yield from ((path, option) for option in command.params
                        if isinstance(option, click.Option) and not option.hidden)


def long_name(option: click.Option) -> str:
    return max(option.opts, key=len)


OPTIONS = list(options())
