"""Calls the ``tokenizers`` library, whose Rust code can panic on an untrusted ``tokenizer.json``.

A panic is no ``Exception`` and would end the thread that it happens on; here every failure is a SourceError.

A file that would turn a short text into gigabytes is rejected: normalizers and decoders replace, and one
after another they multiply; what a post-processor puts around a text is a list in the file, which may be
named any number of times.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from quantkit.support.errors import SourceError, UsageError

FILE = "tokenizer.json"
_NO_MERGES, _BYTE_TOKEN = re.compile(rb'"merges"\s*:\s*\[\s*\]'), re.compile(r"<0x[0-9A-F]{2}>")
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
MAX_FACTOR = 256
"""Characters that one character may become; with sentencepiece's normalization it is up to 36."""
MAX_AROUND = 1024
"""Ids that a post-processor may put around a text; real ones put up to four."""


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn whatever the library raises into a SourceError that says ``what`` failed."""
    try:
        yield
    except BaseException as error:  # bare Exceptions, and PanicException, which is none
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | SourceError):
            raise
        raise SourceError(what, why=" ".join(str(error).split())[:200] or type(error).__name__,
                          next="get the model's tokenizer.json again, or pip install --upgrade tokenizers"
                          ) from None


def read_tokenizer(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    """The tokenizer in a model's side files, which neither cuts nor pads.

    Raises:
        SourceError: there is none, it can't be read, it has lost its merges, or it would make too much of a
            text.
    """
    if FILE not in files:
        other = [name for name in _OTHER_FORMS if name in files]
        raise SourceError(
            f"the model has no {FILE}",
            why=f"its tokenizer is in an older form: {', '.join(other)}" if other else
                f"its side files: {', '.join(sorted(files)) or 'none'}",
            next="python -c \"from transformers import AutoTokenizer as T; "
                 "T.from_pretrained('DIR').save_pretrained('DIR')\" writes it into the model's folder DIR"
            if other else "get the model's tokenizer files too")
    with guarded(f"{FILE} can't be read"):
        inner = tokenizers.Tokenizer.from_str(files[FILE].decode("utf-8"))
        inner.no_truncation()
        inner.no_padding()
        check_growth(inner, FILE)
    if _NO_MERGES.search(files[FILE]) and isinstance(inner.model, tokenizers.models.BPE):
        added = {token.content for token in inner.get_added_tokens_decoder().values()}
        if not inner.model.ignore_merges and any(
                len(text) > 1 and text not in added and text != inner.model.unk_token
                and not _BYTE_TOKEN.fullmatch(text) for text in inner.get_vocab(with_added_tokens=False)):
            raise SourceError(f"{FILE} has a BPE tokenizer without merges",
                              why="every text would fall into single characters, unlike in the model's "
                                  "training", next="get the model's tokenizer files again")
    return inner


def encode(inner: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    """Ids of a text; ``special``: with what the post-processor puts around it.

    Raises:
        UsageError: the text holds half a surrogate pair, which no UTF-8 has.
        SourceError: the tokenizer fails.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the text holds half a character", next="correct or remove it",
                         why=f"character {error.start} is U+{ord(text[error.start]):04X}, half of a pair"
                         ) from None
    with guarded("the model's tokenizer failed on a text"):
        # a batch, because encoding a single text keeps every other thread waiting until it is done
        ids: list[int] = inner.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def decode(inner: tokenizers.Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    """Text of ids. Raises SourceError: the tokenizer fails."""
    with guarded("the model's tokenizer failed on token ids"):
        text: str = inner.decode(list(ids), skip_special_tokens=skip_special)
    return text


def check_growth(inner: tokenizers.Tokenizer, name: str) -> None:
    """Look at the parts of a tokenizer that write text or ids.

    Raises:
        SourceError: together they make too much of a text; ``name`` is the file's.
    """
    for part in (inner.normalizer, inner.pre_tokenizer, inner.decoder):
        factor = 1
        for step in _steps(part):
            factor *= _factor(step)
            if factor > MAX_FACTOR:
                raise SourceError(f"{name} makes a text more than {MAX_FACTOR} times as long",
                                  why=f"{type(part).__name__}: its steps multiply",
                                  next="don't use this file: no honest tool writes it")
    if (around := sum(map(_around, _steps(inner.post_processor)))) > MAX_AROUND:
        raise SourceError(f"{name} puts {around} tokens around every text", why=f"{MAX_AROUND} are allowed",
                          next="don't use this file: no honest tool writes it")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """What is done one after another; a step of a sequence may be a sequence."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        yield step
        for kind in ("normalizers", "pretokenizers", "decoders", "processors"):
            waiting += step.get(kind, [])


def _factor(step: dict[str, Any]) -> int:
    """Characters that a step writes for one that it reads, at most."""
    match step["type"]:
        case "Replace":
            old, new = step["pattern"].get("String"), len(step["content"])
            # an expression may match nothing, between any two characters
            return max(1, -(-new // len(old)) if old else 1 + new)
        case "Prepend":
            return 1 + len(step["prepend"])
        case "ByteLevel":
            return 4  # one for each byte of a character
        case "Precompiled":  # sentencepiece's: a trie behind its length, then the texts, each up to a NUL
            raw = base64.b64decode(step["precompiled_charsmap"])
            texts = raw[4 + int.from_bytes(raw[:4], "little"):].split(b"\0")
            return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    return 1


def _around(step: dict[str, Any]) -> int:
    """Ids of a template in the longer one of its two forms."""
    if step["type"] != "TemplateProcessing":
        return 2
    sizes = {name: len(entry["ids"]) for name, entry in step["special_tokens"].items()}
    forms = ([piece["SpecialToken"]["id"] for piece in step[form] if "SpecialToken" in piece]
             for form in ("single", "pair"))
    return max(sum(sizes.get(name, 0) for name in names) for names in forms)
