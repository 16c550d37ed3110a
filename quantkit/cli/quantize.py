"""``quantkit quantize SOURCE --recipe NAME --out DIR``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.cli.present import human_bytes, print_json, show_warning, table, wrapped
from quantkit.cli.progress import Progress
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.checkpoint.manifest import CalibrationFacts
    from quantkit.plan import Plan, PlanRow
    from quantkit.recipe import Recipe
    from quantkit.spec import CalibrationSpec


@click.command("quantize")
@click.argument("source")
@click.option("--recipe", "-r", "recipe_name", required=True, metavar="NAME|FILE",
              help="A recipe's name (`quantkit recipes list`) or a YAML file.")
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="DIR",
              help="The folder to make; it must not exist yet.")
@click.option("--dry-run", is_flag=True,
              help="Check every layer and print what would be done, memory and disk included; do nothing.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a model on the hub.")
@click.option("--calibration", multiple=True, metavar="TEXT",
              help="What calibrated methods see: a text file, a folder of them, a .jsonl or .parquet file of "
                   "texts or chats, hub:OWNER/NAME[:SPLIT][:FILE], `builtin`, or `self` (the model writes "
                   "it). Can be given several times.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Windows of that text.")
@click.option("--length", type=click.IntRange(min=8), metavar="N", help="Tokens a window.")
@click.option("--packing", type=click.Choice(["auto", "stream", "documents"]),
              help="Cut windows anywhere, or let each begin with a document; by default that for chats only.")
@click.option("--avoid", multiple=True, metavar="FILE",
              help="A text that will be evaluated on: what shares passages with it isn't calibrated on.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Chooses the windows.")
@click.option("--strict", is_flag=True, help="Stop instead of falling back to another method or damping.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan or the result as JSON.")
def command(source: str, recipe_name: str, out: Path | None, dry_run: bool, revision: str | None,
            calibration: tuple[str, ...], samples: int | None, length: int | None, packing: str | None,
            avoid: tuple[str, ...], seed: int | None, strict: bool, quiet: bool, as_json: bool) -> None:
    """Quantize a model by a recipe into a checkpoint.

    SOURCE is a local folder, a .gguf file, pkg:NAME, synthetic:NAME or a model on the hub. Finished
    layers are kept: a run that was stopped goes on where it was when the same command is run again.
    """
    from quantkit.recipe import load_recipe

    recipe = load_recipe(recipe_name)
    changes = {"text": calibration[0] if len(calibration) == 1 else calibration or None, "samples": samples,
               "length": length, "packing": packing, "avoid": avoid or None, "seed": seed}
    spec = _calibration(recipe, {key: value for key, value in changes.items() if value is not None})
    if dry_run:
        plan, facts = _plan(source, recipe, revision, spec, quiet)
        _warn_of_no_effect(plan, spec)
        if as_json:
            known = facts.model_dump(mode="json") if facts else None
            print_json({"source": source, **plan.to_dict(), "calibration": known})
        else:
            _print_plan(plan, facts, source, recipe_name)
        return
    if out is None:
        raise UsageError("--out is missing", why="the checkpoint needs a folder",
                         next=f"quantkit quantize {quote(source)} --recipe {quote(recipe_name)} "
                              "--out OUT, or --dry-run instead")
    _run(source, recipe_name, out, revision, spec, strict, quiet, as_json)


def _calibration(recipe: Recipe, changes: dict[str, Any]) -> CalibrationSpec | None:
    """The recipe's calibration with what the command line changes; ``None`` when it changes nothing."""
    from pydantic import ValidationError

    from quantkit.spec import CalibrationSpec

    if not changes:
        return None
    try:
        return CalibrationSpec(**(recipe.calibration or CalibrationSpec()).model_dump() | changes)
    except ValidationError as error:
        why = error.errors()[-1]["msg"].removeprefix("Value error, ")
        raise UsageError("these options of calibration can't be", why=why,
                         next="quantkit quantize --help") from None


def _plan(source: str, recipe: Recipe, revision: str | None, calibration: CalibrationSpec | None,
          quiet: bool) -> tuple[Plan, CalibrationFacts | None]:
    from quantkit.calibrate.prepare import prepare
    from quantkit.plan import make_plan, with_own_head
    from quantkit.quantize import calibration_facts
    from quantkit.sources.base import open_source

    if calibration is not None:
        recipe = recipe.model_copy(update={"calibration": calibration})
    opened = open_source(source, revision)
    try:
        plan = make_plan(recipe, with_own_head(recipe, opened))
        with Progress("calibration data", quiet=quiet) as progress:
            return plan, calibration_facts(plan, prepare(plan, opened, progress))
    finally:
        opened.close()


