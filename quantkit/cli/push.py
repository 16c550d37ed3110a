"""``quantkit push DIR REPO``."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from quantkit.cli.present import note, print_json, table, wrapped
from quantkit.support.paths import typed_path
from quantkit.support.units import human_bytes


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
def command(checkpoint: Path, repo: str, public: bool, message: str | None,
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
