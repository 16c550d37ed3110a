"""Where the reports of ``quantkit bench`` go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich_click as click

from quantkit.cli.present import note, print_json
from quantkit.support.errors import UsageError


def show(report: dict[str, Any], text: str, out: Path | None, as_json: bool) -> None:
    """Print a report's table, and on which machine it was measured."""
    machine = report["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
    shown = f"{text}\n\n{where}, quantkit {machine['quantkit']}, {machine['date']}"
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
