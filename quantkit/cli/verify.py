"""``quantkit verify DIR``."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.options import LOADERS
from quantkit.cli.present import note, print_json, show_error, width, wrapped
from quantkit.support.errors import FAILED

if TYPE_CHECKING:
    from quantkit.checkpoint.integrity import VerifyCheck

DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


@click.command("verify")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--for", "engine", type=click.Choice(LOADERS),
              help="Report instead whether this engine loads the checkpoint, and why not. Works for any "
                   "tool's checkpoint.")
@click.option("--for-device", "device", type=click.Choice(["cuda", "cpu"]), default="cuda",
              show_default=True, help="With --for: where that engine would run.")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@click.pass_context
def command(ctx: click.Context, checkpoint: Path, engine: str | None, device: str, as_json: bool) -> None:
    """Reread a checkpoint and check every hash and value.

    Every byte is hashed again, every scale and code is checked, and config.json must agree with the
    manifest. If anything differs, the exit code is 1 and the file or layer is named. With --for, the
    checkpoint is checked against another engine's loading rules instead.
    """
    if engine is not None:
        if not _loads(checkpoint, engine, device, as_json):
            ctx.exit(FAILED)
        return
    from quantkit.runtime.verify import verify

    report = verify(checkpoint)
    if as_json:
        print_json(report.to_dict())
    else:
        for check in report.checks:
            _print(check)
        if report.ok:
            click.echo(f"{checkpoint} is whole")
    if not report.ok:
        count = len(report.failed)
        note()
        show_error(f"{checkpoint} is damaged: {count} {'check' if count == 1 else 'checks'} failed",
                   "\n".join(check.name for check in report.failed[:5]),
                   "copy the checkpoint again from where it came, or quantize again")
        ctx.exit(FAILED)


def _print(check: VerifyCheck) -> None:
    label = f"{check.status:<7} {check.name}"
    # a digest that is right need not be read in full
    detail = DIGEST.sub(r"\1…", check.detail) if check.status == "ok" else check.detail
    line = f"{label}  {detail}".rstrip()
    click.echo(line if len(line) <= width() else f"{label}\n{wrapped('', detail, 8)}")


def _loads(folder: Path, engine: str, device: str, as_json: bool) -> bool:
    """Whether the engine takes it, after saying so."""
    import dataclasses

    from quantkit.checkpoint.engines import check_engine
    from quantkit.checkpoint.open import open_checkpoint

    with open_checkpoint(folder) as opened:
        checks = check_engine(engine, opened, device)
    refused = [check for check in checks if check.status == "failed"]
    where = f"{engine} on {device}"
    if as_json:
        print_json({"path": str(folder), "engine": engine, "device": device, "loads": not refused,
                    "checks": [dataclasses.asdict(check) for check in checks]})
        return not refused
    for check in checks:
        _print(check)
    if not refused:
        click.echo(f"{where} loads {folder}")
        return True
    note()
    show_error(f"{where} refuses {folder}",
               "\n".join(f"{check.name}: {check.detail}" for check in refused),
               f"quantkit serve-local {quote(str(folder))}" if any(check.name == "model" for check in refused)
               else f"quantkit export {quote(str(folder))} --to FORMAT --for {engine} OUT, or quantize the "
                    f"original with --for {engine}")
    return False
