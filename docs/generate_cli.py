"""Writes docs/cli.md from the commands themselves: python docs/generate_cli.py"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

TARGET = Path(__file__).with_name("cli.md")
HEAD = """# Commands

Made by `python docs/generate_cli.py` from the commands' own help. Every command also takes `--help`
and `--debug`; exit codes are in [errors.md](errors.md).
"""


def commands(group: click.Group, ctx: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command below a group, in the order that ``--help`` shows, groups before their own."""
    for name in group.list_commands(ctx):
        _, command, _ = group.resolve_command(ctx, [name])
        assert command is not None
        inner = click.Context(command, info_name=name, parent=ctx)
        yield command, inner
        if isinstance(command, click.Group):
            yield from commands(command, inner)


def section(command: click.Command, ctx: click.Context) -> str:
    """One command: usage, help, options."""
    lines = [f"## {ctx.command_path}", "", "```", *usage(command, ctx), "```", "",
             inspect.cleandoc(command.help or "").replace("\b\n", "").strip(), ""]
    options = [p for p in command.get_params(ctx)
               if isinstance(p, click.Option) and not p.hidden and "--help" not in p.opts]
    if options:
        lines += ["| option | |", "|---|---|", *(row(option, ctx) for option in options), ""]
    return "\n".join(lines)


def usage(command: click.Command, ctx: click.Context) -> list[str]:
    """``quantkit eval [OPTIONS] MODEL...``"""
    return [" ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])]


def row(option: click.Option, ctx: click.Context) -> str:
    """The names, what they take, and what it does."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    takes = "" if option.is_flag or option.count else f" `{option.make_metavar(ctx)}`"
    needed = " (required)" if option.required else ""
    default = option.default
    shown = f" Default: `{default}`." if option.show_default and default not in (None, False, ()) else ""
    text = " ".join((option.help or "").split()).replace("|", "\\|")
    return f"| {names}{takes.replace('|', chr(92) + '|')} | {text}{shown}{needed} |"


def render() -> str:
    """The whole page."""
    from quantkit.cli.main import main

    root = click.Context(main, info_name="quantkit")
    return "\n".join([HEAD, section(main, root), *(section(*pair) for pair in commands(main, root))])


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
