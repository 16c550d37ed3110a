"""Calibration data: what the recipe names, found, rendered, encoded, cut into windows and looked at."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantkit.calibrate import hub
from quantkit.calibrate.coverage import SHARED, Coverage, Overlap, SourceFile
from quantkit.calibrate.docstrings import prose
from quantkit.calibrate.files import DataFile, local_files, read_files
from quantkit.calibrate.overlap import Passages, repeated
from quantkit.calibrate.rows import Document
from quantkit.calibrate.windows import SEPARATOR, Encoded, Ids, Windows, cut_windows
from quantkit.errors import CalibrationError, SourceError
from quantkit.progress import Listener, silent
from quantkit.spec import CalibrationSpec
from quantkit.text.tokenizer import Tokenizer

BUILTIN = "builtin"
EVALUATION = "eval's built-in text"
CHARACTERS_PER_TOKEN = 8
"""Of the built-in text, so much is collected for every token asked for: about twice what is needed."""
BYTES_PER_TOKEN = 64
"""Of files, so many bytes are read for every token asked for: no tokenizer needs more."""
LONGEST_TEXT = 256 * 2**20
"""Bytes of a text to avoid."""


@dataclass(frozen=True)
class CalibrationData:
    """What calibrated methods see, and what is known of it.

    Attributes:
        tokens: int64 ``[samples, length]``.
        origins: of each window, where it begins.
        packing: ``stream`` or ``documents``.
        files: what was read; none for the built-in text.
        coverage: the report.
    """

    tokens: torch.Tensor
    origins: tuple[str, ...]
    packing: str
    files: tuple[SourceFile, ...]
    coverage: Coverage

    @property
    def sha256(self) -> str:
        """Of the tokens as little-endian int64."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()


def load_calibration(spec: CalibrationSpec, files: Mapping[str, bytes], vocabulary: int, widest: int,
                     listen: Listener = silent) -> CalibrationData:
    """Find, encode and cut the text that ``spec`` names.

    Args:
        spec: which text, how many windows of which length.
        files: the model's side files: its tokenizer and chat template.
        vocabulary: tokens that the model knows.
        widest: inputs of the widest Linear that is calibrated, for the report.
        listen: told of downloads.

    Raises:
        CalibrationError: the model has no tokenizer that fits, or the data can't be had, is malformed,
            can't be rendered, or too little.
    """
    tokenizer = _tokenizer(files)
    documents, read = _documents(spec, listen)
    packing = spec.packing
    if packing == "auto":
        packing = "documents" if any(one.is_chat for one in documents) else "stream"
    encoded = _encode(documents, tokenizer, packing)
    avoid = [(Path(name).name, Passages(_text_to_avoid(name))) for name in spec.avoid]
    shares = functools.partial(_share, tokenizer)
    windows = cut_windows(spec, encoded, packing,
                          lambda ids: any(shares(known, ids) >= SHARED for _, known in avoid))
    if (largest := int(windows.tokens.max())) >= vocabulary:
        raise CalibrationError(f"the tokenizer yields token {largest}, the model knows {vocabulary}",
                               why="tokenizer.json and config.json are of different models",
                               next="replace tokenizer.json by the model's own")
    overlaps = tuple(_overlap(name, [shares(known, ids) for ids in windows.tokens.tolist()])
                     for name, known in [(EVALUATION, _evaluation_text()), *avoid])
    coverage = _coverage(documents, encoded, windows, spec.length, vocabulary, widest, overlaps)
    return CalibrationData(windows.tokens, windows.origins, packing, read, coverage)


def _coverage(documents: Sequence[Document], encoded: Sequence[Encoded], windows: Windows, length: int,
              vocabulary: int, widest: int, overlaps: tuple[Overlap, ...]) -> Coverage:
    same, similar = repeated(windows.tokens.numpy())
    return Coverage(
        documents=len(encoded), chats=sum(one.is_chat for one in documents) - (len(documents) - len(encoded)),
        available=windows.available, used=windows.tokens.numel(),
        distinct=int(np.unique(windows.tokens.numpy()).size), vocabulary=vocabulary, widest=widest,
        short=sum(len(one.ids) < length for one in encoded), cut=windows.cut, lost=windows.lost,
        left_out=len(documents) - len(encoded), avoided=windows.avoided, same=same, similar=similar,
        overlaps=overlaps)


