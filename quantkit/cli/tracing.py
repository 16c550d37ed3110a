"""The option ``--trace``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    from quantkit.runtime.trace_file import TraceFile

trace_option = click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write when each request waited, was read and decoded, and all steps, to a file that "
         "ui.perfetto.dev and chrome://tracing open. It has no texts and no tokens.")


def open_trace(path: Path | None) -> AbstractContextManager[TraceFile | None]:
    """The file of ``--trace``, if it was given. Raises UsageError on entering: it can't be written."""
    if path is None:
        return nullcontext()
    from quantkit.runtime.trace_file import TraceFile

    return TraceFile(path)
