"""Calibration data: finds what the recipe names, renders and encodes it, and cuts it into windows;
or draws windows of random tokens.

It is read before any work, or written by the model when the run begins.
"""

from __future__ import annotations

import functools
import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.manifest import SHARED, CalibrationFacts, Coverage, Overlap, SourceFile
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Weights
from quantkit.models.outline import outline_of
from quantkit.quantization.calibration import hub
from quantkit.quantization.calibration.builtin_text import builtin_documents
from quantkit.quantization.calibration.files import DataFile, local_files, read_files, some_of
from quantkit.quantization.calibration.overlap import Passages, repeated
from quantkit.quantization.calibration.rows import Document
from quantkit.quantization.calibration.written import WritingPrompt, write_windows
from quantkit.quantization.recipe import CalibrationSpec
from quantkit.sources.base import ModelSource
from quantkit.structure.conversation import Message, conversation
from quantkit.structure.turns import Tool, turn_format
from quantkit.support.errors import CalibrationError, SourceError
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.text.tokenizer import Tokenizer

BUILTIN = "builtin"
SELF = "self"
RANDOM = "random"
EVALUATION = "eval's built-in text"
BYTES_PER_TOKEN = 64
"""Bytes of files that are read for every requested token: no tokenizer needs more."""
LONGEST_TEXT = 256 * 2**20
"""Bytes of a text to avoid."""
SEPARATOR = "\n\n"
"""Between documents of a stream."""
OFFSET = 50.0
"""Added to a token's number in Zipf's law, as in Mandelbrot's form of it: flattens the beginning."""
CORRELATION = 0.4
"""Factor on what a Hessian of random tokens has beside its diagonal. The diagonal says how large inputs are,
and that is much the same on text. How inputs go together is only partly so."""
Ids = list[int]


@dataclass(frozen=True)
class CalibrationData:
    """What calibrated methods see, and what is known of it.

    Attributes:
        tokens: int64 ``[windows, tokens]``.
        origins: for each window, the place where it begins.
        packing: ``stream`` or ``documents``.
        files: the files that were read; none for the built-in text.
        coverage: the report on the text.
    """

    tokens: torch.Tensor
    origins: tuple[str, ...]
    packing: str
    files: tuple[SourceFile, ...]
    coverage: Coverage

    @property
    def sha256(self) -> str:
        return tokens_sha256(self.tokens)


def prepare(spec: CalibrationSpec | None, source: ModelSource, widest: int, progress: Listener = silent,
            strict: bool = False) -> CalibrationData | None:
    """Read what a run calibrates on, and warn of everything that is bad about it.

    Args:
        spec: says what to read; ``None`` if no method needs calibration.
        source: the model: its tokenizer and chat template.
        widest: inputs of the widest Linear that is solved by its Hessian; 0 if there is none.
        progress: told of downloads.
        strict: a fallback, or a row that can't be used, is an error.

    Returns:
        ``None`` if ``spec`` is, or if the model has yet to write its text.

    Raises:
        CalibrationError: the text can't be had, is malformed, or doesn't fit the model.
    """
    if spec is None:
        return None
    config = source.config()
    outline = outline_of(source.uri, config, source.tensors())
    check_length(spec, outline.context)
    tokenizer = Tokenizer(source.side_files(), config)
    if spec.self_written:
        if (known := outline.known_config) is not None and known.diffusion is not None:
            raise CalibrationError("a model that writes blocks doesn't write its own calibration text",
                                   why="its logits say what stands at a mask, not what comes next",
                                   next="--calibration builtin, or a recipe such as int4")
        form = WritingPrompt.of(tokenizer)  # raises where it can't
        if strict and form.fallback:
            raise CalibrationError(form.fallback, why="--strict makes every fallback an error",
                                   next="--calibration builtin, a template that works, or leave out --strict")
        return None
    vocabulary = outline.vocab_size or tokenizer.vocab_size
    if spec.text == RANDOM:
        left_out = tokenizer.added_tokens.values()
        tokens = random_windows(spec.windows, spec.window, min(tokenizer.vocab_size, vocabulary), left_out,
                                spec.seed)
        # few tokens are enough: with the factor below, a Hessian has full rank whatever their number
        return _warned(own_calibration(spec, tokenizer, tokens, vocabulary, widest=0))
    return _warned(load_calibration(spec, tokenizer, vocabulary, widest, progress, strict))


