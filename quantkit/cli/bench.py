"""``quantkit bench``: measures this machine, its kernels and how fast it runs a model."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.loading import load_model
from quantkit.cli.options import (
    TokenCount,
    TokenCounts,
    device_option,
    kv_option,
    read_kv,
    temperature_option,
    tokens_option,
)
from quantkit.cli.present import note, print_json, table
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import ProgressEvent
from quantkit.support.units import human_bytes


@click.group("bench")
def command() -> None:
    """Measure this machine: its kernels, or how fast it runs a model."""


@command.command("kernels")
@click.option("--shape", "shapes", multiple=True, metavar="OUTxIN", default=("4096x4096", "4096x14336"),
              show_default=True, help="Shape of weights; may be repeated.")
@click.option("--rows", default="1,8,512", show_default=True, metavar="LIST", help="Rows of activations.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs.")
@click.option("--aot", is_flag=True,
              help="Measure nothing: compile all GPU kernels, and check them.")
@click.option("--target", "targets", multiple=True, metavar="GPU",
              help="With --aot: a GPU to compile for, such as sm_90; may be repeated. By default all.")
@click.option("--out", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the JSON there.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def kernels(ctx: click.Context, shapes: tuple[str, ...], rows: str, repeats: int, aot: bool,
            targets: tuple[str, ...], out: Path | None, quiet: bool, as_json: bool) -> None:
    """Measure the matrix products of the CPU kernels.

    GB/s counts the packed weights, and `of read` is their share of the bandwidth at which all threads read
    memory. GMAC/s is billions of multiply-adds a second, and `of products` is their share of what all threads
    do without memory. Both ceilings are medians of measurements between the timed runs.

    With --aot the command compiles every GPU kernel for every supported GPU instead, and shows registers,
    spills and shared memory. That takes minutes and needs no GPU. The exit code is 1 if a kernel has a fault.
    """
    if aot:
        compiled, text = compile_kernels(quiet, targets)
        print_report(compiled, text, out, as_json)
        ctx.exit(1 if compiled["faults"] else 0)
    if targets:
        raise UsageError("--target without --aot", why="what is measured runs on this machine",
                         next=f"quantkit bench kernels --aot --target {targets[0]}")
    from quantkit.evaluation.bench.kernels import bench_kernels, lines

    with ProgressLine("measuring", quiet) as progress:
        report = bench_kernels([_shape(shape) for shape in shapes], _numbers("--rows", rows, 1), repeats,
                               progress)
    text = table(("format", "shape", "rows", "GB/s", "of read", "GMAC/s", "of products"), list(lines(report)),
                 right=(2, 3, 4, 5, 6))
    for case in report["left_out"]:
        text += "\n" * (2 if case is report["left_out"][0] else 1) + (
            f"left out: {case['format']} {case['shape'][0]}x{case['shape'][1]}, "
            f"{case['why'].partition(';')[0]}")
    show(report, text, out, as_json)


@command.command("decode")
@click.argument("model")
@click.option("--batch", default="1", show_default=True, metavar="LIST", help="Sequences that are decoded "
                                                                              "together: 1,8.")
@click.option("--context", type=TokenCounts(0), default="0", show_default=True, metavar="LIST",
              help="Tokens in the cache before decoding: 0,2048,8k,32K.")
@kv_option("KV settings: none,int8,int4. (The model's own.)")
@tokens_option("--prefill", "Prompt tokens of the timed prefill; 0: none.", least=0, default=512)
@click.option("--max-tokens", "-n", type=TokenCount(), default=64, show_default=True,
              help="New tokens of a timed run.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Timed runs.")
@click.option("--random", metavar="RECIPE",
              help="Use random weights in the formats of this recipe; `none`: unquantized ones.")
@device_option
@click.option("--no-fallback", is_flag=True, help="Fail if any operation would run in torch instead of our"
                                                  " kernels.")
@click.option("--pdl", is_flag=True, help="On a GPU: use programmatic dependent launch for all products.")
@click.option("--out", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the JSON there, after every case.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def decode(model: str, batch: str, context: tuple[int, ...], kv: tuple[str, ...], prefill: int,
           max_tokens: int, repeats: int, random: str | None, device: str, no_fallback: bool, pdl: bool,
           out: Path | None, quiet: bool, as_json: bool) -> None:
    """Measure how fast MODEL reads a prompt and decodes.

    tok/s counts all sequences together. GB/s counts the weights and the KV cache that a step must read, and
    `of read` is their share of the bandwidth at which memory was read between the runs, one figure for all:
    by all threads of a CPU, by a kernel that does nothing else on a GPU. `of products` is the share that a
    prompt's multiply-adds, without attention, are of those that all threads of a CPU do without memory.
    """
    from quantkit.evaluation.bench.decode import DecodeSettings, bench_decode
    from quantkit.quantization.recipe import load_recipe
    from quantkit.support.device import find_device

    # what can be refused is refused before a model is loaded
    settings_of_kv, batches = read_kv(kv), _numbers("--batch", batch, 1)
    if random not in (None, "none"):
        load_recipe(random)
    place = find_device(device)
    if random is None:
        loaded = load_model(model, device=device, quiet=quiet)
    else:
        from quantkit.evaluation.bench.random_model import random_model
        loaded = random_model(model, random, place)
    settings = DecodeSettings(batches, list(context), settings_of_kv or [loaded.kv], prefill, max_tokens,
                              repeats, not no_fallback, pdl)
    with ProgressLine("measuring", quiet) as progress:
        report = bench_decode(loaded, settings, progress, lambda report: write(report, out))
    rows = [(case["kv"], f"{case['tokens']}", "", f"{case['tok_s']['median']:.0f}", "", "",
             f"{case['of_products']:.0%}" if "of_products" in case else "") for case in report["prefill"]]
    rows += [(case["kv"], f"{case['context']}", f"{case['batch']}", f"{case['tok_s']['median']:.1f}",
              f"{case['bytes_s']['median'] / 1e9:.1f}", f"{case['of_read']:.0%}" if case["of_read"] else "",
              "") for case in report["cases"] if "left_out" not in case]
    text = table(("kv", "tokens", "batch", "tok/s", "GB/s", "of read", "of products"), rows,
                 right=(1, 2, 3, 4, 5, 6))
    for case in report["cases"]:
        if "left_out" in case:
            text += (f"\nleft out: {case['kv']}, {case['batch']} sequences of {case['context']} tokens: "
                     f"{case['left_out']}")
    used = ", ".join(f"{count} {name}" for name, count in Counter(report["kernels"].values()).items())
    text += f"\n\n{report['label']}: {human_bytes(report['bytes'])} of weights a step"
    text += f"\nLinears by kernel: {used}"
    if report["unfused"]:
        text += f"\noperation by operation, because: {report['unfused']}"
    show(report, text, out, as_json)


@command.command("drafts")
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


@command.command("tune")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder for the file. (The first place where it is searched: QUANTKIT_TUNED, or the "
                   "package.)")
@click.option("--only", default="", metavar="TEXT", help="Only products whose name or shape contains TEXT.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=60, show_default=True,
              help="Stop after this number of minutes.")
@click.option("--fresh", is_flag=True, help="Measure anew what was measured before.")
@click.pass_context
def tune(ctx: click.Context, folder: Path | None, only: str, minutes: float, fresh: bool) -> None:
    """Measure launch parameters of the GPU's matrix products, and keep the fastest.

    The result is one JSON file for this kind of GPU, which all commands that run models then use. When you
    stop the command (Ctrl-C), its measurements are kept, and the same command continues from there.
    """
    _check_triton()
    import torch

    if not torch.cuda.is_available():
        raise QuantkitError("there is no GPU that torch can use", why="launch parameters are measured on it",
                            next="quantkit bench kernels --aot compiles and checks the kernels without one")
    from quantkit_kernels.tools.tune import main

    code = main([*(["--folder", str(folder)] if folder else []), "--only", only, "--minutes", str(minutes),
                 *(["--fresh"] if fresh else [])])
    ctx.exit(code)


def compile_kernels(quiet: bool, targets: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Compile every Triton kernel for these targets, or for every one: all facts, and the table.

    Raises QuantkitError without triton, UsageError for a target that isn't known.
    """
    _check_triton()
    from quantkit_kernels.tools.aot import TARGETS, compile_all, verdict
    from quantkit_kernels.tools.aot import table as kernel_table

    if unknown := set(targets) - set(TARGETS):
        raise UsageError(f"--target {min(unknown)}", why=f"kernels are compiled for {', '.join(TARGETS)}",
                         next="quantkit bench kernels --aot --target sm_90")
    with ProgressLine("compiling", quiet) as progress:
        rows = compile_all(targets or TARGETS, report=lambda done, total, name: progress(
            ProgressEvent(done, total, name)))
    bad = sum(bool(row.faults) for row in rows)
    return ({"rows": [asdict(row) for row in rows], "faults": bad},
            f"{kernel_table(rows)}\n\n{verdict(rows)}")


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise QuantkitError("triton is not installed", why="GPU kernels are written in it",
                            next="pip install triton, on Linux")


