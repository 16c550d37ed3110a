"""``quantkit quantize SOURCE --recipe NAME --out DIR``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.options import (
    LLAMA_CPP,
    LOADERS,
    TokenCount,
    command_line_again,
    device_option,
    layers_option,
    revision_option,
)
from quantkit.cli.present import group_layers, print_json, show_warning, table, wrapped
from quantkit.support.errors import UnsupportedModelError, UsageError
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    from quantkit.api.quantize import EngineName, QuantizeOrder
    from quantkit.checkpoint.manifest import CalibrationFacts, OutlineRecord
    from quantkit.quantization.budget.choose import BudgetChoice
    from quantkit.quantization.effort import Effort
    from quantkit.quantization.planning.plan import Plan, PlanRow
    from quantkit.quantization.recipe import CalibrationSpec, Recipe
    from quantkit.quantization.recovery import RecoveryText


@click.command("quantize")
@click.argument("source")
@click.option("--recipe", "-r", "recipe_name", metavar="NAME|FILE",
              help="A recipe's name (`quantkit recipes list`) or a YAML file. With --budget: the recipe "
                   "that lists the candidates (mixed).")
@click.option("--budget", metavar="SIZE",
              help="Measure what each layer costs at each width, and choose the best that fits: 4.25bpw "
                   "(stored bits a weight of all Linears) or 5GB (all tensors).")
@click.option("--for", "engine", type=click.Choice(["quantkit", *LOADERS, LLAMA_CPP]),
              help="The engine that must load the checkpoint: layers get its layouts, and what it reads only "
                   "plain stays 16-bit. (The recipe's, mostly quantkit.)")
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="DIR",
              help="The folder to create; it must not exist yet.")
@click.option("--dry-run", is_flag=True,
              help="Check every layer and print what would be done, with memory, disk and time; write "
                   "nothing.")
@layers_option("With --dry-run: show one row per layer instead of one per kind of layer.")
@revision_option
@click.option("--calibration", multiple=True, metavar="TEXT",
              help="Calibration text: a text file, a folder of them, a .jsonl or .parquet file of texts or"
                   " chats, `hub:OWNER/NAME[:SPLIT][:FILE]`, `builtin`, `self` (the model writes it), or"
                   " `random` (tokens drawn from the vocabulary, no text). May be repeated.")
@click.option("--window", type=TokenCount(8), help="Tokens in a calibration window: 2048, 2k (2,000), 2K "
                                                    "(2,048). (The recipe's, mostly 512.)")
@click.option("--windows", type=click.IntRange(min=1), help="Number of calibration windows. (The recipe's, "
                                                            "mostly 24.)")
@click.option("--packing", type=click.Choice(["auto", "stream", "documents"]),
              help="Cut windows anywhere (stream), or begin each with a document; auto does the latter for"
                   " chats only.")
@click.option("--avoid", multiple=True, metavar="FILE",
              help="A text that you will evaluate on. Calibration text that shares passages with it is "
                   "left out.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed that chooses the windows.")
@click.option("--effort", type=click.Choice(["fast", "default", "best"]),
              help="How much time it may take: fast calibrates on 12 windows, weighs no tokens and "
                   "leaves out what improves a solution; best calibrates on three times as many windows. "
                   "(The recipe's, mostly default.)")
@click.option("--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where layers are quantized: in this process, or on a Ray cluster (the one that "
                   "RAY_ADDRESS names, else this machine's cores).")
@device_option
@click.option("--strict", is_flag=True, help="Stop instead of falling back to another method or damping, and "
              "instead of leaving out rows of the calibration data.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan or the result as JSON.")
def command(source: str, recipe_name: str | None, budget: str | None, engine: EngineName | None,
            out: Path | None, dry_run: bool, layers: bool, revision: str | None,
            calibration: tuple[str, ...], window: int | None, windows: int | None, packing: str | None,
            avoid: tuple[str, ...], seed: int | None, effort: Effort | None, executor: str, device: str,
            strict: bool, quiet: bool, as_json: bool) -> None:
    """Quantize a model by a recipe, or to a size, and write a checkpoint.

    SOURCE is a local folder, a .gguf file, pkg:NAME, synthetic:NAME or a model on the hub. Finished
    layers are kept, so the same command resumes a run that was stopped.
    """
    from quantkit.api.quantize import calibration_changes, order_of
    from quantkit.checkpoint.writer import refuse_existing
    from quantkit.support.device import find_device

    again = command_line_again("out", "dry_run", "layers", "as_json")
    if out is None and not dry_run:
        raise UsageError("--out is missing", why="the checkpoint needs a folder",
                         next=f"{again} --out OUT, or --dry-run instead")
    if layers and not dry_run:
        raise UsageError("--layers is given without --dry-run", why="only a dry run shows a table of layers",
                         next=f"leave it out, or {again} --dry-run --layers")
    if recipe_name is None and budget is None:
        raise UsageError("neither --recipe nor --budget is given", why="one of them says how to quantize",
                         next=f"quantkit quantize {quote(source)} --budget 4.25bpw --out OUT, or a recipe of "
                              "`quantkit recipes list`")
    changes = calibration_changes(calibration, windows=windows, window=window, packing=packing, avoid=avoid,
                                  seed=seed)
    order = order_of(source, recipe_name, budget=budget, engine=engine, effort=effort, changes=changes,
                     device=device, executor=executor, revision=revision)
    choice = None
    if budget is not None:
        if not dry_run and out is not None:
            refuse_existing(out, source)
            order.check_machine()
            if find_device(order.device).type != "cpu":
                show_warning("what layers cost is measured on the CPU; they are solved on --device "
                             f"{order.device} then")
        with _terminate_is_interrupt(), ProgressLine(f"{source} in {budget}", quiet=quiet) as progress:
            choice = order.choose(progress, alone=dry_run)
    recipe = choice.recipe if choice else order.recipe
    if dry_run:
        plan, facts, text, others = _plan(source, recipe, revision, strict, quiet)
        _warn_of_no_effect(plan, order.calibration)
        if as_json:
            known = facts.model_dump(mode="json") if facts else None
            sizes = {engine: other.disk_bytes for engine, other in others.items()}
            print_json({"source": source, **plan.to_dict(), "calibration": known, "disk_bytes_for": sizes}
                       | ({"recovery": {"windows": len(text.tokens), "held_out": text.held_out,
                                        "sha256": text.sha256}} if text else {})
                       | ({"budget": choice.to_dict()} if choice else {}))
        else:
            click.echo(_layer_table(plan, each=layers))
            click.echo()
            if choice:
                _print_choice(choice)
            _print_calibration(plan, facts)
            if recipe.effort != "default":
                click.echo(wrapped("effort", recipe.effort))
            if text is not None:
                _print_recovery(plan, text)
            _print_sums(plan)
            _print_engines(plan, others)
            if executor == "local":
                _print_time(plan, order.device)
            click.echo(f"{'next':<14}{again} --out OUT")
        return
    assert out is not None
    _run(order, out, choice, strict, quiet, as_json)


def _plan(source: str, recipe: Recipe, revision: str | None,
          strict: bool, quiet: bool) -> tuple[Plan, CalibrationFacts | None, RecoveryText | None,
                                              dict[str, Plan]]:
    """The plan, its calibration and recovery text, and the plan for each other engine."""
    from quantkit.quantization.calibration.data import calibration_facts, prepare
    from quantkit.quantization.planning.plan import make_plan, plans_for_engines
    from quantkit.quantization.recovery import read_recovery_text
    from quantkit.quantization.solve import ModelOrigin
    from quantkit.sources.base import warn_if_quantized

    opened = ModelOrigin(source, revision, recipe).open()
    try:
        plan = make_plan(recipe, opened)
        warn_if_quantized(opened)
        with ProgressLine("calibration data", quiet=quiet) as progress:
            data = prepare(plan.calibration, opened, plan.widest_hessian, progress, strict)
            text = read_recovery_text(plan.recipe, opened, data, progress, strict)
            engines = [*LOADERS, LLAMA_CPP] if recipe.engine == "quantkit" else [recipe.engine]
            others = plans_for_engines(recipe, opened, engines)
            return plan, calibration_facts(plan.recipe.calibration, data), text, others
    finally:
        opened.close()


def _layer_table(plan: Plan, each: bool) -> str:
    """A row a kind of layer, or a row a layer (``each``)."""
    def done(row: PlanRow) -> tuple[str, ...]:
        return ("×".join(map(str, row.shape)), row.method or "kept", row.format or "-", _label(row),
                f"{row.bits:.2f}")

    rows = []
    for name, members in group_layers(plan.rows, lambda row: row.name, done, each=each):
        _, *cells = done(members[0])
        rows.append([name, str(len(members)), *cells, human_bytes(sum(row.bytes_before for row in members)),
                     human_bytes(sum(row.bytes_after for row in members))])
    headers = ["layer", "n", "method", "format", "spec", "bits", "before", "after"]
    if each:
        headers, rows = [headers[0], *headers[2:]], [[row[0], *row[2:]] for row in rows]
    return table(headers, rows,
                 right=[i for i, head in enumerate(headers) if head in ("n", "bits", "before", "after")])


def _print_calibration(plan: Plan, facts: CalibrationFacts | None) -> None:
    spec = plan.calibration
    if facts is None and spec is not None:
        windows = f"{spec.windows} windows of {spec.window} tokens, which the model writes first"
        click.echo(wrapped("calibration", windows))
    if facts is not None:
        click.echo(wrapped("calibration", _windows(facts)))
        for line in facts.coverage.lines() if facts.coverage else ():
            click.echo(wrapped("", line))


def _print_recovery(plan: Plan, text: RecoveryText) -> None:
    assert plan.recipe.recover is not None
    spec, (total, length) = plan.recipe.recover, text.tokens.shape
    options = "".join(f", {name} {value}" for name, value in spec.options.items())
    click.echo(wrapped("recovery", f"{spec.name}{options}: {total - text.held_out} training and "
                                   f"{text.held_out} held-out windows of {length} tokens"))


def _print_sums(plan: Plan) -> None:
    """What a dry run is run for, and so its end."""
    from quantkit.models.architecture import EMBEDDING, HEAD

    kept = "stay as they are" if plan.recipe.recover is None else "aren't quantized"
    plain = {*plan.other, *(f"{row.name}.weight" for row in plan.rows if row.method is None)}
    names = [word for word, layer in (("embedding", EMBEDDING), ("head", HEAD)) if f"{layer}.weight" in plain]
    click.echo(wrapped("bits/weight", f"{plan.bits_per_weight:.2f} over {plan.linears} Linear layers"))
    click.echo(wrapped("size", f"{_size(plan)}; of this {human_bytes(plan.kept_bytes)} {kept} "
                               f"({', '.join([*names, 'norms'])})"))
    _print_around(plan)
    click.echo(wrapped("peak memory", f"about {human_bytes(plan.peak_bytes)}"))
    click.echo(wrapped("disk needed", f"{human_bytes(plan.needed_disk_bytes)} while it runs, "
                                      f"{human_bytes(plan.disk_bytes)} when done"))


def _print_around(plan: Plan) -> None:
    """What a model of images and text has beside its text model."""
    if (outer := plan.outer) is not None:
        click.echo(wrapped("whole", f"a {outer.config['model_type']} model: its other {len(outer.rest)} "
                                    f"tensors, {human_bytes(outer.rest_bytes)}, are kept as they are"))


def _print_outline(record: OutlineRecord) -> None:
    """What of a model stays as it is whose mathematics isn't known, and who runs it then."""
    total = record.quantized + sum(record.kept.values())
    kept = [f"{why} {count / total:.1%}" for why, count in record.kept.items()]
    click.echo(wrapped("quantized", f"{record.quantized / total:.1%} of {total:,} parameters in matrices"))
    click.echo(wrapped("kept", "; ".join(kept) or "nothing"))
    if record.calibrated is not None:
        click.echo(wrapped("calibrated", f"through the modules of {record.calibrated}, a layer at a time; "
                                         "all tokens count the same"))
    click.echo(wrapped("engines", f"those that run {record.model_type} models and read compressed-tensors, "
                                  f"such as {record.readers}; quantkit doesn't know its mathematics"))


