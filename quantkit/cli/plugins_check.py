"""``quantkit plugins check NAME``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import rich_click as click

from quantkit.cli.present import note, print_json, wrapped
from quantkit.support.errors import FAILED

if TYPE_CHECKING:
    from quantkit.testing.plugin import CheckResult

INDENT = 24


@click.command("check")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.pass_context
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Put everything that a plugin registers to the checks of quantkit.testing.

    NAME is an installed plugin's or its distribution's. Its code is imported and run. `quantkit plugins check
    quantkit` checks the built-ins, which takes minutes. The exit code is 1 if a check fails.
    """
    from quantkit.plugins.manager import current
    from quantkit.testing.plugin import check_all

    results = []
    for result in check_all(current(), name):
        results.append(result)
        # a line as soon as it is known: a plugin of many things takes a while
        note(_line(result)) if as_json else click.echo(_line(result))
    counts = Counter(result.status for result in results)
    if as_json:
        print_json({"plugin": name, "ok": counts["ok"], "failed": counts["failed"],
                    "not_checked": counts["not checked"],
                    "results": [{"kind": result.kind, "name": result.name, "status": result.status,
                                 "why": result.why, "next": result.next} for result in results]})
    else:
        click.echo(f"\n{counts['ok']} ok, {counts['failed']} failed, {counts['not checked']} not checked")
    if counts["failed"]:
        ctx.exit(FAILED)


def _line(result: CheckResult) -> str:
    text = result.status + (f": {result.why}" if result.why else "")
    if result.next and result.status == "failed":
        text += f" (next: {result.next})"
    return wrapped(f"{result.kind} {result.name}".ljust(INDENT - 1) + " ", " ".join(text.split()), INDENT)
