"""Writes a folder with the report in every form; a plugin's reporter that fails costs its own file only."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.evaluation.metric_table import left_out, reason_of
from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.result import EvalResult
from quantkit.plugins.manager import BUILTIN, registry
from quantkit.support.errors import PluginError, QuantkitError, UsageError

_TEMPORARY = ".new"


@dataclass(frozen=True)
class RegisteredReporter:
    """A reporter, its registered name, and the distribution that it is of."""

    name: str
    reporter: Reporter
    owner: str

    def content(self, result: EvalResult) -> bytes:
        """The file. A plugin gets a copy of the result, so that others see what was measured.

        Raises:
            PluginError: a plugin's reporter raised, or returned neither text nor bytes.
        """
        if self.owner == BUILTIN:
            return _encoded(self.reporter.render(result))
        try:
            return _encoded(self.reporter.render(copy.deepcopy(result)))
        except Exception as error:
            raise PluginError(f"reporter {self.name!r} of {self.owner} failed", why=reason_of(error),
                              next=f"pip install --upgrade {self.owner}") from error


def _encoded(content: object) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode("utf-8", "replace")  # a path's name can hold what UTF-8 can't
    raise TypeError(f"render returns a {type(content).__name__}, neither str nor bytes")


def reporters(names: Sequence[str] | None = None) -> list[RegisteredReporter]:
    """The reporters called ``names``; by default all that belong into a folder, plugins' too.

    By default a plugin's reporter whose file has no plain name, or the name of another's file, is left out
    with one warning: a built-in's file stays, of two plugins neither is written.

    Raises:
        UsageError: there is no reporter of a name, or two have the same file.
        PluginError: a reporter that was named can't be used.
    """
    if names is not None:
        chosen = [_named(name) for name in dict.fromkeys(names)]
        for first, other in _same_file(chosen):
            raise UsageError(f"reporters {first.name!r} of {first.owner} and {other.name!r} of {other.owner} "
                             f"both write {first.reporter.file}", next="name one of them")
        return chosen
    table = registry("reporters")
    everything = [RegisteredReporter(name, reporter, table.entry(name).owner)
                  for name, reporter in table.usable() if reporter.in_folder]
    rejected: dict[str, str] = {}
    for registered in everything:
        if (problem := reason_against_reporter(registered.reporter)) is not None:
            rejected[registered.name] = problem
    sound = [registered for registered in everything if registered.name not in rejected]
    for first, second in _same_file(sound):
        for registered, other in ((first, second), (second, first)):
            if registered.owner != BUILTIN:
                rejected[registered.name] = (f"its file {registered.reporter.file} is also that of "
                                             f"{other.name!r} of {other.owner}")
    for registered in everything:
        if registered.name in rejected:
            left_out("reporter", registered.name, registered.owner, rejected[registered.name])
    return [registered for registered in everything if registered.name not in rejected]


def _named(name: str) -> RegisteredReporter:
    table = registry("reporters")
    reporter, owner = table.get(name), table.entry(name).owner
    if (problem := reason_against_reporter(reporter)) is not None:
        raise PluginError(f"reporter {name!r} of {owner} can't be used", why=problem,
                          next=f"pip install --upgrade {owner}")
    return RegisteredReporter(name, reporter, owner)


def _same_file(chosen: Sequence[RegisteredReporter]
               ) -> Iterator[tuple[RegisteredReporter, RegisteredReporter]]:
    """Pairs that would write one file, on a file system that ignores case too."""
    for index, second in enumerate(chosen):
        for first in chosen[:index]:
            if first.reporter.file.casefold() == second.reporter.file.casefold():
                yield first, second


def reason_against_reporter(reporter: Reporter) -> str | None:
    """What is wrong with a declaration, without calling it; ``None``: nothing."""
    file = reporter.file
    if (not isinstance(file, str) or not file.isprintable() or not 0 < len(file.encode("utf-8")) < 128
            or file.startswith((".", "~")) or file.endswith(_TEMPORARY) or set(file) & set('/\\:*?"<>|')):
        return f"its file {file!r:.80} isn't a plain file name"
    if not callable(reporter.render):
        return f"its render is a {type(reporter.render).__name__}, which can't be called"
    return None


def write_report(result: EvalResult, folder: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Write a file a reporter; each replaces an older one whole.

    Args:
        result: the comparison's results.
        folder: made if it is missing.
        names: the names of reporters; by default every one that belongs into a folder (see
            :func:`reporters`). One of a plugin that fails then costs one warning and its own file.

    Raises:
        QuantkitError: the folder can't be written, or a reporter of ``names`` failed; the others' files are
            there then.
        UsageError: there is no reporter of a name.
    """
    written, failed = [], None
    for registered in reporters(names):
        try:
            content = registered.content(result)
        except PluginError as error:
            if names is not None:
                failed = failed or error
                continue
            warnings.warn(f"{error.what}, so {registered.reporter.file} was not written: {error.why}",
                          stacklevel=2)
            continue
        written.append(write_file(folder, registered.reporter.file, content))
    if failed is not None:
        raise failed
    return written


def write_file(folder: Path, file: str, content: bytes) -> Path:
    """Replace a file of a folder whole. Raises QuantkitError if that can't be."""
    path, fresh = folder / file, folder / (file + _TEMPORARY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_bytes(content)
            fresh.replace(path)
        except OSError:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise QuantkitError(f"the report can't be written to {folder}", why=error.strerror or str(error),
                            next="free some space, or choose another --out") from error
    return path


def check_writable(folder: Path) -> None:
    """Find out before hours of work whether a report can be written: makes the folder and a file in it, and
    takes away again what it made.

    Raises:
        QuantkitError: it can't be.
    """
    made: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise QuantkitError(f"a report can't be written to {folder}", why=error.strerror or str(error),
                            next="choose another --out") from error
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