def correlation(spec: CalibrationSpec | None) -> float:
    """The factor on what the Hessians of a calibration have beside their diagonals."""
    return CORRELATION if spec is not None and spec.text == RANDOM else 1.0


def write(spec: CalibrationSpec, source: ModelSource, model: LanguageModel, weights: Weights,
          progress: Listener) -> torch.Tensor:
    """Let the model write the windows, int64 ``[windows, tokens]``. Raises CalibrationError."""
    tokenizer, total = Tokenizer(source.side_files(), source.config()), spec.windows * spec.window
    return write_windows(model, weights, tokenizer, spec,
                         lambda done: progress(ProgressEvent(done, total, "writing its calibration text")))


def self_written_data(spec: CalibrationSpec, source: ModelSource, tokens: torch.Tensor,
                      widest: int) -> CalibrationData:
    """Like :func:`prepare`, for the windows ``tokens`` that the model has written."""
    config = source.config()
    tokenizer = Tokenizer(source.side_files(), config)
    vocabulary = outline_of(source.uri, config, source.tensors()).vocab_size
    return _warned(own_calibration(spec, tokenizer, tokens, vocabulary, widest,
                                   WritingPrompt.of(tokenizer).fallback))


def check_length(spec: CalibrationSpec, context: int) -> None:
    """Raise CalibrationError for windows that are longer than the model's context."""
    if spec.window > context:
        raise CalibrationError(f"windows of {spec.window} tokens are longer than the model's context",
                               why=f"it was made for {context} tokens", next=f"--window {context}, or less")


def load_calibration(spec: CalibrationSpec, tokenizer: Tokenizer, vocabulary: int, widest: int,
                     listen: Listener = silent, strict: bool = False) -> CalibrationData:
    """Find, encode and cut the text that ``spec`` names.

    Args:
        spec: says which text, and how many windows of which length.
        tokenizer: the model's, with its chat template.
        vocabulary: tokens that the model knows.
        widest: inputs of the widest Linear that is calibrated, for the report.
        listen: told of downloads.
        strict: a row that can't be used is an error; else it is left out and counted.

    Raises:
        CalibrationError: the data can't be had, is malformed, can't be rendered, or too little, or the
            tokenizer doesn't fit the model.
    """
    unusable: list[CalibrationError] | None = None if strict else []
    documents, read = _documents(spec, tokenizer, listen, unusable)
    packing = spec.packing
    if packing == "auto":
        packing = "documents" if any(document.is_chat for document in documents) else "stream"
    encoded, left_out = _encode(documents, tokenizer, packing, unusable)
    exams = _Exams(spec, tokenizer)
    windows = _windows(spec, encoded, packing, exams, unusable or [])
    tokens = with_bos(windows.tokens, tokenizer.first_id)
    if (largest := int(tokens.max())) >= vocabulary:
        raise CalibrationError(f"the tokenizer yields token {largest}, the model knows {vocabulary}",
                               why="tokenizer.json and config.json are of different models",
                               next="replace tokenizer.json by the model's own")
    no_chats = sum(not document.is_chat for document in documents)
    coverage = exams.look(tokens, Coverage(
        documents=len(encoded), chats=len(encoded) - no_chats, left_out=left_out,
        unusable=len(unusable or ()), unusable_first=_said(unusable[0]) if unusable else None,
        available=windows.available, vocabulary=vocabulary, widest=widest, avoided=windows.avoided,
        short=sum(len(text.ids) < spec.window for text in encoded), cut=windows.cut, lost=windows.lost))
    return CalibrationData(tokens, windows.origins, packing, read, coverage)


def own_calibration(spec: CalibrationSpec, tokenizer: Tokenizer, tokens: torch.Tensor, vocabulary: int,
                    widest: int, fallback: str | None = None) -> CalibrationData:
    """The same of windows (int64 ``[windows, tokens]``) that the model has written itself, or that were drawn
    from its vocabulary."""
    coverage = Coverage(documents=len(tokens), available=tokens.numel(), vocabulary=vocabulary, widest=widest,
                        fallback=fallback)
    origins = tuple(f"{spec.text}, window {i}" for i in range(len(tokens)))
    return CalibrationData(tokens, origins, "documents", (), _Exams(spec, tokenizer).look(tokens, coverage))