def _print_engines(plan: Plan, others: dict[str, Plan]) -> None:
    """Which engines load this checkpoint, and how large it is with ``--for`` another one."""
    if (record := plan.outline_record) is not None:
        _print_outline(record)
        return
    same = [engine for engine, other in others.items() if other.rows == plan.rows]
    click.echo(wrapped("engines", ", ".join(["quantkit", *same])))
    if sizes := [f"{engine} {human_bytes(other.disk_bytes)}" for engine, other in others.items()
                 if engine not in same]:
        click.echo(wrapped("with --for", ", ".join(sizes)))


def _size(plan: Plan) -> str:
    """``269 MB → 163 MB, 1.65 times smaller``: the model's files, and the checkpoint's tensors. Of a
    quantized file also what it is in memory, where it is dequantized."""
    from quantkit.support.units import times_smaller

    after, memory = plan.disk_bytes, plan.other_bytes + sum(row.bytes_before for row in plan.rows)
    text = (f"{human_bytes(plan.source_bytes)} → {human_bytes(after)}, "
            f"{times_smaller(plan.source_bytes, after)}")
    if memory > 1.5 * plan.source_bytes:
        text += (f" as a file; in memory {human_bytes(memory)} → {human_bytes(after)}, "
                 f"{times_smaller(memory, after)}")
    return text


