"""Writes a folder with the report in every form."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.evaluate.result import EvalResult
from quantkit.plugins import registry

FILES = ("markdown", "svg", "json")


def write_report(result: EvalResult, folder: Path) -> list[Path]:
    """Write ``report.md``, ``plot.svg`` and ``results.json``; each replaces an older one whole.

    Raises:
        QuantkitError: the folder can't be written.
    """
    table = registry("reporters")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            reporter = table.get(name)
            path = folder / reporter.file
            fresh = path.with_name(path.name + ".new")
            content = reporter.render(result)
            try:
                fresh.write_text(content, encoding="utf-8")
                fresh.replace(path)
            except OSError:
                with suppress(OSError):
                    fresh.unlink(missing_ok=True)
                raise
            written.append(path)
    except OSError as error:
        raise QuantkitError(f"the report can't be written to {folder}", why=error.strerror or str(error),
                            next="free some space, or choose another --out") from error
    return written
