"""Windows of tokens: cut from documents, or drawn at random.

What enters a model's Linears depends on its weights more than on the text: channels that are large on text
are large on random tokens too. Statistics of random tokens are therefore good enough to choose ranges and
scales. They need no data set and no text that the model writes, only a forward pass. ZeroQuant,
https://arxiv.org/abs/2206.01861, trains layers on random tokens where there is no data; here they make
Hessians.

Tokens of a byte-pair encoding are numbered in the order of their merges, frequent ones first. They are drawn
by Zipf's law in that order, which is closer to text than equal chances.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from quantkit.quantization.recipe import CalibrationSpec
from quantkit.support.errors import CalibrationError

SEPARATOR = "\n\n"
"""Between documents of a stream."""
OFFSET = 50.0
"""Added to a token's number in Zipf's law, as in Mandelbrot's form of it: flattens the beginning."""
CORRELATION = 0.4
"""Factor on what a Hessian of random tokens has beside its diagonal. The diagonal says how large inputs are,
and that is much the same on text. How inputs go together is only partly so."""

Ids = list[int]


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
    pack = _stream if packing == "stream" else _documents
    return pack(spec, documents, available, avoid)


def _stream(spec: CalibrationSpec, documents: Sequence[Encoded], available: int,
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


def _documents(spec: CalibrationSpec, documents: Sequence[Encoded], available: int,
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