class _Exams:
    """The texts that models are evaluated on: by default, and those to avoid."""

    def __init__(self, spec: CalibrationSpec, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._avoid = [(Path(name).name, Passages(_text_to_avoid(name))) for name in spec.avoid]

    def hit(self, ids: Ids) -> bool:
        """Whether a text to avoid has a fifth of this or more."""
        if not self._avoid:
            return False
        text = self._tokenizer.decode(ids)
        return any(known.share(text) >= SHARED for _, known in self._avoid)

    def look(self, tokens: torch.Tensor, coverage: Coverage) -> Coverage:
        """The report with what is known of the windows themselves."""
        same, similar = repeated(tokens.numpy())
        texts = [self._tokenizer.decode(ids) for ids in tokens.tolist()]
        overlaps = []
        for name, known in [(EVALUATION, _evaluation_text()), *self._avoid]:
            shares = [known.share(text) for text in texts]
            overlaps.append(Overlap(text=name, windows=sum(share >= SHARED for share in shares),
                                    largest=round(max(shares), 4)))
        return coverage.model_copy(update={
            "used": tokens.numel(), "distinct": tokens.unique().numel(), "same": same, "similar": similar,
            "overlaps": tuple(overlaps)})


def _windows(spec: CalibrationSpec, encoded: Sequence[Encoded], packing: str, exams: _Exams,
             unusable: Sequence[CalibrationError]) -> Windows:
    try:
        return cut_windows(spec, encoded, packing, exams.hit)
    except TooFewWindowsError as error:
        if not unusable:
            raise
        why = f"{error.why}; rows that can't be used: {len(unusable)}, the first: {_said(unusable[0])}"
        assert error.next
        raise TooFewWindowsError(error.what, why=why, next=error.next, windows=error.windows) from None


def _said(error: CalibrationError) -> str:
    return ": ".join(filter(None, (error.what, error.why)))


def _documents(spec: CalibrationSpec, tokenizer: Tokenizer, listen: Listener,
               unusable: list[CalibrationError] | None) -> tuple[list[Document], tuple[SourceFile, ...]]:
    need = spec.windows * spec.window
    parts: list[DataFile | Document] = []
    for name in spec.texts:
        if name == BUILTIN:
            # twice as much where windows may be left out
            parts += builtin_documents(need * (2 if spec.avoid else 1), tokenizer)
        elif name.startswith(hub.PREFIX):
            parts += hub.dataset_files(name, need * BYTES_PER_TOKEN, listen)
        else:
            parts += some_of(local_files(name), need * BYTES_PER_TOKEN, spec.seed)
    read = read_files([part for part in parts if isinstance(part, DataFile)], need * BYTES_PER_TOKEN,
                      unusable)
    by_file = dict(read)
    documents = [document for part in parts
                 for document in (by_file[part] if isinstance(part, DataFile) else [part])]
    return documents, tuple(SourceFile(name=file.name, sha256=file.sha256(), revision=file.revision)
                            for file, _ in read)


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, packing: str,
            unusable: list[CalibrationError] | None) -> tuple[list[Encoded], int]:
    """Tokens of each document, and how many conversations are left out as someone writes a special token in
    them. One that can't be rendered is left out too, and the reason goes to ``unusable``."""
    encoded: list[Encoded] = []
    broken: list[CalibrationError] = []
    left_out = 0
    for number, document in enumerate(documents, 1):
        try:
            text = document.content if isinstance(document.content, str) else _rendered(document, tokenizer)
        except CalibrationError as error:
            if unusable is None or not tokenizer.has_chat:
                raise
            broken.append(error)
            continue
        if text is None:
            left_out += 1
            continue
        if packing == "stream" and number < len(documents):
            text += SEPARATOR
        encoded.append(Encoded(document.where, tokenizer.encode(text, special=False)))
    if not encoded and broken:
        raise broken[0]
    if not encoded:
        raise CalibrationError("every conversation is left out: a special token is written in it",
                               why=f"the model's: {', '.join(sorted(tokenizer.controls.ids)[:8])}",
                               next="give text as it is before a chat template, or under the key 'text'")
    if unusable is not None:
        unusable += broken
    return encoded, left_out


