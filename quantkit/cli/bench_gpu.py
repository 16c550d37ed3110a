"""``quantkit bench tune``, and the output of ``quantkit bench kernels --aot``."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click

from quantkit.cli.progress import ProgressLine
from quantkit.support.errors import QuantkitError
from quantkit.support.progress import ProgressEvent


@click.command("tune")
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
    _require_triton()
    import torch

    if not torch.cuda.is_available():
        raise QuantkitError("there is no GPU that torch can use", why="launch parameters are measured on it",
                            next="quantkit bench kernels --aot compiles and checks the kernels without one")
    from quantkit_kernels.tools.tune import main

    code = main([*(["--folder", str(folder)] if folder else []), "--only", only, "--minutes", str(minutes),
                 *(["--fresh"] if fresh else [])])
    ctx.exit(code)


def compile_kernels(quiet: bool) -> tuple[dict[str, Any], str]:
    """Compile every Triton kernel for every target: all facts, and the table.

    Raises QuantkitError without triton.
    """
    _require_triton()
    from quantkit_kernels.tools.aot import compile_all, table, verdict

    with ProgressLine("compiling", quiet) as progress:
        rows = compile_all(report=lambda done, total, name: progress(ProgressEvent(done, total, name)))
    bad = sum(bool(row.faults) for row in rows)
    return ({"rows": [asdict(row) for row in rows], "faults": bad},
            f"{table(rows)}\n\n{verdict(rows)}")


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise QuantkitError("triton is not installed", why="GPU kernels are written in it",
                            next="pip install triton, on Linux")
