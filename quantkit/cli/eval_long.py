"""``quantkit eval-long MODEL``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.loading import loading_line
from quantkit.cli.options import (
    TokenCount,
    TokenCounts,
    device_option,
    dtype_option,
    kv_option,
    read_kv,
    revision_option,
    tokens_option,
)
from quantkit.cli.present import note

if TYPE_CHECKING:
    from quantkit.evaluation.long.answer import When

_DEFAULT = "passkey,needle,multikey,variables,positions,generated"


@click.command("eval-long")
@click.argument("model")
@kv_option('KV settings to compare with the full cache: int8,"snapkv(0.5)+int4". (The model\'s own.)')
@click.option("--tasks", metavar="LIST", default=_DEFAULT, show_default=True, help="Tasks to run.")
@click.option("--context", type=TokenCounts(), metavar="LIST", default="1024,2048,4096", show_default=True,
              help="Tokens of a context with its question and answer: 4096,8k,32K; also the "
                   "borders of positions.")
@click.option("--depths", type=click.IntRange(min=1), default=5, show_default=True,
              help="Number of places from the beginning to the end where an answer is hidden.")
@click.option("--samples", type=click.IntRange(min=1), default=2, show_default=True,
              help="Contexts of each size (and depth), and texts that are read and generated.")
@click.option("--question", type=click.Choice(["both", "known", "later"]), default="both", show_default=True,
              help="known: policies run at the end of a prompt that contains the question; later: before "
                   "the question comes.")
@click.option("--text", metavar="FILE", default="builtin", show_default=True,
              help="UTF-8 text to read and to hide facts in, or hf://datasets/OWNER/NAME/FILE@REVISION.")
@click.option("--filler", is_flag=True, help="Hide facts in generated sentences instead of the text.")
@click.option("--chat", is_flag=True, help="Ask with the chat template; without it the user's text is "
                                           "continued.")
@tokens_option("--prompt-tokens", "For positions and generated: prompt tokens of a text.", default=512)
@click.option("--max-tokens", "-n", type=TokenCount(), default=128, show_default=True,
              help="For generated: new tokens of a text.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Seed for names, numbers, places and text.")
@dtype_option
@device_option
@revision_option
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Also write report.md and results.json there; after a stop the same command goes on.")
@click.option("--fresh", is_flag=True, help="With --out, measure anew what was measured before.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(model: str, kv: tuple[str, ...], tasks: str, context: tuple[int, ...], depths: int, samples: int,
            question: str, text: str, filler: bool, chat: bool, prompt_tokens: int, max_tokens: int,
            seed: int, dtype: str, device: str, revision: str | None, out: Path | None, fresh: bool,
            quiet: bool, as_json: bool) -> None:
    """Compare KV cache settings on long contexts.

    MODEL is a checkpoint or anything that `quantkit quantize` takes. The full cache always runs first,
    because a question that it can't answer says nothing about the other settings.
    """
    from quantkit.evaluation.long.run import LongSettings, evaluate_long
    from quantkit.evaluation.report import long
    from quantkit.evaluation.report.folder import check_writable
    from quantkit.support.device import find_device

    find_device(device)
    if out is not None:
        check_writable(out)
    whens: dict[str, tuple[When, ...]] = {"both": ("known", "later"), "known": ("known",),
                                          "later": ("later",)}
    settings = LongSettings(
        kv=read_kv(kv),
        tasks=tuple(name.strip() for name in tasks.split(",")), lengths=context, depths=depths,
        samples=samples, text=text, filler=filler, chat=chat, questions=whens[question], prompt=prompt_tokens,
        new_tokens=max_tokens, seed=seed, dtype=dtype, device=device, revision=revision,
        keep=out is not None, fresh=fresh)
    with loading_line("model", quiet) as loading, ProgressLine("evaluating", quiet) as progress:
        result = evaluate_long(model, settings, progress, loading)
    click.echo(long.as_json(result) if as_json else long.table(result), nl=False)
    if out is not None:
        for path in long.write(result, out):
            note(f"wrote {path}")
