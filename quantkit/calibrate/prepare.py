"""What a plan calibrates on, found before any work, or written when the run begins."""

from __future__ import annotations

import warnings

import torch

from quantkit.calibrate.data import SELF, CalibrationData, load_calibration, own_calibration
from quantkit.calibrate.written import WritingPrompt, write_windows
from quantkit.errors import CalibrationError
from quantkit.models.architecture import parse_config
from quantkit.models.linear import Weights
from quantkit.planning.plan import Plan
from quantkit.plugins import registry
from quantkit.progress import Listener, ProgressEvent, silent
from quantkit.sources.base import ModelSource
from quantkit.spec import CalibrationSpec
from quantkit.text.tokenizer import Tokenizer


def prepare(plan: Plan, source: ModelSource, progress: Listener = silent,
            strict: bool = False) -> CalibrationData | None:
    """What a run of ``plan`` calibrates on, with a warning of all that is bad about it.

    Args:
        plan: for the model of ``source``.
        source: gives tokenizer and chat template.
        progress: told of downloads.
        strict: a fallback is an error.

    Returns:
        ``None`` if no method needs any, or the model has yet to write it.

    Raises:
        CalibrationError: it can't be had, is malformed, or doesn't fit the model.
    """
    spec = plan.recipe.calibration
    if not plan.measured or spec is None:
        return None
    return read(spec, source, _widest(plan), progress, strict)


def read(spec: CalibrationSpec, source: ModelSource, widest: int, progress: Listener = silent,
         strict: bool = False) -> CalibrationData | None:
    """As :func:`prepare`, where the widest Linear with a Hessian has ``widest`` inputs."""
    config = source.config()
    if spec.length > (context := parse_config(config).max_position_embeddings):
        raise CalibrationError(f"windows of {spec.length} tokens are longer than the model's context",
                               why=f"it was made for {context} tokens", next=f"--length {context}, or less")
    tokenizer = Tokenizer(source.side_files(), config)
    if spec.text == SELF:
        form = WritingPrompt.of(tokenizer)  # raises where it can't
        if strict and form.fallback:
            raise CalibrationError(form.fallback, why="--strict makes every fallback an error",
                                   next="--calibration builtin, a template that works, or leave out --strict")
        return None
    return _warned(load_calibration(spec, tokenizer, parse_config(config).vocab_size, widest, progress))


def writes_itself(plan: Plan) -> bool:
    """Whether the model writes what it is calibrated on."""
    return plan.recipe.calibration is not None and plan.recipe.calibration.text == SELF and plan.calibrated


def write(plan: Plan, source: ModelSource, weights: Weights, progress: Listener) -> torch.Tensor:
    """Let the model write the windows, int64 ``[samples, length]``. Raises CalibrationError."""
    spec, config = plan.recipe.calibration, source.config()
    assert spec is not None
    tokenizer, total = Tokenizer(source.side_files(), config), spec.samples * spec.length
    return write_windows(parse_config(config), weights, tokenizer, spec,
                         lambda done: progress(ProgressEvent(done, total, "writing its calibration text")))


def own(plan: Plan, source: ModelSource, tokens: torch.Tensor) -> CalibrationData:
    """As :func:`prepare`, of what it has written."""
    spec, config = plan.recipe.calibration, source.config()
    assert spec is not None
    tokenizer = Tokenizer(source.side_files(), config)
    return _warned(own_calibration(spec, tokenizer, tokens, parse_config(config).vocab_size, _widest(plan),
                                   WritingPrompt.of(tokenizer).fallback))


def _widest(plan: Plan) -> int:
    """Inputs of the widest Linear that is solved by its Hessian; 0 if none is."""
    return max((row.shape[1] for row in plan.rows if row.name in plan.measured and row.method
                and "hessian" in registry("methods").get(row.method).needs), default=0)


def _warned(data: CalibrationData) -> CalibrationData:
    for text in data.coverage.warnings(data.tokens.shape[1]):
        warnings.warn(text, stacklevel=3)
    return data
