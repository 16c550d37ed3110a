"""``quantkit eval MODEL...``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.loading import loading_line
from quantkit.cli.options import (
    TokenCount,
    command_line_again,
    device_option,
    dtype_option,
    kv_option,
    read_kv,
    tokens_option,
    verify_option,
)
from quantkit.cli.present import note, table, width, wrapped
from quantkit.support.errors import FAILED, PluginError, UsageError

if TYPE_CHECKING:
    from quantkit.evaluation.gates.result import GateCheck, GateResult
    from quantkit.evaluation.settings import EvalSettings

_MARKS = {True: "ok", False: "FAIL"}


@click.command("eval")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--text", metavar="FILE", help="UTF-8 text, `builtin` (CPython's language reference), or "
                                             "hf://datasets/OWNER/NAME/FILE@REVISION.")
@click.option("--recipe", "-r", "recipes", multiple=True, metavar="LIST",
              help="Quantize MODEL by these recipes first, into DIR/checkpoints, and compare the results "
                   "with MODEL: int8,int4.")
@click.option("--suite", metavar="NAME", help="What is measured: quick, standard, long, or a YAML file. "
                                              "Options given here override it.")
@click.option("--window", type=TokenCount(2), help="Tokens in a window: 2048, 2k (2,000), 2K (2,048). (512.)")
@click.option("--windows", type=click.IntRange(min=1), help="Number of windows (40).")
@dtype_option
@device_option
@verify_option
@click.option("--noise-floor", is_flag=True, help="Also compare with the first model in float32 arithmetic.")
@click.option("--no-speed", is_flag=True, help="Quality only.")
@kv_option("KV settings; every model runs with each of them: none,int8,\"window(512, sinks=4)\". (Each "
           "model's own.)")
@tokens_option("--prompt-tokens", "Prompt tokens of a window, with KV settings: they go through the cache "
                                  "and aren't scored (default: half).")
@click.option("--tasks", metavar="LIST", help="Also run these lm-eval tasks: arc_easy,piqa, or YAML files.")
@click.option("--task-data", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="The folder with the tasks' JSONL files. [env: QUANTKIT_TASK_DATA]",
              envvar="QUANTKIT_TASK_DATA")
@click.option("--limit", type=click.IntRange(min=1), help="Largest number of items of each task.")
@tokens_option("--prefill", "Prompt tokens of the speed test. (256; with KV settings, enough to fill the "
                            "window.)")
@click.option("--max-tokens", "-n", type=TokenCount(), help="New tokens of the speed test. (32.)")
@click.option("--repeats", type=click.IntRange(min=1), help="Timed runs (3).")
@click.option("--peer", multiple=True, metavar="TOOL",
              help="Another tool's row, may be repeated: \"llama.cpp(FILE.gguf)\", \"transformers(FOLDER)\", "
                   "\"openai(URL)\".")
@click.option("--gate", metavar="CONDITIONS",
              help='Exit with 1 if a variant misses one: "kl<0.01,flips<2%,arc_easy>-1%,decode>1.2x".')
@click.option("--gate-strict", is_flag=True, help="The whole 95% interval must meet a condition.")
@click.option("--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where measurements are made; ray: on the cluster of RAY_ADDRESS, or on this machine.")
@click.option("--fresh", is_flag=True, help="With --out, measure anew what was measured before.")
@click.option("--revision", metavar="REV",
              help="Branch, tag or commit of the first model, if it is on the hub.")
@click.option("--out", "-o", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Also write report.html, report.md, frontier.svg and .png, results.json and what plugins "
                   "report there; what is measured is kept, and after a stop the same command goes on.")
@click.option("--report", multiple=True, metavar="LIST",
              help="Reporters. With --out, only their files are written. Without it, the one that is named "
                   "prints in place of the table.")
@click.option("--plot", metavar="LIST", help="Metrics that frontier.svg also shows, against bytes.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def command(ctx: click.Context, models: tuple[str, ...], text: str | None, suite: str | None,
            window: int | None, windows: int | None, dtype: str, device: str, verify: bool,
            noise_floor: bool, no_speed: bool, kv: tuple[str, ...], prompt_tokens: int | None,
            tasks: str | None, task_data: Path | None, limit: int | None, prefill: int | None,
            max_tokens: int | None, repeats: int | None, executor: str, peer: tuple[str, ...],
            gate: str | None, gate_strict: bool, fresh: bool, recipes: tuple[str, ...],
            revision: str | None, out: Path | None, report: tuple[str, ...], plot: str | None, quiet: bool,
            as_json: bool) -> None:
    """Compare models and KV cache settings by quality, speed and memory.

    MODEL is a checkpoint or anything that `quantkit quantize` takes. The first model with the first KV
    setting is the reference of KL and top-1 agreement.
    """
    from quantkit.api.evaluate import chosen_settings
    from quantkit.evaluation.gates.check import check_gate, check_planned
    from quantkit.evaluation.gates.syntax import SPEEDS, parse_gate
    from quantkit.evaluation.peers.run import parse_peer
    from quantkit.evaluation.report.folder import check_writable, reporters, write_report
    from quantkit.evaluation.run import check_plot, evaluate
    from quantkit.evaluation.settings import of_suite
    from quantkit.evaluation.speed.machine_load import busy_now
    from quantkit.evaluation.suite import load_suite
    from quantkit.evaluation.tasks.file import find_task
    from quantkit.executor.ray import check_executor
    from quantkit.support.device import find_device

    settings_of_kv = read_kv(kv)
    conditions = parse_gate(gate) if gate is not None else ()
    for tool in peer:
        parse_peer(tool)
    names = _listed(",".join(report), "--report", "table") if report else None
    printed = _printed(names, out, as_json)
    if names is not None:
        reporters(names)
    if out is not None:
        check_writable(out)
    if verify:
        _verify(models, revision, quiet)
    given: dict[str, Any] = {
        "text": text, "window": window, "windows": windows, "prefill": prefill, "decode": max_tokens,
        "repeats": repeats, "prompt": prompt_tokens, "limit": limit, "task_data": task_data,
        "tasks": tuple(name.strip() for name in tasks.split(",")) if tasks else None}
    settings = chosen_settings(
        suite, given, speed=not no_speed, dtype=dtype, device=device, noise_floor=noise_floor,
        revision=revision, keep=out is not None, fresh=fresh, kv=settings_of_kv, peers=peer,
        needs_speed=next((condition.text for condition in conditions
                          if condition.key in (*SPEEDS, "peak_bytes")), None),
        plot=_listed(plot, "--plot", "kl_mean") if plot is not None else ())
    if suite and not quiet and not settings.tasks and of_suite(load_suite(suite)).tasks:
        note(f"suite {settings.suite}: its tasks are left out; --task-data DIR says where their data is")
    check_planned(conditions, speed=settings.speed, texts=[text.name for text in settings.texts],
                  tasks=[find_task(name)[0].task for name in settings.tasks],
                  candidates=len(models) * max(1, len(settings.kv)) - 1 + len(peer) + bool(recipes))
    check_plot(settings)
    check_executor(executor, find_device(device), gpus=True)
    if settings.speed and not quiet and (busy := busy_now()):
        note(busy)
    variants = _made(models, recipes, settings, out, quiet)
    with loading_line("models", quiet) as loading, ProgressLine("evaluating", quiet) as progress:
        result = evaluate([*models, *variants], settings, progress,
                          command_line_again("quiet", "as_json", "fresh"), loading,
                          executor=executor, recipes=variants,
                          announce=(lambda text: None) if quiet else note)
    if conditions:
        result.gate = check_gate(result, gate or "", strict=gate_strict)
    try:
        content = reporters([printed])[0].content(result)
    except PluginError:  # what was measured isn't lost with it
        click.echo(reporters(["table"])[0].content(result), nl=False)
        raise
    click.echo(content, nl=False)
    if out is not None:
        for path in write_report(result, out, names):
            note(f"wrote {path}")
    if result.gate is not None:
        note(gate_text(result.gate).rstrip())
        if not result.gate.passed:
            ctx.exit(FAILED)


def _made(models: Sequence[str], recipes: Sequence[str], settings: EvalSettings, out: Path | None,
          quiet: bool) -> dict[str, str]:
    """Say what lies ahead, and quantize what is missing; checkpoint → the recipe that made it."""
    from quantkit.api.progress import human_seconds
    from quantkit.evaluation.sweep.ahead import look_ahead
    from quantkit.evaluation.sweep.checkpoints import folders_of, made

    names = ",".join(recipes)
    if recipes and (out is None or len(models) > 1):
        raise UsageError("--recipe takes one MODEL and --out DIR", next="quantkit eval MODEL --recipe "
                         f"{names} --out DIR", why="its checkpoints are made in DIR/checkpoints")
    folders = {}
    if recipes and out is not None:
        folders = folders_of(_listed(names, "--recipe", "int8,int4"), out / "checkpoints")
    if out is not None:  # also with --quiet: what can't be done shows before anything is
        ahead = look_ahead(models, settings, folders)
    if out is not None and not quiet:
        note(f"{ahead.sentence()}; about {human_seconds(ahead.seconds)}")
    for recipe, folder in folders.items():
        with ProgressLine(f"quantizing to {recipe}", quiet) as progress:
            made(models[0], recipe, folder, revision=settings.revision, progress=progress,
                 device=settings.device)
    return {str(folder): folder.name for folder in folders.values()}


def _listed(text: str, option: str, example: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} {text[:80]!r} has an empty name", next=f"{option} {example}",
                         why="it is a list of names, separated by commas")
    return names


def _printed(names: tuple[str, ...] | None, out: Path | None, as_json: bool) -> str:
    """Which reporter's text goes to stdout."""
    if names is None or out is not None:
        return "json" if as_json else "table"
    if as_json or len(names) > 1:
        raise UsageError("--json and --report both print" if as_json
                         else "several reporters can't print at once",
                         next="add --out DIR, and each is written to its file there")
    return names[0]