def _rendered(chat: Document, tokenizer: Tokenizer) -> str | None:
    """The conversation as the chat template writes it; ``None`` if someone writes a special token in it.
    With tools it is prepared as a server prepares it."""
    assert not isinstance(chat.content, str)
    messages: Sequence[Mapping[str, Any]] = chat.content
    tools: list[Message] | None = None
    try:
        if chat.tools or any("tool_calls" in turn or turn["role"] == "tool" for turn in messages):
            messages, tools = conversation(turn_format(tokenizer), messages, [
                Tool(tool["name"], tool.get("description") or "", dict(tool.get("parameters") or {}))
                for tool in chat.tools])
        if any(tokenizer.controls.typed_in(text) for text in _texts([messages, tools])):
            return None
        return tokenizer.chat_text(messages, answer=False, tools=tools)
    except SourceError as error:
        problem = error.what if tokenizer.has_chat else "the model has no chat template"
        raise CalibrationError(f"{chat.where} can't be rendered: {problem}", why=error.why,
                               next="remove that line, or correct its roles" if tokenizer.has_chat else
                                    "give plain text (key 'text'), or calibrate with 'builtin'") from None
    except UnicodeEncodeError as error:
        raise CalibrationError(f"{chat.where} holds half a character in its tools or calls",
                               why=str(error)[:200], next="correct or remove that line") from None


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and mappings, however deep. Raises UnicodeEncodeError for half a character."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            value.encode()
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


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
    """The text that ``quantkit eval`` reads when none is named."""
    from pydoc_data.topics import topics

    return Passages("\n".join(map(str, topics.values())))


def calibration_facts(spec: CalibrationSpec | None, data: CalibrationData | None) -> CalibrationFacts | None:
    """What a manifest says of a run's calibration; ``None`` if it doesn't calibrate, or has yet to write its
    text."""
    if data is None or spec is None:
        return None
    return CalibrationFacts(text=", ".join(spec.without_folders().texts), windows=spec.windows,
                            window=spec.window, seed=spec.seed, importance=spec.importance,
                            tokens=data.tokens.numel(), sha256=data.sha256, packing=data.packing,
                            files=data.files, coverage=data.coverage)


def _warned(data: CalibrationData) -> CalibrationData:
    for text in data.coverage.warnings(data.tokens.shape[1]):
        warnings.warn(text, stacklevel=3)
    return data


# windows


@dataclass(frozen=True)
class Encoded:
    """A document's tokens; in a stream those of the separator behind it too."""

    where: str
    ids: Ids


@dataclass(frozen=True)
class Windows:
    """What calibrated methods see.

    Attributes:
        tokens: int64 ``[windows, tokens]``.
        origins: the document that each window begins in, and the token there.
        available: tokens that there were to choose from.
        cut: documents whose end had no room in their window.
        lost: the number of tokens that those ends had.
        avoided: windows (of a stream) or documents left out for what they share with texts to avoid.
    """

    tokens: torch.Tensor
    origins: tuple[str, ...]
    available: int
    cut: int = 0
    lost: int = 0
    avoided: int = 0


class TooFewWindowsError(CalibrationError):
    """There is too little text.

    Args:
        what, why, next: see :class:`~quantkit.support.errors.QuantkitError`.
        windows: the number of windows that there are.
    """

    def __init__(self, what: str, *, why: str, next: str, windows: int) -> None:
        super().__init__(what, why=why, next=next)
        self.windows = windows


def tokens_sha256(tokens: torch.Tensor) -> str:
    """The sha256 of tokens as little-endian int64."""
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()


def with_bos(windows: torch.Tensor, first_id: int | None) -> torch.Tensor:
    """Windows cut from a text, int64 ``[n, tokens]``, each as a text of its own: its first token gives its
    place to the BOS that the tokenizer puts in front of texts, if there is one."""
    if first_id is None:
        return windows
    windows = windows.clone()
    windows[:, 0] = first_id
    return windows


def cut_windows(spec: CalibrationSpec, documents: Sequence[Encoded], packing: str,
                avoid: Callable[[Ids], bool] = lambda ids: False) -> Windows:
    """Windows that don't overlap; ``spec.seed`` chooses which.

    A ``stream`` is cut wherever a window ends. Else a window begins with a document and goes on with the
    next ones until it is full; what is left of the last one is lost. So no window holds padding.

    Args:
        spec: number and length of windows, seed, the text's name for messages.
        packing: ``stream`` or ``documents``.
        avoid: whether some tokens must be left out.

    Raises:
        TooFewWindowsError: there are too few tokens.
    """
    available = sum(len(document.ids) for document in documents)
    pack = _stream_windows if packing == "stream" else _document_windows
    return pack(spec, documents, available, avoid)


