"""The contract of reporters: ``quantkit.evaluation.report.base.Reporter``."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import tempfile
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

from quantkit.evaluation.metric_table import reason_of
from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.report.folder import reporter_problem, write_file
from quantkit.evaluation.result import EvalResult
from quantkit.support.errors import PluginError, QuantkitError
from quantkit.testing.contract import Contract, global_generators
from quantkit.testing.results import sample_results

_PROMISES = "quantkit.evaluation.report.base.Reporter"


def check_reporter(reporter: Reporter) -> None:
    """Let a reporter write ordinary and awkward results, and check what
    :class:`~quantkit.evaluation.report.base.Reporter` promises.

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
        raise PluginError(f"a {type(reporter).__name__} is no reporter", why=f"it must be a {_PROMISES}")
    contract = Contract(f"reporter {reporter.name!r}", _PROMISES)
    if (problem := reporter_problem(reporter)) is not None:
        raise contract.error(f"it can't be registered: {problem}")
    for name, result in sample_results().items():
        _check_rendered(reporter, result, sample_results()[name], contract.at(f"result {name!r}"))


def _check_rendered(reporter: Reporter, result: EvalResult, equal: EvalResult, contract: Contract) -> None:
    """Render a result, and an equal one."""
    must = contract.must
    before, printed = repr(result), io.StringIO()
    with contextlib.redirect_stdout(printed):
        with global_generators(contract):
            content = _rendered(reporter, result, contract)
        must(repr(result) == before, "render changes the result")
        must(_rendered(reporter, equal, contract) == content, "two calls differ")
    must(not printed.getvalue(), "render prints; it must return what is to be written")
    must(bool(content) or not result.rows, "render returns nothing")
    try:
        data = content if isinstance(content, bytes) else content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise contract.error(f"UTF-8 can't write its text: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder), reporter.file, data)
        must(path.parent == Path(folder) and path.read_bytes() == data, "its file isn't what it returned")
        _reread(path, contract)


def _rendered(reporter: Reporter, result: EvalResult, contract: Contract) -> str | bytes:
    content = contract.call("render", reporter.render, result)
    contract.must(isinstance(content, str | bytes),
                  f"render returns a {type(content).__name__}, neither str nor bytes")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _reread(path: Path, contract: Contract) -> None:
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
        raise contract.error(f"its {path.suffix} file can't be read again: {reason_of(error)}") from error