def _verify(models: Sequence[str], revision: str | None, quiet: bool) -> None:
    """Check all bytes of the models that are checkpoints of ours. Raises CheckpointError for damage."""
    from quantkit.checkpoint.integrity import check_files
    from quantkit.checkpoint.open import open_model
    from quantkit.checkpoint.reader import Checkpoint

    for index, model in enumerate(models):
        opened = open_model(model, None if index else revision)
        try:
            if isinstance(opened, Checkpoint):
                with ProgressLine(f"verifying {model}", quiet) as progress:
                    check_files(opened, progress)
            elif not quiet:
                note(f"{model} isn't verified: only checkpoints of quantkit record their files' hashes")
        finally:
            opened.close()


def gate_text(gate: GateResult) -> str:
    """A table of all checks, and a sentence for each that failed or is uncertain."""
    from quantkit.evaluation.report.gates import amount, explained, interval

    rows = [[_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""), check.variant,
             _condition(check), amount(check.value, check), interval(check)] for check in gate.checks]
    lines = [table(["", "variant", "condition", "value", "95%"], rows, right=(3,), shrink=1)]
    remarkable = [check for check in gate.checks if not check.passed or check.verdict == "uncertain"]
    if remarkable:
        lines += ["", *(wrapped(_MARKS[check.passed] + ("?" if check.verdict == "uncertain" else ""),
                                explained(check, gate.strict), 7) for check in remarkable)]
    failed, total = len(gate.failed), len(gate.checks)
    outcome = f"failed: {failed} of {total} checks" if failed else f"passed: {total} " + (
        "check" if total == 1 else "checks")
    return "\n".join([*lines, "", wrapped("gate", outcome + (", strict" if gate.strict else ""), 7)])


def _condition(check: GateCheck) -> str:
    """The condition without the variant that stands beside it, at most a third of the line."""
    text = check.condition.rpartition(":")[2]
    room = width() // 3
    return text if len(text) <= room else text[:room - 1] + "…"
