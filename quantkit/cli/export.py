"""``quantkit export DIR --to FORMAT OUT``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import rich_click as click

from quantkit.cli.present import print_json, wrapped
from quantkit.cli.progress import ProgressLine
from quantkit.units import human_bytes


@click.command("export")
@click.argument("checkpoint", metavar="DIR")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--to", "form", required=True, metavar="FORMAT",
              help="pack-quantized, int-quantized, float-quantized, bnb-nf4, bnb-int8, gptq, gptq-v2, awq, "
                   "mlx or trellis; plugins add others.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a checkpoint on the hub.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(checkpoint: str, out: Path, form: str, revision: str | None, quiet: bool, as_json: bool) -> None:
    """Convert a checkpoint to another layout without rounding anything.

    DIR is a checkpoint of quantkit or another tool, on this machine or on the hub. OUT is the folder to
    create. If the layout can't hold the same codes and scales, the export is refused with the reason.
    """
    from quantkit.export import export

    with ProgressLine(f"{checkpoint} to {form}", quiet=quiet) as progress:
        result = export(checkpoint, form, out, revision=revision, progress=progress)
    if as_json:
        print_json(result.to_dict())
        return
    packed = [row for row in result.rows if row.spec]
    size = sum(row.bytes for row in result.rows)
    click.echo(wrapped("checkpoint", f"{result.out} ({result.seconds:.0f} s)"))
    click.echo(wrapped("layers",
                       f"{len(packed)} of {len(result.rows)} in format {form}, {human_bytes(size)}"))
    engine = "transformers" if form.startswith("bnb-") else "vllm"
    click.echo(f"{'next':<14}quantkit verify {quote(str(result.out))} --for {engine}")
