"""``quantkit recipes list`` and ``quantkit recipes show NAME``."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.present import print_json, wrapped

if TYPE_CHECKING:
    from quantkit.recipe import Candidate


@click.group("recipes")
def command() -> None:
    """List and show recipes."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects as JSON.")
def list_(as_json: bool) -> None:
    """List every recipe that can be named, with who ships it."""
    from quantkit.recipe import list_recipes

    recipes = list_recipes()
    if as_json:
        print_json([{"name": i.name, "description": i.description, "owner": i.owner,
                     "path": str(i.path), "error": i.error} for i in recipes])
        return
    room = max((len(info.name) for info in recipes), default=0) + 2
    for info in recipes:
        told = f"unusable: {info.error}" if info.error else info.description
        by = "" if info.owner == "quantkit" else f" (of {info.owner})"
        click.echo(wrapped(info.name, " ".join(told.split()) + by, room))


@command.command("show")
@click.argument("recipe")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved recipe as JSON.")
def show(recipe: str, as_json: bool) -> None:
    """Show the rules of RECIPE, a name or a file, with what it extends resolved."""
    from quantkit.recipe import load_recipe
    from quantkit.spec import tokens_of

    loaded = load_recipe(recipe)
    if as_json:
        print_json(loaded.snapshot())
        return
    click.echo(wrapped("name", loaded.name))
    if loaded.description:
        click.echo(wrapped("description", loaded.description))
    if (spec := loaded.calibration) is not None:
        click.echo(wrapped("calibration", f"{spec.windows} windows of {spec.window} "
                                          f"{tokens_of(', '.join(spec.texts))}, seed {spec.seed}"))
    for number, rule in enumerate(loaded.rules, 1):
        optional = " (need not match)" if rule.optional else ""
        click.echo(wrapped(f"rule {number}", f"{rule.match}{optional}: {_does(rule)}"))
    for number, candidate in enumerate(loaded.candidates, 1):
        click.echo(wrapped(f"candidate {number}", _does(candidate)))
    budget = " --budget 4.25bpw" if loaded.candidates else ""
    click.echo(f"{'next':<14}quantkit quantize SOURCE --recipe {quote(recipe)}{budget} --out OUT")


def _does(candidate: Candidate) -> str:
    if candidate.method is None or candidate.spec is None:
        return "kept as it is"
    options = "".join(f", {key} {value}" for key, value in candidate.options.items())
    instead = f", or where that doesn't fit {candidate.fallback}" if candidate.fallback else ""
    return f"{candidate.method}, {candidate.spec.label()}, format {candidate.format_name}{instead}{options}"