def _stream_windows(spec: CalibrationSpec, documents: Sequence[Encoded], available: int,
                    avoid: Callable[[Ids], bool]) -> Windows:
    ids = [token for document in documents for token in document.ids]
    pieces = [ids[i:i + spec.window] for i in range(0, len(ids) - spec.window + 1, spec.window)]
    clean = [i for i, piece in enumerate(pieces) if not avoid(piece)]
    if len(clean) < spec.windows:
        raise too_short(spec, available, len(clean), len(pieces) - len(clean))
    chosen = random.Random(spec.seed).sample(clean, spec.windows)
    return Windows(torch.tensor([pieces[i] for i in chosen], dtype=torch.int64),
                   tuple(_place(documents, i * spec.window) for i in chosen), available,
                   avoided=len(pieces) - len(clean))


def _place(documents: Sequence[Encoded], token: int) -> str:
    for document in documents:
        if token < len(document.ids):
            return f"{document.where}, from token {token}"
        token -= len(document.ids)
    raise IndexError(token)


def _document_windows(spec: CalibrationSpec, documents: Sequence[Encoded], available: int,
                      avoid: Callable[[Ids], bool]) -> Windows:
    waiting = [document for document in documents if document.ids]
    random.Random(spec.seed).shuffle(waiting)
    rows: list[Ids] = []
    origins: list[str] = []
    row: Ids = []
    cut = lost = avoided = 0
    for document in waiting:
        if len(rows) == spec.windows:
            break
        if avoid(document.ids):
            avoided += 1
            continue
        if not row:
            origins.append(document.where)
        room = spec.window - len(row)
        row = row + document.ids[:room]
        if (surplus := len(document.ids) - room) > 0:
            cut, lost = cut + 1, lost + surplus
        if len(row) == spec.window:
            rows.append(row)
            row = []
    if len(rows) < spec.windows:
        raise too_short(spec, available, len(rows), avoided)
    return Windows(torch.tensor(rows, dtype=torch.int64), tuple(origins), available, cut, lost, avoided)


def too_short(spec: CalibrationSpec, available: int, windows: int, avoided: int) -> TooFewWindowsError:
    """There are ``windows`` only."""
    name, need = ", ".join(spec.texts), spec.windows * spec.window
    why = f"{windows} of {spec.windows} windows of {spec.window} tokens are filled"
    if avoided:
        why += f"; {avoided} were left out for what they share with {', '.join(spec.avoid)}"
    return TooFewWindowsError(
        f"the calibration text {name} has {available} tokens, {need} are needed", why=why,
        next=(f"--windows {windows}" if windows else f"--windows 1 --window {max(8, available)}")
        + ", or give more text", windows=windows)


def random_windows(samples: int, length: int, vocabulary: int, left_out: Iterable[int],
                   seed: int) -> torch.Tensor:
    """Draw windows, int64 ``[windows, tokens]``.

    What enters a model's Linears depends on its weights more than on the text: channels that are large on
    text are large on random tokens too. Statistics of random tokens are therefore good enough to choose
    ranges and scales. They need no data set and no text that the model writes, only a forward pass.
    ZeroQuant, https://arxiv.org/abs/2206.01861, trains layers on random tokens where there is no data; here
    they make Hessians.

    Tokens of a byte-pair encoding are numbered in the order of their merges, frequent ones first. They are
    drawn by Zipf's law in that order, which is closer to text than equal chances.

    Args:
        samples, length: number of windows, and tokens in each.
        vocabulary: tokens are numbers below this.
        left_out: tokens that are never drawn, such as those that begin and end turns.
        seed: gives the same tokens on every machine.
    """
    chances = 1 / (torch.arange(vocabulary, dtype=torch.float64) + OFFSET)
    chances[[token for token in left_out if token < vocabulary]] = 0
    cumulative = chances.cumsum(0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    uniform = torch.rand(samples, length, dtype=torch.float64, generator=generator)
    return torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_(max=vocabulary - 1)
