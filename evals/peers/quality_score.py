"""How far a model is from the unquantized one, for :mod:`quality`: quantkit's metrics, the same windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Metric
from quantkit.evaluation.quality.score import windows_of
from quantkit.evaluation.quality.window_scores import ROWS
from quantkit.evaluation.text import load_text
from quantkit.runtime.loader import LoadedModel, load

METRICS: dict[str, Metric] = {"perplexity": PERPLEXITY, "kl": KL, "top1": TOP1}


class PeerScorer:
    """Compares with the model in ``base``, run in float32.

    Args:
        base: the plain model.
        text: what is read.
        windows, window: how much of it; windows start afresh and don't overlap.
        work: where the reference's log-probabilities are kept, 4 bytes a position and vocabulary's token.
    """

    def __init__(self, base: Path, text: Path, windows: int, window: int, work: Path) -> None:
        self._base = base
        self._text = text
        self._shape = (windows, window)
        self._file = work / f"{text.stem}.f32"
        self._tokens: torch.Tensor | None = None

    def score(self, folder: Path, dtype: str) -> dict[str, Any]:
        """Metrics of a model with activations of ``dtype``, over all positions and (``half``) over those of
        the second half of each window, as llama.cpp counts; with 95% intervals over windows."""
        reference = self._reference()
        assert self._tokens is not None
        itself = folder == self._base and dtype == "float32"
        model = None if itself else load(str(folder), dtype=dtype)
        scores: dict[str, list[np.ndarray]] = {name: [] for name in METRICS}
        for number, window in enumerate(self._tokens):
            logits = torch.from_numpy(reference[number].copy()) if model is None else _logits(model, window)
            scored: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
            for start in range(0, len(logits), ROWS):
                part = slice(start, start + ROWS)
                exact = torch.from_numpy(reference[number, part].copy())
                ours, targets = logits[part].float().log_softmax(-1), window[1:][part]
                for name, metric in METRICS.items():
                    scored[name].append(metric.score(exact, ours, targets).double())
            for name, parts in scored.items():
                scores[name].append(torch.cat(parts).numpy())
        every = {name: np.stack(rows) for name, rows in scores.items()}
        half = self._shape[1] // 2
        return {**_summary(every), "half": _summary({name: rows[:, half:] for name, rows in every.items()}),
                "fused": model is not None and model.fallback_reason is None}

    def _reference(self) -> np.ndarray:
        windows, window = self._shape
        loaded: LoadedModel | None = None
        if self._tokens is None or not self._file.exists():
            loaded = load(str(self._base), dtype="float32")
            self._tokens = windows_of(loaded, load_text(str(self._text)).content, window, windows)
        if not self._file.exists():
            assert loaded is not None
            part = self._file.with_suffix(".part")
            logits = np.memmap(part, np.float32, "w+", shape=(windows, window - 1, loaded.config.vocab_size))
            for row, tokens in zip(logits, self._tokens, strict=True):
                row[:] = _logits(loaded, tokens).log_softmax(-1).numpy()
            logits.flush()
            part.rename(self._file)
        vocabulary = self._file.stat().st_size // (4 * windows * (window - 1))
        return np.memmap(self._file, np.float32, "r", shape=(windows, window - 1, vocabulary))


@torch.inference_mode()
def _logits(model: LoadedModel, window: torch.Tensor) -> torch.Tensor:
    """``[T - 1, vocab]``; those after the last token predict nothing that is known."""
    return model.model(window[None])[0, :-1].clone()


def _summary(scores: dict[str, np.ndarray]) -> dict[str, Any]:
    """Values and intervals; what is not finite is ``None``, since JSON has no other."""
    summaries = {name: METRICS[name].summarize(rows.mean(axis=1).tolist()) for name, rows in scores.items()}
    return {**{name: _finite([summary.value])[0] for name, summary in summaries.items()},
            "intervals": {name: _finite([summary.low, summary.high]) for name, summary in summaries.items()}}


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
