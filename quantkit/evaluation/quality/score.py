"""Runs models over the same windows in lockstep and scores them against the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import RegisteredMetric, registered_metrics
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval, Metric
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.window_scores import WindowScores
from quantkit.models.config import ModelConfig
from quantkit.plugins.manager import BUILTIN
from quantkit.quantization.calibration.data import with_bos
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import QuantkitError, UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.text.tokenizer import Tokenizer

MARGIN = 64
"""Tokens before a cut in the text that might have come out otherwise."""


class TokenizedModel(Protocol):
    """What is needed of a model to cut a text into windows."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def windows_of(loaded: TokenizedModel, text: str, window: int, windows: int,
               options: tuple[str, str] = ("--window", "--windows")) -> torch.Tensor:
    """The first windows of a text as token ids, int64 ``[windows, window]``, each with its BOS if the
    tokenizer puts one in front of texts.

    Args:
        loaded: its tokenizer and context.
        text: the text; it must be long enough.
        window, windows: how many tokens, how often.
        options: the options by which the user gave these two.

    Raises:
        UsageError: the text is too short, or the window longer than the model's context.
    """
    if window > loaded.config.max_position_embeddings:
        raise UsageError(f"{options[0]} {window} is longer than the model's context",
                         why=f"it was made for {loaded.config.max_position_embeddings} tokens")
    need = window * windows
    # Windows are cut from the ids of the whole text, so that no cut falls inside a word. Of a long
    # text only a beginning that holds far more than enough is tokenized; the ids are the same.
    head = text[:need * 24 + 4096]
    ids = loaded.tokenizer.encode(head, special=False)
    if len(ids) < need + MARGIN and len(head) < len(text):
        ids = loaded.tokenizer.encode(text, special=False)
    if len(ids) < need:
        raise UsageError(f"the text has {len(ids)} tokens, {need} are needed",
                         why=f"{windows} windows of {window} tokens",
                         next=f"{options[1]} {len(ids) // window}" if len(ids) >= window
                         else f"give a longer text, or a smaller {options[0]}")
    return with_bos(torch.tensor(ids[:need]).reshape(windows, window), loaded.tokenizer.first_id)


def compare(models: Sequence[LoadedModel | TeacherForcedModel], tokens: torch.Tensor,
            progress: Listener = silent, prompt: int = 0,
            exact: LoadedModel | TeacherForcedModel | None = None,
            metrics: Sequence[RegisteredMetric] | None = None) -> list[dict[str, Interval]]:
    """Score every model; the first is the reference.

    Args:
        models: loaded models with the same vocabulary; or each with a KV setting, all with ``prompt``.
        tokens: int64 ``[windows, window]``.
        progress: told before each model's window.
        prompt: the number of tokens at the beginning of a window that aren't scored.
        exact: the first model in float32 arithmetic: every model is compared with it too.
        metrics: the metrics to measure; by default every registered one.

    Returns:
        for each model, every metric by its key; with ``exact`` also :data:`EXACT`. A plugin's metric that
        fails is in none of them, with one warning.

    Raises:
        UsageError: vocabularies differ.
        QuantkitError: a model's logits are not finite.
    """
    scores, distances = score(models, tokens, progress, prompt, exact, metrics)
    rows = scores.summaries()
    return rows if distances is None else [row | {EXACT: far[EXACT]} for row, far
                                           in zip(rows, distances.summaries())]


@torch.inference_mode()
def score(models: Sequence[LoadedModel | TeacherForcedModel], tokens: torch.Tensor,
          progress: Listener = silent, prompt: int = 0,
          exact: LoadedModel | TeacherForcedModel | None = None,
          metrics: Sequence[RegisteredMetric] | None = None) -> tuple[WindowScores, WindowScores | None]:
    """:func:`compare` before it is summed up: each window's and each token's scores.

    Returns:
        against the first model; and, with ``exact``, against that one: by :data:`EXACT` in the place of KL,
        top-1 and perplexity.
    """
    loaded = [model.loaded if isinstance(model, TeacherForcedModel) else model for model in models]
    sizes = {model.config.vocab_size for model in loaded}
    if len(sizes) > 1:
        raise UsageError(f"the models have vocabularies of {sorted(sizes)} tokens",
                         why="KL and top-1 compare the same tokens", next="compare models of one family")
    scores = WindowScores(registered_metrics() if metrics is None else metrics, len(models))
    distances = WindowScores([RegisteredMetric(metric, BUILTIN) for metric in (
        Metric(EXACT, KL.score), TOP1, PERPLEXITY)], len(models))
    done, total = 0, (len(models) + (exact is not None)) * len(tokens)
    for number, window in enumerate(tokens):
        targets = window[1 + prompt:]
        if exact is not None:
            progress(ProgressEvent(done, total, "float32"))
            truth = _logits(exact, window, number)
            done += 1
        reference: torch.Tensor | None = None
        for row, runner in enumerate(models):
            progress(ProgressEvent(done, total, _label(runner)))
            logits = _logits(runner, window, number)
            reference = logits if reference is None else reference
            scores.add(row, reference, logits, targets)
            if exact is not None:
                distances.add(row, truth, logits, targets)
            done += 1
    progress(ProgressEvent(done, done, "scored"))
    return scores, None if exact is None else distances


def _logits(runner: LoadedModel | TeacherForcedModel, window: torch.Tensor, number: int) -> torch.Tensor:
    """``[T, vocab]``: all but the last, whose next token isn't known."""
    model = runner.loaded if isinstance(runner, TeacherForcedModel) else runner
    logits = runner.logits(window)[:-1] if isinstance(runner, TeacherForcedModel) else model.model(
        window[None].to(model.model.device))[0, :-1]
    if not (logits < torch.inf).all():
        raise QuantkitError(f"{model.uri} gives logits that are not finite", next="--dtype float32",
                            why=f"at window {number}: {_overflow(model)}")
    return logits


def _label(runner: LoadedModel | TeacherForcedModel) -> str:
    return runner.label if isinstance(runner, LoadedModel) else f"{runner.loaded.label} kv {runner.kv}"


def _overflow(model: LoadedModel) -> str:
    return f"{str(model.dtype).removeprefix('torch.')} overflows"
