"""The end of the built-in calibration text: the prose of the docstrings of Python's standard library.

It is wherever Python is, needs no network, and shares nothing with ``pydoc_data.topics``, which is
the default evaluation text.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = frozenset({"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages",
                      "dist-packages", "encodings", "turtledemo", "__pycache__", "__phello__", "ensurepip"})
_LARGEST_FILE = 400_000
_SHORTEST_PARAGRAPH = 40
_MARKUP = re.compile(r">>>|[=<>{}\[\]|_*/\\]{2}|^\s*[-+*$#%@]|\w\(")


def stdlib() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def prose(characters: int, folder: Path | None = None) -> str:
    """Paragraphs of prose, separated by blank lines; the same text for the same Python.

    Args:
        characters: where to stop. Reading the sources takes about 3 seconds for a million.
        folder: where ``.py`` files are looked for; the standard library by default.

    Returns:
        The text; empty where a Python is installed without its sources.
    """
    texts: list[str] = []
    size = 0
    for path in _modules(folder or stdlib()):
        for paragraph in _paragraphs(path):
            texts.append(paragraph)
            size += len(paragraph) + 2
        if size >= characters:
            break
    return "\n\n".join(dict.fromkeys(texts))[:characters]


def _modules(folder: Path) -> list[Path]:
    """Source files in an order that mixes the alphabet, so that stopping early leaves no letter out."""
    if not folder.is_dir():
        return []
    names = [path.relative_to(folder) for path in folder.glob("*.py")]
    names += [path.relative_to(folder) for package in sorted(folder.iterdir())
              if package.is_dir() and package.name not in _SKIPPED for path in package.rglob("*.py")
              if not _SKIPPED & set(path.relative_to(folder).parts)]
    return [folder / name for name in sorted(names, key=lambda n: (zlib.crc32(n.as_posix().encode()), n))]


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # one unreadable module is no loss: the text is a sample anyway
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(inspect.cleandoc(paragraph).split())
                if len(text) >= _SHORTEST_PARAGRAPH and not _MARKUP.search(paragraph):
                    yield text
