"""The built-in calibration text: passages of many kinds that ship with quantkit, then docstrings.

What a model was calibrated on decides where it stays good. So the passages are of the kinds that models meet:
encyclopedias, novels, news, essays, conversations, mathematics, manuals, source code in several languages,
German and other languages. They were written for this purpose: nothing that models are evaluated on is in
them, and they are the same bytes everywhere. Behind them come the docstrings of Python's standard library,
for those who ask for more tokens: their prose is wherever Python is, needs no network, and shares nothing
with ``pydoc_data.topics``, which is the default evaluation text.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from quantkit.quantization.calibration.rows import Document
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.text.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""So many characters of docstrings are read for every token that is missing: about twice what is needed."""
_FOLDER = Path(__file__).parent / "passages"
_CHATS = "chats.jsonl"
_SKIPPED = frozenset({"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages",
                      "dist-packages", "encodings", "turtledemo", "__pycache__", "__phello__", "ensurepip"})
_LARGEST_FILE = 400_000
_SHORTEST_PARAGRAPH = 40
_MARKUP = re.compile(r">>>|[=<>{}\[\]|_*/\\]{2}|^\s*[-+*$#%@]|\w\(")


def builtin_documents(tokens: int, tokenizer: Tokenizer) -> list[Document]:
    """The built-in text, with at least ``tokens`` tokens and few more than that, or than the passages have.

    Raises:
        CalibrationError: docstrings are needed, and this Python has none.
    """
    documents = [Document(f"builtin, {name}", text) for name, text in _passages(tokenizer)]
    missing = tokens - sum(len(tokenizer.encode(document.content, special=False)) for document in documents
                           if isinstance(document.content, str))
    if missing > 0:
        documents.append(Document("builtin, docstrings", _docstrings(missing, tokenizer)))
    return documents


def passage(name: str) -> str:
    """The built-in text ``name``, such as ``code_python``. Raises FileNotFoundError."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def _docstrings(tokens: int, tokenizer: Tokenizer) -> str:
    text = prose(characters=tokens * CHARACTERS_PER_TOKEN)
    if not text.strip():
        raise CalibrationError("the built-in calibration text is too short",
                               why="this Python was installed without its standard library's sources",
                               next="name a text: --calibration FILE, or ask for fewer --windows")
    share = tokens / max(tokens, len(tokenizer.encode(text, special=False)))
    size = round(len(text) * share)
    while size < len(text) and len(tokenizer.encode(text[:size], special=False)) < tokens:
        size += size // 8 + 1
    return text[:size]


def _passages(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Names and texts; the conversations as the model's chat template writes them, if it has one."""
    for path in sorted(_FOLDER.glob("*.txt")):
        yield path.name, path.read_text(encoding="utf-8")
    for line in (_FOLDER / _CHATS).read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        text = None
        # a template may refuse system messages; one that writes today's date makes another text every day
        with contextlib.suppress(SourceError):
            if tokenizer.has_chat and "strftime_now" not in tokenizer.template_text:
                text = tokenizer.chat_text(messages, answer=False)
        yield _CHATS, text or "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def stdlib() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def prose(characters: int, folder: Path | None = None) -> str:
    """Paragraphs of prose, separated by blank lines; the same text for the same Python.

    Args:
        characters: the length at which to stop. Reading the sources takes about 3 seconds for a million.
        folder: the folder of ``.py`` files; the standard library by default.

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