def show(report: dict[str, Any], text: str, out: Path | None, as_json: bool) -> None:
    """Print a report's table, on which machine it was measured, and what that machine can do."""
    machine = report["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
    shown = f"{text}\n\n{where}, quantkit {machine['quantkit']}, {machine['date']}"
    if report.get("read_bytes_s"):
        limits = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in report["mac_s"].items())
        shown += (f"\nceilings: {report['read_bytes_s'] / 1e9:.1f} GB/s read"
                  + f", GMAC/s: {limits}" * bool(limits))
    print_report(report, shown, out, as_json)


def print_report(report: dict[str, Any], text: str, out: Path | None, as_json: bool) -> None:
    """Print a text, or the report as JSON, and write the JSON to a file if there is one."""
    if as_json:
        print_json(report)
    else:
        click.echo(text)
    if out is not None:
        write(report, out)
        note(f"wrote {out}")


def write(report: dict[str, Any], out: Path | None) -> None:
    """A file as a whole or not at all: a run may be stopped while it writes."""
    if out is None:
        return
    special = out.exists() and not out.is_file()  # such as /dev/stdout
    part = out if special else out.with_name(f"{out.name}.partial")
    try:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if not special:
            part.replace(out)
    except OSError as error:
        raise UsageError(f"{out} can't be written", why=error.strerror or str(error)) from None


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [least - 1]
    if min(numbers) < least:
        raise UsageError(f"{option} is {text!r}", why=f"it must be whole numbers from {least} on: 1,8")
    return numbers


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"--shape is {text!r}", why="it must be two whole numbers, as in 4096x14336")
    return int(match[1]), int(match[2])