def _tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    try:
        return Tokenizer(files, {})
    except SourceError as error:
        raise CalibrationError(f"calibration needs the model's tokenizer: {error.what}", why=error.why,
                               next="add it to the model's folder, or use a data-free recipe: "
                                    "quantkit recipes list") from error


def _documents(spec: CalibrationSpec, listen: Listener) -> tuple[list[Document], tuple[SourceFile, ...]]:
    need = spec.samples * spec.length
    found: list[DataFile | Document] = []
    for name in spec.texts:
        if name == BUILTIN:
            found.append(Document(BUILTIN, _builtin(need * CHARACTERS_PER_TOKEN)))
        elif name.startswith(hub.PREFIX):
            found += hub.dataset_files(name, need * BYTES_PER_TOKEN, listen)
        else:
            found += local_files(name)
    read = read_files([one for one in found if isinstance(one, DataFile)], need * BYTES_PER_TOKEN)
    by_file = dict(read)
    documents = [document for one in found
                 for document in (by_file[one] if isinstance(one, DataFile) else [one])]
    return documents, tuple(SourceFile(name=file.name, sha256=file.sha256(), revision=file.revision)
                            for file, _ in read)


def _builtin(characters: int) -> str:
    text = prose(characters=characters)
    if not text.strip():
        raise CalibrationError("the built-in calibration text is empty",
                               why="this Python was installed without its standard library's sources",
                               next="name a text: --calibration FILE, or calibration: {text: FILE}")
    return text


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, packing: str) -> list[Encoded]:
    """Tokens of each document; a conversation in which someone writes a special token is left out."""
    found = []
    for number, one in enumerate(documents, 1):
        if isinstance(one.content, str):
            text = one.content
        elif any(token in turn["content"] for turn in one.content for token in tokenizer.specials):
            continue
        else:
            text = _rendered(one, tokenizer)
        if packing == "stream" and number < len(documents):
            text += SEPARATOR
        found.append(Encoded(one.where, tokenizer.encode(text, special=False)))
    if not found:
        raise CalibrationError("every conversation is left out: a special token is written in it",
                               why=f"the model's: {', '.join(sorted(tokenizer.specials)[:8])}",
                               next="give text as it is before a chat template, or under the key 'text'")
    return found


def _rendered(chat: Document, tokenizer: Tokenizer) -> str:
    assert not isinstance(chat.content, str)
    try:
        return tokenizer.chat_text(chat.content, answer=False)
    except SourceError as error:
        what = error.what if tokenizer.has_chat else "the model has no chat template"
        raise CalibrationError(f"{chat.where} can't be rendered: {what}", why=error.why,
                               next="remove that line, or correct its roles" if tokenizer.has_chat else
                                    "give plain text (key 'text'), or calibrate with 'builtin'") from None


def _text_to_avoid(name: str) -> str:
    try:
        with Path(name).expanduser().open("rb") as file:
            raw = file.read(LONGEST_TEXT + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise CalibrationError(f"the text to avoid {name} can't be read",
                               why=getattr(error, "strerror", None) or str(error),
                               next="give the UTF-8 file that models will be evaluated on") from None
    if len(raw) > LONGEST_TEXT:
        raise CalibrationError(f"the text to avoid {name} is larger than {LONGEST_TEXT >> 20} MiB",
                               next="give the part of it that models will be evaluated on")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"the text to avoid {name} is not UTF-8", next="convert it",
                               why=f"byte {error.start}: {error.reason}") from None
    if not text.strip():
        raise CalibrationError(f"the text to avoid {name} is empty", next="leave it out")
    return text


@functools.cache
def _evaluation_text() -> Passages:
    """Of what ``quantkit eval`` reads when no text is named."""
    from pydoc_data.topics import topics

    return Passages("\n".join(map(str, topics.values())))


def _share(tokenizer: Tokenizer, known: Passages, ids: Ids) -> float:
    return known.share(tokenizer.decode(ids))


def _overlap(name: str, shares: Sequence[float]) -> Overlap:
    return Overlap(text=name, windows=sum(share >= SHARED for share in shares),
                   largest=round(max(shares), 4))
