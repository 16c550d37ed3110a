"""Runs models over the same windows and scores them against the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import RegisteredMetric, registered_metrics
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval, Metric
from quantkit.evaluation.quality.hidden_states import (
    HiddenStates,
    Runner,
    WindowLogits,
    label_of,
    model_of,
    runner_of,
    states_of,
)
from quantkit.evaluation.quality.window_scores import WindowScores
from quantkit.models.config import ModelConfig
from quantkit.plugins.manager import BUILTIN
from quantkit.quantization.calibration.data import with_bos
from quantkit.support.errors import UsageError
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


def compare(models: Sequence[Runner], tokens: torch.Tensor, progress: Listener = silent, prompt: int = 0,
            exact: Runner | None = None,
            metrics: Sequence[RegisteredMetric] | None = None) -> list[dict[str, Interval]]:
    """Score models that are all in memory; the first is the reference.

    Args:
        models, tokens, progress, prompt, exact, metrics: as for :func:`score`.

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
def score(models: Sequence[Runner | HiddenStates], tokens: torch.Tensor, progress: Listener = silent,
          prompt: int = 0, exact: Runner | HiddenStates | None = None,
          metrics: Sequence[RegisteredMetric] | None = None,
          reference: HiddenStates | None = None) -> tuple[WindowScores, WindowScores | None]:
    """Score every model against the reference.

    Args:
        models: loaded models with the same vocabulary; or each with a KV setting, all with ``prompt``; or
            what a model left of ``tokens``.
        tokens: int64 ``[windows, window]``.
        progress: told before each model's window.
        prompt: the number of tokens at the beginning of a window that aren't scored.
        exact: the reference in float32 arithmetic: every model is compared with it too.
        metrics: the metrics to measure; by default every registered one.
        reference: what others are compared with; by default the first of the models.

    Returns:
        Each window's and each token's scores against the reference; and, with ``exact``, against that one:
        by :data:`EXACT` in the place of KL, top-1 and perplexity.

    Raises:
        UsageError: vocabularies differ.
        QuantkitError: a model's logits are not finite.
    """
    sizes = {model_of(runner_of(model)).config.vocab_size for model in models}
    if len(sizes) > 1:
        raise UsageError(f"the models have vocabularies of {sorted(sizes)} tokens",
                         why="KL and top-1 compare the same tokens", next="compare models of one family")
    scores = WindowScores(registered_metrics() if metrics is None else metrics, len(models))
    distances = WindowScores([RegisteredMetric(metric, BUILTIN) for metric in (
        Metric(EXACT, KL.score), TOP1, PERPLEXITY)], len(models))
    done, total = 0, len(models) * len(tokens)
    exact_windows = None if exact is None else _windows(exact, tokens, prompt)
    candidates = [_windows(model, tokens, prompt) for model in models]
    for number, window in enumerate(tokens):
        targets = window[1 + prompt:]
        truth = None if exact_windows is None else next(exact_windows)
        expected = None if reference is None or reference is models[0] else reference.window(number)
        for row, model in enumerate(models):
            progress(ProgressEvent(done, total, label_of(runner_of(model))))
            logits = next(candidates[row])
            expected = expected or logits
            scores.add(row, expected, logits, targets)
            if truth is not None:
                distances.add(row, truth, logits, targets)
            done += 1
    for model in models:
        model_of(runner_of(model)).check_files()
    progress(ProgressEvent(done, done, "scored"))
    return scores, None if exact is None else distances


def _windows(model: Runner | HiddenStates, tokens: torch.Tensor, prompt: int) -> Iterator[WindowLogits]:
    """A model's logits of each window."""
    if isinstance(model, HiddenStates):
        return map(model.window, range(len(tokens)))
    loaded = model_of(model)
    return (WindowLogits(loaded, states, number)
            for number, states in enumerate(states_of(model, tokens, prompt)))
