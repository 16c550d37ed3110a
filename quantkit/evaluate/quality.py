"""Runs models over the same windows in lockstep and scores them against the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.errors import QuantkitError, UsageError
from quantkit.evaluate.forced import TeacherForcedModel
from quantkit.evaluate.metrics import EXACT, KL, Interval, Metric
from quantkit.plugins import registry
from quantkit.progress import Listener, ProgressEvent, silent
from quantkit.runtime.loader import LoadedModel

ROWS = 128
"""Positions scored at once: what is held beyond a window's logits is ROWS × vocabulary floats."""
MARGIN = 64
"""Tokens before a cut in the text that might have come out otherwise."""


def windows_of(loaded: LoadedModel, text: str, window: int, windows: int,
               options: tuple[str, str] = ("--window", "--windows")) -> torch.Tensor:
    """The first windows of a text as token ids, int64 ``[windows, window]``.

    Args:
        loaded: its tokenizer and context.
        text: long enough.
        window, windows: how many tokens, how often.
        options: where the user gave these two.

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
    return torch.tensor(ids[:need]).reshape(windows, window)


@torch.inference_mode()
def compare(models: Sequence[LoadedModel | TeacherForcedModel], tokens: torch.Tensor,
            progress: Listener = silent, prompt: int = 0,
            exact: LoadedModel | TeacherForcedModel | None = None) -> list[dict[str, Interval]]:
    """Score every model; the first is the reference.

    Args:
        models: loaded models with the same vocabulary; or each with a KV setting, all with ``prompt``.
        tokens: int64 ``[windows, window]``.
        progress: told before each model's window.
        prompt: the number of tokens at the beginning of a window that aren't scored.
        exact: the first model in float32 arithmetic: every model is compared with it too.

    Returns:
        for each model, every registered metric by its key; with ``exact`` also :data:`EXACT`.

    Raises:
        UsageError: vocabularies differ.
        QuantkitError: a model's logits are not finite.
    """
    loaded = [model.loaded if isinstance(model, TeacherForcedModel) else model for model in models]
    sizes = {model.config.vocab_size for model in loaded}
    if len(sizes) > 1:
        raise UsageError(f"the models have vocabularies of {sorted(sizes)} tokens",
                         why="KL and top-1 compare the same tokens", next="compare models of one family")
    table = registry("metrics")
    metrics: list[Metric] = [table.get(name) for name in table]
    means: list[list[list[float]]] = [[[] for _ in metrics] for _ in models]
    distance = Metric(EXACT, KL.score)
    distances: list[list[float]] = [[] for _ in models]
    done, total = 0, (len(models) + (exact is not None)) * len(tokens)
    for number, window in enumerate(tokens):
        targets = window[1 + prompt:]
        if exact is not None:
            progress(ProgressEvent(done, total, "float32"))
            truth = _logits(exact, window, number)
            done += 1
        reference: torch.Tensor | None = None
        for runner, scores, far in zip(models, means, distances):
            progress(ProgressEvent(done, total, _label(runner)))
            logits = _logits(runner, window, number)
            reference = logits if reference is None else reference
            for window_scores, mean in zip(scores, _score(metrics, reference, logits, targets)):
                window_scores.append(mean)
            if exact is not None:
                far += _score([distance], truth, logits, targets)
            done += 1
    progress(ProgressEvent(done, done, "scored"))
    return [{metric.name: metric.summarize(window_scores) for metric, window_scores in zip(metrics, scores)}
            | ({EXACT: distance.summarize(far)} if far else {}) for scores, far in zip(means, distances)]


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
    return f"{str(model.dtype).removeprefix('torch.')} overflows, or the weights are damaged"


def _score(metrics: Sequence[Metric], reference: torch.Tensor, candidate: torch.Tensor,
           targets: torch.Tensor) -> list[float]:
    totals = [0.0] * len(metrics)
    for begin in range(0, len(targets), ROWS):
        part = slice(begin, begin + ROWS)
        ours = candidate[part].float().log_softmax(-1)
        theirs = ours if reference is candidate else reference[part].float().log_softmax(-1)
        for i, metric in enumerate(metrics):
            totals[i] += float(metric.score(theirs, ours, targets[part].to(ours.device)).double().sum())
    return [total / len(targets) for total in totals]
