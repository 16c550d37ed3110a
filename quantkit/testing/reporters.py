"""The contract of reporters: ``quantkit.report.base.Reporter``."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import tempfile
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import numpy as np
import torch

from quantkit.errors import PluginError, QuantkitError
from quantkit.evaluate.metric_table import reason_of
from quantkit.evaluate.result import EvalResult
from quantkit.report.base import Reporter
from quantkit.report.folder import reporter_problem, write_file
from quantkit.testing.results import sample_results

_WHY = "quantkit.report.base.Reporter says what a reporter promises"


def check_reporter(reporter: Reporter) -> None:
    """Let a reporter write ordinary and awkward results, and check what
    :class:`~quantkit.report.base.Reporter` promises.

    The results: without speed, with missing metrics, infinite values, markup, ``|`` and line breaks in names,
    KV settings, tasks, metrics of plugins, no model and sixty. Checked are the file's name, that ``render``
    returns str or bytes that UTF-8 can write, the same twice, that it changes nothing and prints nothing, and
    that the file can be read again: as what its suffix says, for .json, .csv, .svg and .xml.

    Args:
        reporter: the reporter.

    Raises:
        PluginError: a promise is broken; the result is named.
    """
    if not isinstance(reporter, Reporter):
        raise PluginError(f"a {type(reporter).__name__} is no reporter", why=_WHY,
                          next="build a quantkit.report.base.Reporter")
    if (problem := reporter_problem(reporter)) is not None:
        raise PluginError(f"reporter {reporter.name!r} can't be registered: {problem}", why=_WHY)
    for name, result in sample_results().items():
        _check_rendered(reporter, name, result, f"reporter {reporter.name!r}, result {name!r}")


def _check_rendered(reporter: Reporter, name: str, result: EvalResult, where: str) -> None:
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}", why=_WHY)

    before, state = repr(result), _random_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        content = _rendered(reporter, result, where)
        must(repr(result) == before, "render changes the result")
        must(_random_state() == state, "render uses a global random generator")
        must(_rendered(reporter, sample_results()[name], where) == content, "two calls differ")
    must(not printed.getvalue(), "render prints; it must return what is to be written")
    must(bool(content) or not result.rows, "render returns nothing")
    try:
        data = content if isinstance(content, bytes) else content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PluginError(f"{where}: UTF-8 can't write its text", why=str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder), reporter.file, data)
        must(path.parent == Path(folder) and path.read_bytes() == data, "its file isn't what it returned")
        _reread(path, where)


def _rendered(reporter: Reporter, result: EvalResult, where: str) -> str | bytes:
    try:
        content = reporter.render(result)
    except Exception as error:
        raise PluginError(f"{where}: render raises {type(error).__name__}: {reason_of(str(error))}",
                          why=_WHY) from error
    if not isinstance(content, str | bytes):
        raise PluginError(f"{where}: render returns a {type(content).__name__}, neither str nor bytes",
                          why=_WHY)
    return content


def _random_state() -> tuple[object, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _reread(path: Path, where: str) -> None:
    """Read the file as what its suffix says that it is."""
    data = path.read_bytes()
    try:
        if path.suffix == ".json":
            json.loads(data, parse_constant=_refuse)
        elif path.suffix in (".svg", ".xml"):
            ElementTree.fromstring(data)
        elif path.suffix == ".csv":
            rows = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
            if len({len(row) for row in rows}) > 1:
                raise ValueError("its rows have different numbers of cells")
    except (ValueError, ElementTree.ParseError, csv.Error, QuantkitError) as error:
        raise PluginError(f"{where}: its {path.suffix} file can't be read again: {reason_of(error)}",
                          why=_WHY) from error
