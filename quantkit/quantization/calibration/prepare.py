"""The tokens that a run calibrates on: read before any work, or written by the model when the run begins."""

from __future__ import annotations

import warnings

import torch

from quantkit.models.architecture import parse_config
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Weights
from quantkit.quantization.calibration.data import (
    RANDOM,
    SELF,
    CalibrationData,
    check_length,
    load_calibration,
    own_calibration,
)
from quantkit.quantization.calibration.random_tokens import CORRELATION, random_windows
from quantkit.quantization.calibration.written import WritingPrompt, write_windows
from quantkit.quantization.specs import CalibrationSpec
from quantkit.sources.base import ModelSource
from quantkit.support.errors import CalibrationError
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.text.tokenizer import Tokenizer


def prepare(spec: CalibrationSpec | None, source: ModelSource, widest: int, progress: Listener = silent,
            strict: bool = False) -> CalibrationData | None:
    """Read what a run calibrates on, and warn of everything that is bad about it.

    Args:
        spec: what to read; ``None``: no method needs calibration.
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
    check_length(spec, parse_config(config).max_position_embeddings)
    tokenizer = Tokenizer(source.side_files(), config)
    if spec.text == SELF:
        form = WritingPrompt.of(tokenizer)  # raises where it can't
        if strict and form.fallback:
            raise CalibrationError(form.fallback, why="--strict makes every fallback an error",
                                   next="--calibration builtin, a template that works, or leave out --strict")
        return None
    vocabulary = parse_config(config).vocab_size
    if spec.text == RANDOM:
        left_out = tokenizer.added_tokens.values()
        tokens = random_windows(spec.windows, spec.window, min(tokenizer.vocab_size, vocabulary), left_out,
                                spec.seed)
        # few tokens are enough: with the factor below, a Hessian has full rank whatever their number
        return _warned(own_calibration(spec, tokenizer, tokens, vocabulary, widest=0))
    return _warned(load_calibration(spec, tokenizer, vocabulary, widest, progress, strict))


def writes_itself(spec: CalibrationSpec | None) -> bool:
    """Whether the model writes the text that it is calibrated on."""
    return spec is not None and spec.text == SELF


def correlation(spec: CalibrationSpec | None) -> float:
    """The factor on what the Hessians of a calibration have beside their diagonals."""
    return CORRELATION if spec is not None and spec.text == RANDOM else 1.0


def write(spec: CalibrationSpec, source: ModelSource, model: LanguageModel, weights: Weights,
          progress: Listener) -> torch.Tensor:
    """Let the model write the windows, int64 ``[windows, tokens]``. Raises CalibrationError."""
    tokenizer, total = Tokenizer(source.side_files(), source.config()), spec.windows * spec.window
    return write_windows(model, weights, tokenizer, spec,
                         lambda done: progress(ProgressEvent(done, total, "writing its calibration text")))


def own(spec: CalibrationSpec, source: ModelSource, tokens: torch.Tensor, widest: int) -> CalibrationData:
    """Like :func:`prepare`, for the windows ``tokens`` that the model has written."""
    config = source.config()
    tokenizer = Tokenizer(source.side_files(), config)
    return _warned(own_calibration(spec, tokenizer, tokens, parse_config(config).vocab_size, widest,
                                   WritingPrompt.of(tokenizer).fallback))


def _warned(data: CalibrationData) -> CalibrationData:
    for text in data.coverage.warnings(data.tokens.shape[1]):
        warnings.warn(text, stacklevel=3)
    return data
