"""One measurement of a comparison: a model with its KV settings scored on one text, beside the reference."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.score import score, windows_of
from quantkit.evaluation.quality.window_scores import WindowScores
from quantkit.evaluation.speed.decoding import weights_in_memory
from quantkit.evaluation.sweep.jobs import Job, JobRun, with_kv
from quantkit.evaluation.sweep.models import KEPT, ModelRef
from quantkit.evaluation.sweep.store import MeasuredData, MeasurementResult
from quantkit.runtime.loader import LoadedModel
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
    """

    data, copies = QualityData, 4

    reference: ModelRef
    reference_kv: str | None
    model: ModelRef
    kv: tuple[str | None, ...]
    text: str
    window: int
    windows: int
    prompt: int | None
    floor: Floor = "none"

    @property
    def of_reference(self) -> bool:
        """Whether the model is the reference itself; its first setting is then the reference."""
        return self.model == self.reference

    @property
    def exact(self) -> bool:
        """Whether it is compared with float32 arithmetic."""
        return self.floor == "all" or (self.floor == "reference" and self.of_reference)

    def seconds(self, tok_s: float) -> float:
        """By the number of passes through a model; that in float32 counts twice."""
        passes = len(self.kv) * (CACHED if self.prompt is not None else 1.0)
        passes += not self.of_reference
        passes += 2.0 * self.exact
        return self.window * self.windows * passes / tok_s

    def measure(self, run: JobRun) -> MeasurementResult[QualityData]:
        """Score a model on a text.

        Raises:
            UsageError: the text is too short.
            QuantkitError: a model can't be loaded, or its logits aren't finite.
        """
        limit = KEPT + self.exact
        reference = run.models.get(self.reference, run.loading, limit)
        model = reference if self.of_reference else run.models.get(self.model, run.loading, limit)
        ids = windows_of(reference, self.text, self.window, self.windows)
        truth = None
        if self.exact:
            wide = run.models.get(replace(self.reference, dtype="float32"), run.loading, limit)
            truth = with_kv(wide, self.reference_kv, self.prompt)
        runners = [with_kv(model, kv, self.prompt) for kv in self.kv]
        if not self.of_reference:
            runners.insert(0, with_kv(reference, self.reference_kv, self.prompt))
        scores, distances = score(runners, ids, run.progress, self.prompt or 0, truth)
        first = 0 if self.of_reference else 1
        rows = []
        arrays: dict[str, np.ndarray] = {"ids": ids.numpy().astype(np.int32)}
        for number, place in enumerate(range(first, len(runners))):
            rows.append(_row(runners[place], model, scores, distances, place))
            arrays |= _named(number, "", scores, place)
            if distances is not None and self.of_reference and number == 0:
                arrays |= _named(number, "exact_", distances, place)
        tokenizer = reference.tokenizer
        return MeasurementResult(QualityData(
            tokens=hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
            bos=tokenizer.first_id is not None, rows=tuple(rows),
            words=sum(len(tokenizer.decode(window, skip_special=False).split()) for window in ids.tolist())),
            arrays)


def _row(runner: LoadedModel | TeacherForcedModel, model: LoadedModel, scores: WindowScores,
         distances: WindowScores | None, place: int) -> QualityRow:
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
