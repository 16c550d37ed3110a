"""Evaluation suites: named settings in YAML, found as recipes are."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from quantkit.errors import UsageError, did_you_mean
from quantkit.evaluate.text import BUILTIN
from quantkit.plugins import current, named_files
from quantkit.safe_yaml import read_yaml
from quantkit.spec import Frozen


class EvalSuite(Frozen):
    """One suite: which text, and how much of it."""

    name: str
    description: str
    text: str = BUILTIN
    window: int = Field(default=512, ge=2)
    windows: int = Field(default=40, ge=1)


def load_suite(name: str) -> EvalSuite:
    """Find a suite by its file's name.

    Raises:
        UsageError: none or several are called so, or its file is malformed.
    """
    files: dict[str, list[tuple[str, Path]]] = {}
    for owner, path in named_files(current().dirs("eval_dirs")):
        files.setdefault(path.stem, []).append((owner, path))
    if name not in files:
        raise UsageError(f"no evaluation suite is called {name!r}", why=did_you_mean(name, files),
                         next=f"quantkit eval … --suite {next(iter(sorted(files)), 'quick')}")
    if len(files[name]) > 1:
        raise UsageError(f"two suites are called {name!r}",
                         why=" and ".join(f"{path} (of {owner})" for owner, path in files[name]),
                         next=f"uninstall one: pip uninstall {files[name][-1][0]}")
    return read_yaml(files[name][0][1], UsageError).build(EvalSuite)
