"""``quantkit recipes list`` and ``quantkit recipes show NAME``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.options import LLAMA_CPP, LOADERS
from quantkit.cli.present import print_json, table, wrapped
from quantkit.support.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.quantization.recipe import Candidate, Recipe
    from quantkit.sources.base import ModelSource

USUAL = "synthetic:llama-1b"
"""The model whose shapes are planned for: Llama's, with its head tied to the embedding."""
START = {
    "int4": "4 bits, and more where errors cost most",
    "int5-asym": "answers that hardly change",
    "int8-gptq": "the same answers as the original's",
    "int8": "needs no text and only seconds",
    "int4-asym": "4 bits in all layers, smaller",
    "gguf-q4_k_m": "for llama.cpp, Ollama and LM Studio",
}
"""Where to start → for what; docs/recipes.md has the measurements."""


@click.group("recipes")
def command() -> None:
    """List and show recipes."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects as JSON.")
def list_(as_json: bool) -> None:
    """List every recipe that can be named: its size, what it costs, what it needs and who loads it.

    Bits are stored bits a weight. KL is what the recipe cost a small model (SmolLM2-135M) in nats a token;
    lower is better, and on another model only the order is a hint. Text is what calibration needs: `text` (a
    passage of each kind ships with quantkit), `random` tokens, or none. All recipes run in quantkit; for the
    engines named, `quantize --for ENGINE` makes a checkpoint that they load on a GPU, where the model's
    shapes allow it.
    """
    from quantkit.quantization.recipe import list_recipes

    recipes = list_recipes()
    facts = facts_of_all([info.name for info in recipes if not info.error])
    if as_json:
        print_json([{"name": i.name, "description": i.description, "owner": i.owner, "path": str(i.path),
                     "error": i.error, "facts": asdict(facts[i.name]) if i.name in facts else None}
                    for i in recipes])
        return
    click.echo("start here")
    for name, purpose in START.items():
        click.echo(f"  {name:<13}{purpose}")
    click.echo()
    known = sorted(facts.items(), key=lambda item: (-(item[1].bits or 0), item[1].kl or 0, item[0]))
    rows = [[name, f"{fact.bits:.2f}" if fact.bits else "chosen",
             "" if fact.kl is None else f"{fact.kl:.2g}", fact.calibration, " ".join(fact.engines)]
            for name, fact in known]
    click.echo(table(["recipe", "bits", "KL", "text", "engines beside quantkit"], rows, right=(1, 2),
                     shrink=4))
    for info in recipes:
        if info.name not in facts:
            click.echo(wrapped(info.name, " ".join(f"unusable: {info.error}".split()) if info.error
                               else info.description, len(info.name) + 2))
        elif info.owner != "quantkit":
            click.echo(wrapped(info.name, f"is of {info.owner}", len(info.name) + 2))
    click.echo("\n  KL is that of SmolLM2-135M; for another model only the order is a hint.")
    click.echo(f"\n{'next':<14}quantkit recipes show NAME")
    click.echo(f"{'':<14}quantkit quantize SOURCE --recipe NAME --dry-run")


@command.command("show")
@click.argument("recipe")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved recipe as JSON.")
def show(recipe: str, as_json: bool) -> None:
    """Show the rules of RECIPE, a name or a file, with what it extends resolved."""
    from quantkit.quantization.recipe import load_recipe, tokens_of

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
        limits = [" (need not match)"] if rule.optional else []
        if rule.tied is not None:
            limits.append(" where it is the head too" if rule.tied else " beside a head")
        click.echo(wrapped(f"rule {number}", f"{rule.match}{''.join(limits)}: {_does(rule)}"))
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


@dataclass(frozen=True)
class RecipeFacts:
    """What is said of a recipe.

    Attributes:
        bits: stored bits a weight of the decoder's Linears; ``None`` where a budget decides.
        kl: nats a token that it cost the model of :mod:`quantkit.capacity_search.losses`, if it was measured.
        calibration: ``text``, ``random`` (tokens), or ``none``.
        engines: the engines beside quantkit for which ``--for`` makes a checkpoint that they load on a GPU.
    """

    bits: float | None
    kl: float | None
    calibration: str
    engines: tuple[str, ...]


def recipe_facts(recipe: Recipe, source: ModelSource) -> RecipeFacts:
    """Plan the recipe for ``source``, which is :data:`USUAL`; nothing is read or computed."""
    from quantkit.capacity_search.losses import losses
    from quantkit.quantization.planning.plan import make_plan, plans_for_engines
    from quantkit.quantization.transforms.base import with_own_head

    kl = losses().of_weights(recipe.name)
    if recipe.candidates:
        return RecipeFacts(None, kl, "text", ())
    source = with_own_head(recipe, source)
    plans = plans_for_engines(recipe, source, ["quantkit", *LOADERS, LLAMA_CPP])
    plan = plans.pop("quantkit", None) or make_plan(recipe, source)  # which says why there is none
    rows = [row for row in plan.rows if row.layer is not None]
    bits = 8 * sum(row.bytes_after for row in rows) / sum(row.shape[0] * row.shape[1] for row in rows)
    spec = plan.calibration
    calibration = "none" if spec is None else "random" if spec.text == "random" else "text"
    return RecipeFacts(bits, kl, calibration, tuple(plans))


def facts_of_all(names: list[str]) -> dict[str, RecipeFacts]:
    """By name, of all recipes that fit the usual model."""
    from quantkit.quantization.recipe import load_recipe
    from quantkit.sources.open import open_source

    facts: dict[str, RecipeFacts] = {}
    source = open_source(USUAL)
    try:
        for name in names:
            try:
                facts[name] = recipe_facts(load_recipe(name), source)
            except QuantkitError:  # it is made for other models, or a file is broken
                continue
    finally:
        source.close()
    return facts