def _print_time(plan: Plan, device: str) -> None:
    from quantkit.api.progress import human_seconds
    from quantkit.quantization.planning.duration import expected_seconds, operations
    from quantkit.support.device import find_device

    if find_device(device).type != "cpu" or (seconds := expected_seconds(plan, operations())) is None:
        return
    low, high = map(human_seconds, seconds)
    span = low if low == high else f"{low} to {high}"
    click.echo(wrapped("time", f"{span} on this CPU, by the speed of its arithmetic now"))


def _print_choice(choice: BudgetChoice) -> None:
    """What each kind of layer got, what that should cost, and what one width for all would."""
    click.echo(wrapped("budget", f"{choice.budget.text}: {choice.plan.bits_per_weight:.2f} bits/weight, "
                                 f"{human_bytes(choice.plan.disk_bytes)} of tensors"))
    cost = "error" if choice.by_weights else "KL"
    if choice.by_weights:
        click.echo(wrapped("error", f"{choice.kl:.3g} of the weights, squared, relative, added up over the "
                                    "layers; the model's mathematics isn't known here, so KL can't be "
                                    "predicted"))
    else:
        click.echo(wrapped("predicted KL", f"{choice.kl:.3g} nats a token on the calibration text"))
    rows = []
    for part in choice.parts():
        name = "/".join(name.rpartition(".")[2].removesuffix("_proj") for name in part.names)
        counts = [f"{count} {label}" for label, count in part.counts.items()]
        lines = [", ".join(counts[i:i + 3]) for i in range(0, len(counts), 3)]
        rows.append([name, f"{part.bits:.2f}", f"{part.kl:.2g}", lines[0]])
        rows += [["", "", "", more] for more in lines[1:]]
    click.echo(table(["layers", "bits", cost, "how many of each"], rows, right=(1, 2)))
    click.echo()
    click.echo(table(["one for all", "bits", cost, "size"],
                     [[uniform.label, f"{uniform.bits:.2f}", f"{uniform.kl:.2g}",
                       human_bytes(uniform.disk_bytes)]
                      for uniform in choice.uniform], right=(1, 2, 3)))
    click.echo()


