"""The built-in calibration text: passages of many kinds that ship with quantkit, then docstrings.

What a model was calibrated on decides where it stays good. So the passages are of the kinds that models meet:
encyclopedias, novels, news, essays, conversations, mathematics, manuals, source code in several languages,
German and other languages. They were written for this purpose: nothing that models are evaluated on is in
them, and they are the same bytes everywhere. Behind them come the docstrings of Python's standard library
(:mod:`~quantkit.quantization.calibration.docstrings`), for those who ask for more tokens.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from quantkit.quantization.calibration.docstrings import prose
from quantkit.quantization.calibration.rows import Document
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.text.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""So many characters of docstrings are read for every token that is missing: about twice what is needed."""
_FOLDER = Path(__file__).parent / "passages"
_CHATS = "chats.jsonl"


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
