"""``quantkit bench drafts MODEL``."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from quantkit.cli.bench_output import show, write
from quantkit.cli.loading import load_model
from quantkit.cli.options import device_option, kv_option, read_kv, temperature_option
from quantkit.cli.present import table
from quantkit.cli.progress import ProgressLine
from quantkit.cli.tokens import TokenCount


@click.command("drafts")
@click.argument("model")
@click.option("--draft", "drafters", multiple=True, default=("ngram",), show_default=True, metavar="DRAFTER",
              help="What drafts: ngram, \"self(CHECKPOINT)\"; may be repeated.")
@kv_option("KV setting, one only. (The model's own.)")
@click.option("--max-tokens", "-n", type=TokenCount(2), default=200, show_default=True,
              help="New tokens of an answer.")
@temperature_option
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs.")
@device_option
@click.option("--out", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the JSON there, after every task.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def drafts(model: str, drafters: tuple[str, ...], kv: tuple[str, ...], max_tokens: int, temperature: float,
           repeats: int, device: str, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Measure what drafts gain on a chat, an edit of code and a summary.

    Each answer is generated without drafts and with each drafter in turns; the tokens are compared. `gain`
    is the speed with drafts over that without in the same turn, with its range; `right` counts drafted tokens
    that were right, of all.
    """
    from quantkit.evaluation.bench.drafts import DraftSettings, bench_drafts, lines
    from quantkit.runtime.drafting.base import parse_drafter
    from quantkit.runtime.sampler import Sampling

    for drafter in drafters:  # refused before anything is loaded
        parse_drafter(drafter)
    Sampling(temperature=temperature)
    (setting,) = read_kv(kv, limit=1) or (None,)
    settings = DraftSettings(drafters, max_tokens, repeats, temperature, setting)
    loaded = load_model(model, device=device, quiet=quiet)
    with ProgressLine("measuring", quiet) as progress:
        report = bench_drafts(loaded, settings, progress, lambda report: write(report, out))
    text = table(("task", "drafter", "tok/s", "gain", "tokens/step", "right"), lines(report),
                 right=(2, 3, 4, 5))
    show(report, f"{text}\n\n{report['label']}, kv {report['kv']}", out, as_json)