def _windows(facts: CalibrationFacts) -> str:
    from quantkit.quantization.recipe import tokens_of

    return f"{facts.windows} windows of {facts.window} {tokens_of(facts.text)}"


def _warn_of_no_effect(plan: Plan, calibration: CalibrationSpec | None) -> None:
    if calibration is not None and not plan.calibrated:
        show_warning(f"options of calibration have no effect: recipe {plan.recipe.name!r} calibrates nothing")


def _label(row: PlanRow) -> str:
    return row.spec.label() if row.spec else row.dtype


def _run(order: QuantizeOrder, out: Path, choice: BudgetChoice | None, strict: bool, quiet: bool,
         as_json: bool) -> None:
    from quantkit.checkpoint.manifest import reached_experts

    source, name, revision = order.model, (choice.recipe if choice else order.recipe).name, order.revision
    if choice and not as_json:
        _print_choice(choice)
    with _terminate_is_interrupt(), ProgressLine(f"{source} by {name}", quiet=quiet) as progress:
        result = order.run(out, choice, strict, progress)
    _warn_of_no_effect(result.plan, order.calibration)
    for text in result.fallbacks:
        show_warning(text)
    if as_json:
        print_json(result.to_dict() | ({"budget": choice.to_dict()} if choice else {}))
        return
    plan = result.plan
    again = f", {result.resumed} units were there from before" if result.resumed else ""
    click.echo(wrapped("checkpoint", f"{result.out} ({result.seconds:.0f} s{again})"))
    click.echo(wrapped("bits/weight", f"{plan.bits_per_weight:.2f} over {plan.linears} Linear layers"))
    click.echo(wrapped("size", _size(plan)))
    _print_around(plan)
    if result.calibration is not None:
        click.echo(wrapped("calibration", _windows(result.calibration)))
    if (experts := reached_experts(result.rows)) is not None:
        click.echo(wrapped("experts", experts))
    if (recovery := result.recovery) is not None:
        after = f"{recovery.after:.3g}" if recovery.after is not None else "diverged"
        click.echo(wrapped("recovery", f"KL on held-out text {recovery.before:.3g} → {after} nats a token"
                                       f"{'' if recovery.kept else ', not kept'}"))
    click.echo(wrapped("fallbacks", f"{len(result.fallbacks)}, named above" if result.fallbacks else "none"))
    if (record := plan.outline_record) is not None:
        _print_outline(record)
        click.echo(f"{'next':<14}vllm serve {quote(str(result.out))}")
        return
    for_gguf = any((row.format or "").startswith("gguf-") for row in plan.rows)
    exports = for_gguf and _has_gguf(result.out)
    loads, refuse = (["llama.cpp once exported, see below"] * exports, []) if for_gguf else _engines(
        result.out)
    click.echo(wrapped("engines", ", ".join(["quantkit", *loads])
                       + (f"; not {', '.join(refuse)}, see below" if refuse else "")))
    # commands aren't folded: they are there to be copied
    at = f" --revision {quote(revision)}" if revision else ""
    click.echo(f"{'next':<14}quantkit eval {quote(source)} {quote(str(result.out))}{at}")
    click.echo(f"{'':<14}quantkit generate {quote(str(result.out))} \"The capital of France is\"")
    if exports:
        to = quote(f"{result.out}.gguf")
        click.echo(f"{'':<14}quantkit export {quote(str(result.out))} --to gguf {to}")
    elif refuse:
        click.echo(f"{'':<14}quantkit verify {quote(str(result.out))} --for {refuse[0]}")


def _engines(out: Path) -> tuple[list[str], list[str]]:
    """Which engines load the checkpoint on a GPU, and which refuse it."""
    from quantkit.checkpoint.engines import check_engine, sort_engines
    from quantkit.checkpoint.reader import Checkpoint

    with Checkpoint.open(out) as checkpoint:
        return sort_engines(lambda engine: check_engine(engine, checkpoint))


def _has_gguf(out: Path) -> bool:
    """Whether llama.cpp knows the family of a checkpoint."""
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.export.gguf.model_keys import model_keys
    from quantkit.models.architecture import parse_config

    with Checkpoint.open(out) as checkpoint:
        try:
            model_keys(parse_config(checkpoint.config()))
        except UnsupportedModelError:
            return False
    return True


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