def _print_plan(plan: Plan, facts: CalibrationFacts | None, source: str, recipe_name: str) -> None:
    rows = [[row.name.removeprefix("model.layers."), row.method or "kept", row.format or "-", _label(row),
             f"{row.bits:.2f}", human_bytes(row.bytes_before), human_bytes(row.bytes_after)]
            for row in plan.rows]
    click.echo(table(["layer", "method", "format", "spec", "bits", "before", "after"], rows, right=(4, 5, 6)))
    before = plan.other_bytes + sum(row.bytes_before for row in plan.rows)
    click.echo()
    click.echo(wrapped("bits/weight", f"{plan.bits_per_weight:.2f} over {len(plan.rows)} Linear layers"))
    click.echo(wrapped("size", f"{human_bytes(before)} → {human_bytes(plan.disk_bytes)}, of which "
                               f"{human_bytes(plan.other_bytes)} stay as they are (embeddings, norms)"))
    click.echo(wrapped("peak memory", f"about {human_bytes(plan.peak_bytes)}"))
    click.echo(wrapped("disk needed", f"{human_bytes(plan.needed_disk_bytes)} while it runs, "
                                      f"{human_bytes(plan.disk_bytes)} when done"))
    spec = plan.recipe.calibration
    if facts is None and plan.calibrated and spec is not None:
        windows = f"{spec.samples} windows of {spec.length} tokens, which the model writes first"
        click.echo(wrapped("calibration", windows))
    if facts is not None:
        click.echo(wrapped("calibration", _windows(facts)))
        for line in facts.coverage.lines() if facts.coverage else ():
            click.echo(wrapped("", line))
    click.echo(f"{'next':<14}quantkit quantize {quote(source)} --recipe {quote(recipe_name)} --out OUT")


def _windows(facts: CalibrationFacts) -> str:
    return f"{facts.samples} windows of {facts.length} tokens of {facts.text}"


def _warn_of_no_effect(plan: Plan, calibration: CalibrationSpec | None) -> None:
    if calibration is not None and not plan.calibrated:
        show_warning(f"options of calibration have no effect: recipe {plan.recipe.name!r} calibrates nothing")


def _label(row: PlanRow) -> str:
    return row.spec.label() if row.spec else row.dtype


def _run(source: str, recipe: str, out: Path, revision: str | None, calibration: CalibrationSpec | None,
         strict: bool, quiet: bool, as_json: bool) -> None:
    from quantkit.quantize import quantize

    with _terminate_is_interrupt(), Progress(f"{source} by {recipe}", quiet=quiet) as progress:
        result = quantize(source, recipe, out, revision=revision, calibration=calibration, strict=strict,
                          progress=progress)
    _warn_of_no_effect(result.plan, calibration)
    for text in result.fallbacks:
        show_warning(text)
    if as_json:
        print_json(result.to_dict())
        return
    plan = result.plan
    before = plan.other_bytes + sum(row.bytes_before for row in plan.rows)
    again = f", {result.resumed} units were there from before" if result.resumed else ""
    click.echo(wrapped("checkpoint", f"{result.out} ({result.seconds:.0f} s{again})"))
    click.echo(wrapped("bits/weight", f"{plan.bits_per_weight:.2f} over {len(plan.rows)} Linear layers"))
    click.echo(wrapped("size", f"{human_bytes(before)} → {human_bytes(plan.disk_bytes)}"))
    if result.calibration is not None:
        click.echo(wrapped("calibration", _windows(result.calibration)))
    click.echo(wrapped("fallbacks", f"{len(result.fallbacks)}, named above" if result.fallbacks else "none"))
    # commands aren't folded: they are there to be copied
    click.echo(f"{'next':<14}quantkit eval {quote(source)} {quote(str(result.out))}")
    click.echo(f"{'':<14}quantkit generate {quote(str(result.out))} \"The capital of France is\"")


@contextmanager
def _terminate_is_interrupt() -> Iterator[None]:
    """A polite kill stops as Ctrl-C does: what is finished is kept, the exit code says resumable."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
