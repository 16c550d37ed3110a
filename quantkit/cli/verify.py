"""``quantkit verify DIR``."""

from __future__ import annotations

import re
from pathlib import Path

import rich_click as click

from quantkit.cli.present import note, print_json, show_error, width, wrapped
from quantkit.errors import FAILED

DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


@click.command("verify")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@click.pass_context
def command(ctx: click.Context, checkpoint: Path, as_json: bool) -> None:
    """Reread a checkpoint and check every hash and value.

    Every byte is hashed again, every scale and code is looked at, and config.json must say what
    the manifest says. Exits with 1 and names the file or layer when anything differs.
    """
    from quantkit.checkpoint.verify import verify

    report = verify(checkpoint)
    if as_json:
        print_json(report.to_dict())
    else:
        for check in report.checks:
            label = f"{check.status:<7} {check.name}"
            # a digest that is right need not be read in full
            detail = DIGEST.sub(r"\1…", check.detail) if check.status == "ok" else check.detail
            line = f"{label}  {detail}".rstrip()
            click.echo(line if len(line) <= width() else f"{label}\n{wrapped('', detail, 8)}")
        if report.ok:
            click.echo(f"{checkpoint} is whole")
    if not report.ok:
        count = len(report.failed)
        note()
        show_error(f"{checkpoint} is damaged: {count} {'check' if count == 1 else 'checks'} failed",
                   "\n".join(check.name for check in report.failed[:5]),
                   "copy the checkpoint again from where it came, or quantize again")
        ctx.exit(FAILED)
