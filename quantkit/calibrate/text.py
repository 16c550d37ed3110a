"""Calibration text and the token windows cut from it."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable
from pathlib import Path

import torch

from quantkit.calibrate.docstrings import prose
from quantkit.errors import CalibrationError
from quantkit.spec import CalibrationSpec

BUILTIN = "builtin"
CHARACTERS_PER_TOKEN = 8
"""Of the built-in text, so much is collected for every token asked for: about twice what is needed."""
BYTES_PER_TOKEN = 64
"""Of a file, so many bytes are read for every token asked for: no tokenizer needs more."""


def calibration_text(spec: CalibrationSpec) -> str:
    """The text that ``spec`` names.

    Raises:
        CalibrationError: the file is missing, unreadable, empty or not UTF-8.
    """
    if spec.text == BUILTIN:
        text = prose(characters=spec.samples * spec.length * CHARACTERS_PER_TOKEN)
        if not text.strip():
            raise CalibrationError("the built-in calibration text is empty",
                                   why="this Python was installed without its standard library's sources",
                                   next="name a text file in the recipe: calibration: {text: FILE}")
        return text
    path = Path(spec.text).expanduser()
    limit = spec.samples * spec.length * BYTES_PER_TOKEN
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CalibrationError(f"the calibration text {spec.text} can't be read",
                               why=error.strerror or str(error),
                               next=f"give a UTF-8 text file, or {BUILTIN!r}") from error
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data[:limit], len(data) <= limit)
    except UnicodeDecodeError as error:
        raise CalibrationError(f"the calibration text {spec.text} is not UTF-8",
                               why=f"byte {error.start}: {error.reason}",
                               next=f"convert it, or use {BUILTIN!r}") from error
    if not text.strip():
        raise CalibrationError(f"the calibration text {spec.text} is empty",
                               next=f"give a file with text in it, or {BUILTIN!r}")
    return text


def calibration_tokens(spec: CalibrationSpec, encode: Callable[[str], list[int]]) -> torch.Tensor:
    """Windows of tokens, int64 ``[samples, length]``.

    The text is encoded whole and cut into windows that don't overlap; ``spec.seed`` chooses which.

    Args:
        spec: text, number and length of windows, seed.
        encode: text → token ids, without special tokens.

    Raises:
        CalibrationError: the text can't be had, or is too short.
    """
    ids = encode(calibration_text(spec))
    windows, need = len(ids) // spec.length, spec.samples * spec.length
    if windows < spec.samples:
        raise CalibrationError(
            f"the calibration text {spec.text} has {len(ids)} tokens, {need} are needed",
            why=f"{spec.samples} windows of {spec.length} tokens don't overlap",
            next=(f"calibration: {{samples: {windows}}}" if windows
                  else f"calibration: {{length: {len(ids)}, samples: 1}}") + ", or give a longer text")
    chosen = random.Random(spec.seed).sample(range(windows), spec.samples)
    return torch.tensor([ids[i * spec.length:(i + 1) * spec.length] for i in chosen], dtype=torch.int64)
