"""One measurement of a comparison: a model with its KV settings scored on one text, beside the reference."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.hidden_states import HiddenStates, Runner, model_of, runner_of
from quantkit.evaluation.quality.score import score
from quantkit.evaluation.quality.window_scores import WindowScores
from quantkit.evaluation.speed.decoding import weights_in_memory
from quantkit.evaluation.sweep.jobs import Job, JobRun
from quantkit.evaluation.sweep.models import ModelRef, TextWindows, with_kv
from quantkit.evaluation.sweep.store import MeasuredData, MeasurementResult
from quantkit.support.frozen import Frozen

Floor = Literal["none", "reference", "all"]
CACHED = 1.2
"""How many times as long a window takes that goes through a compressed cache."""


class QualityRow(Frozen):
    """A model with one KV setting on one text.

    Attributes:
        label: how its weights are kept.
        bits_per_weight, file_bytes, weight_bytes, manifest_sha256, kv, kv_bytes, kv_bytes_per_token: see
            :class:`~quantkit.evaluation.result.ModelResult`.
        dtype: the dtype of its activations.
        means: metric → its mean over each window; of a metric per run its statistics.
    """

    label: str
    bits_per_weight: float
    file_bytes: int
    weight_bytes: int
    manifest_sha256: str | None
    dtype: str
    means: dict[str, list[Any]]
    kv: str | None = None
    kv_bytes: int | None = None
    kv_bytes_per_token: int | None = None


class QualityData(MeasuredData):
    """A model on one text. Beside it stand arrays: ``N/kl``, … of row N, and the text's ``ids``.

    Attributes:
        tokens: sha256 of the ids.
        bos: whether windows begin with a BOS.
        words: whitespace-separated words of the windows.
        rows: one for each KV setting.
    """

    tokens: str
    bos: bool
    words: int
    rows: tuple[QualityRow, ...]


@dataclass(frozen=True)
class QualityJob(Job[QualityData]):
    """What is scored.

    Attributes:
        reference: the model that others are compared with.
        reference_kv: its setting, as text; ``None``: its own.
        model: the model that is scored.
        kv: its settings; ``(None,)``: its own.
        text: content, so far as it is needed.
        window, windows, prompt: see :class:`~quantkit.evaluation.protocol.Protocol`.
        floor: the models whose rows are compared with the reference's weights in float32 arithmetic, too.
        passes: how often each token goes through a model.
    """

    data = QualityData

    reference: ModelRef
    reference_kv: str | None
    model: ModelRef
    kv: tuple[str | None, ...]
    text: str
    window: int
    windows: int
    prompt: int | None
    floor: Floor = "none"
    passes: float = 1.0

    @property
    def of_reference(self) -> bool:
        """Whether the model is the reference itself; its first setting is then the reference."""
        return self.model == self.reference

    @property
    def exact(self) -> bool:
        """Whether it is compared with float32 arithmetic."""
        return self.floor == "all" or (self.floor == "reference" and self.of_reference)

    @property
    def copies(self) -> int:
        return 3 if self.exact else 2

    def seconds(self, tok_s: float) -> float:
        """By the number of passes through the model, without those by which others are measured."""
        return self._pass_seconds(tok_s) * (len(self.kv) - self.of_reference)

    def reference_seconds(self, tok_s: float) -> float:
        """What it takes longer where the reference hasn't read the text yet; float32 counts twice."""
        return self._pass_seconds(tok_s) * (3 if self.exact else 1)

    def _pass_seconds(self, tok_s: float) -> float:
        return self.window * self.windows * self.passes * (
            CACHED if self.prompt is not None else 1.0) / tok_s

    def measure(self, run: JobRun) -> MeasurementResult[QualityData]:
        """Score a model on a text.

        Raises:
            UsageError: the text is too short.
            QuantkitError: a model can't be loaded, or its logits aren't finite.
        """
        text = TextWindows(self.text, self.window, self.windows, self.prompt)
        total = 1 + self.exact + len(self.kv)
        truth = None
        if self.exact:
            truth = run.states(replace(self.reference, dtype="float32"), self.reference_kv, text,
                               run.part(0, 1, total))
        reference = run.states(self.reference, self.reference_kv, text, run.part(self.exact, 1, total))
        scored: list[Runner | HiddenStates] = [reference] if self.of_reference else []
        scored += [with_kv(run.load(self.model), kv, self.prompt) for kv in self.kv[len(scored):]]
        ids = reference.tokens
        scores, distances = score(scored, ids, run.part(1 + self.exact, len(scored), total), self.prompt or 0,
                                  truth, reference=reference)
        arrays: dict[str, np.ndarray] = {"ids": ids.numpy().astype(np.int32)}
        for number in range(len(scored)):
            arrays |= _named(number, "", scores, number)
        if distances is not None and self.of_reference:
            arrays |= _named(0, "exact_", distances, 0)
        rows = [_row(runner_of(model), scores, distances, number) for number, model in enumerate(scored)]
        tokenizer = model_of(reference.runner).tokenizer
        return MeasurementResult(QualityData(
            tokens=hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
            bos=tokenizer.first_id is not None, rows=tuple(rows),
            words=sum(len(tokenizer.decode(window, skip_special=False).split()) for window in ids.tolist())),
            arrays)


def _row(runner: Runner, scores: WindowScores, distances: WindowScores | None, place: int) -> QualityRow:
    model = model_of(runner)
    means = {name: np.stack(values).tolist() for name, values in scores.means[place].items()}
    if distances is not None:
        means[EXACT] = np.stack(distances.means[place][EXACT]).tolist()
    digest = None if model.manifest is None else hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    row = QualityRow(label=model.label, bits_per_weight=model.bits_per_weight, file_bytes=model.file_bytes,
                     weight_bytes=weights_in_memory(model), manifest_sha256=digest,
                     dtype=str(model.dtype).removeprefix("torch."), means=means)
    if isinstance(runner, TeacherForcedModel):
        return row.model_copy(update={"kv": str(runner.kv), "kv_bytes": runner.kv_bytes,
                                      "kv_bytes_per_token": runner.kv_bytes_per_token})
    return row


def _named(number: int, prefix: str, scores: WindowScores, place: int) -> dict[str, np.ndarray]:
    return {f"{number}/{prefix}{name}": array for name, array in scores.tokens(place).arrays().items()}


def metric_names() -> list[tuple[str, str]]:
    """What is measured and by whom: a part of what makes results comparable."""
    return [(registered.metric.name, registered.owner) for registered in registered_metrics()]
