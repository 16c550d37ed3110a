"""``quantkit export DIR --to FORMAT OUT`` and ``quantkit push DIR REPO``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.api.progress import ProgressLine
from quantkit.cli.options import LOADERS, revision_option
from quantkit.cli.present import note, print_json, show_warning, table, wrapped
from quantkit.support.errors import UsageError
from quantkit.support.paths import typed_path
from quantkit.support.units import human_bytes

if TYPE_CHECKING:
    from quantkit.export.gguf.export import GGUFResult
    from quantkit.export.gpt_oss import FolderResult
    from quantkit.export.layouts import ExportResult

GGUF = "gguf"


@click.command("export")
@click.argument("checkpoint", metavar="DIR")
@click.argument("place", type=click.Path(path_type=Path), metavar="[OUT]", required=False)
@click.option("--to", "form", required=True, metavar="FORMAT",
              help="pack-quantized, int-quantized, float-quantized, bnb-nf4, bnb-int8, gptq, gptq-v2, awq, "
                   "mlx or trellis; plugins add others. Or gguf: one file for llama.cpp, Ollama and LM "
                   "Studio. Or gpt-oss: such a model as OpenAI publishes it.")
@click.option("--for", "engine", type=click.Choice(LOADERS),
              help="The engine that must load the result. What it reads only plain, as transformers the "
                   "embedding, is decoded.")
@click.option("--out", "-o", type=click.Path(path_type=Path), metavar="OUT", help="The same as OUT.")
@revision_option
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(checkpoint: str, place: Path | None, out: Path | None, form: str, engine: str | None,
            revision: str | None, quiet: bool, as_json: bool) -> None:
    """Convert a checkpoint to another layout without rounding a Linear.

    DIR is a checkpoint of quantkit or another tool, on this machine or on the hub. OUT is the folder to
    create, or with --to gguf the file. If the layout can't hold the same codes and scales, the export is
    refused with the reason. Only an embedding and a head for which the layout has no place are decoded, to
    the model's 16 bits.
    """
    from quantkit.export.gguf.export import export_gguf
    from quantkit.export.gpt_oss import GPT_OSS, export_gpt_oss
    from quantkit.export.layouts import export

    target = place or out
    if target is None or (place and out):
        raise UsageError("two places are given for the export" if target else "no place is given for it",
                         next=f"quantkit export {quote(checkpoint)} --to {quote(form)} OUT")
    if engine is not None and form in (GGUF, GPT_OSS):
        raise UsageError(f"--for {engine} doesn't go with --to {form}", why="that layout is for one kind of "
                         "engine", next=f"quantkit export {quote(checkpoint)} --to {form} OUT")
    with ProgressLine(f"{checkpoint} to {form}", quiet=quiet) as progress:
        result: ExportResult | GGUFResult | FolderResult = (
            export_gguf(checkpoint, target, revision=revision, progress=progress) if form == GGUF
            else export_gpt_oss(checkpoint, target, revision=revision, progress=progress) if form == GPT_OSS
            else export(checkpoint, form, target, engine=engine, revision=revision, progress=progress))
    if as_json:
        print_json(result.to_dict())
        return
    from quantkit.export.gpt_oss import FolderResult
    from quantkit.export.layouts import ExportResult

    if isinstance(result, ExportResult):
        _show_checkpoint(result, engine)
    elif isinstance(result, FolderResult):
        _show_folder(result)
    else:
        _show_file(result)


def _show_checkpoint(result: ExportResult, engine: str | None) -> None:
    packed = [row for row in result.rows if row.spec]
    size = sum(row.bytes for row in result.rows)
    click.echo(wrapped("checkpoint", f"{result.out} ({result.seconds:.0f} s)"))
    click.echo(wrapped("layers", f"{len(packed)} of {len(result.rows)} in format {result.format}, "
                                 f"{human_bytes(size)}"))
    if result.decoded:
        click.echo(wrapped("decoded", f"{' and '.join(result.decoded)}, to 16 bits"))
    engine = engine or ("transformers" if result.format.startswith("bnb-") else "vllm")
    click.echo(f"{'next':<14}quantkit verify {quote(str(result.out))} --for {engine}")


def _show_folder(result: FolderResult) -> None:
    click.echo(wrapped("checkpoint", f"{result.out} ({result.seconds:.0f} s)"))
    click.echo(wrapped("experts", f"{result.experts} Linears in MXFP4; {human_bytes(result.bytes)} in all"))
    click.echo(f"{'next':<14}quantkit verify {quote(str(result.out))} --for vllm")


def _show_file(result: GGUFResult) -> None:
    kinds = Counter(tensor.kind for tensor in result.tensors)
    click.echo(wrapped("file", f"{result.out}, {human_bytes(result.bytes)} ({result.seconds:.0f} s)"))
    click.echo(wrapped("tensors", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())))
    click.echo(f"{'next':<14}llama-server -m {quote(str(result.out))}")
    for text in result.notes:
        show_warning(text)


@click.command("push")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("repo", metavar="REPO")
@click.option("--public", is_flag=True, help="Make the repository public; by default it is private.")
@click.option("--message", "-m", metavar="TEXT", help="Message of the commit.")
@click.option("--results", type=click.Path(path_type=Path), metavar="FILE",
              help="A results.json of `quantkit eval --out` with this checkpoint in it: its numbers go into "
                   "the model card that is uploaded.")
@click.option("--dry-run", is_flag=True, help="Verify, show what would be uploaded, and reach no network.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def push_command(checkpoint: Path, repo: str, public: bool, message: str | None,
            results: Path | None, dry_run: bool, as_json: bool) -> None:
    """Upload a checkpoint to the Hugging Face hub.

    REPO is owner/name. If it doesn't exist, it is created as a private repository. The folder is verified
    first, and only files that quantkit.json lists are uploaded. Log in with `hf auth login`.

    With --results the model card that is uploaded has the evaluation too, as a section and as metadata that
    the hub shows. The card on disk stays as it is, and `quantkit verify` accepts both.
    """
    from quantkit.export.push import push

    evaluation = None
    if results is not None:
        from quantkit.evaluation.report.model_card import block_of_checkpoint
        from quantkit.evaluation.results_file import read_results

        evaluation = block_of_checkpoint(read_results(results), typed_path(checkpoint))
    result = push(checkpoint, repo, private=not public, message=message, dry_run=dry_run,
                  evaluation=evaluation)
    if as_json:
        print_json(result.to_dict())
        return
    if dry_run:
        click.echo(table(["file", "bytes"], [[name, f"{size:,}"] for name, size in result.files.items()],
                         right=(1,)))
        click.echo()
    if result.left_out:
        note(f"left here, quantkit.json doesn't list them: {', '.join(result.left_out)}")
    who = "private" if result.private else "public"
    verb = "would be uploaded to" if dry_run else "uploaded to"
    click.echo(wrapped("files", f"{len(result.files)}, {human_bytes(sum(result.files.values()))}, {verb} "
                                f"{result.repo} ({who})"))
    if result.url:
        click.echo(wrapped("commit", result.url))
        click.echo(f"{'next':<14}quantkit generate {result.repo} \"The capital of France is\"")
