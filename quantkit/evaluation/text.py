"""The text that models are compared on."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from quantkit.support.errors import UsageError, did_you_mean
from quantkit.support.paths import data_dir

BUILTIN = "builtin"
SHIPPED = ("dialogue", "german")
"""Texts that come with quantkit, ``builtin:dialogue`` and ``builtin:german``."""
CODE = ("argparse", "ast", "dataclasses", "difflib", "fractions", "heapq", "inspect", "shlex", "statistics",
        "tarfile", "textwrap", "typing")
"""Modules whose source ``builtin:code`` is."""
HUB = "hf://datasets/"
MAX_BYTES = 256 * 2**20
_UNDERLINE = re.compile(r"([*=\-~^])\1+\s*")


@dataclass(frozen=True)
class EvalText:
    """A text and what identifies it: a name without folders, the sha256 of its UTF-8 bytes."""

    name: str
    content: str
    sha256: str


def load_text(name: str = BUILTIN) -> EvalText:
    """Find an evaluation text.

    Args:
        name: ``builtin`` or ``builtin:prose`` (the prose of CPython's ``pydoc_data.topics``: everywhere and
            offline; it differs between Python versions, so the version is part of its name),
            ``builtin:code`` (source of CPython's modules, likewise), ``builtin:dialogue`` and
            ``builtin:german`` (which come with quantkit), a path to a UTF-8 file, or
            ``hf://datasets/OWNER/NAME/FILE[@REVISION]``.

    Raises:
        UsageError: it can't be had, is empty, too large or not UTF-8.
    """
    if name == BUILTIN or name.startswith(f"{BUILTIN}:"):
        return _builtin(name.partition(":")[2] or "prose")
    path = _download(name) if name.startswith(HUB) else Path(os.path.expanduser(name))  # noqa: PTH111
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"the text {name} can't be read", why=getattr(error, "strerror", None) or str(error),
                         next=f"give a UTF-8 file, {HUB}OWNER/NAME/FILE, or {BUILTIN}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"the text {name} is larger than {MAX_BYTES >> 20} MiB", next="give a part of it")
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the text {name} is not UTF-8", why=f"byte {error.start}: {error.reason}",
                         next="convert it, or use another") from None
    if not content.strip():
        raise UsageError(f"the text {name} is empty", next="give a file with text in it")
    return _text(path.name, content)


def _builtin(kind: str) -> EvalText:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if kind == "prose":
        from pydoc_data.topics import topics

        content = "\n\n".join(filter(None, (prose(topics[key]) for key in sorted(topics))))
        return _text(f"pydoc-topics-{version}", content)
    if kind == "code":
        folder = Path(os.__file__).parent
        try:
            sources = [(folder / f"{module}.py").read_text(encoding="utf-8") for module in CODE]
        except OSError as error:
            raise UsageError("builtin:code can't be read", why=f"this Python has no source of its library: "
                             f"{error.strerror or error}", next="give a UTF-8 file with code") from error
        return _text(f"cpython-library-{version}", "\n\n".join(sources))
    if kind in SHIPPED:
        return _text(kind, (data_dir("evals") / "texts" / f"{kind}.txt").read_text(encoding="utf-8"))
    raise UsageError(f"no text is called {BUILTIN}:{kind[:40]}",
                     why=did_you_mean(kind, ("prose", "code", *SHIPPED)), next=f"--text {BUILTIN}")


def prose(page: str) -> str:
    """The paragraphs of a page of documentation, a line each.

    Underlines of headings go, and with them blocks that are indented throughout: code and grammar.
    """
    kept = []
    for block in re.split(r"\n\s*\n", page.strip("\n")):
        lines = [line for line in block.split("\n") if not _UNDERLINE.fullmatch(line)]
        if any(not line.startswith("   ") for line in lines):
            kept.append(" ".join(" ".join(lines).split()))
    return "\n\n".join(kept)


def _text(name: str, content: str) -> EvalText:
    return EvalText(name, content, hashlib.sha256(content.encode()).hexdigest())


def _download(uri: str) -> Path:
    from huggingface_hub import hf_hub_download

    rest, _, revision = uri.removeprefix(HUB).partition("@")
    parts = rest.split("/", 2)
    if len(parts) != 3 or any(part in ("", ".", "..") for part in rest.split("/")):
        raise UsageError(f"{uri} doesn't name a file", next=f"{HUB}OWNER/NAME/FILE@REVISION")
    try:
        return Path(hf_hub_download("/".join(parts[:2]), parts[2], repo_type="dataset",
                                    revision=revision or None))
    except Exception as error:  # the hub's client raises a dozen kinds, all of which mean this
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UsageError(f"{uri} can't be downloaded", why=why,
                         next=f"check the name and the connection, or use {BUILTIN}") from error
