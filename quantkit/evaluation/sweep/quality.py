"""One measurement of a comparison: a model with its KV settings scored on one text, beside the reference."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quantkit.evaluation.decoding import weights_in_memory
from quantkit.evaluation.forced import TeacherForcedModel
from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.quality import score, windows_of
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.evaluation.window_scores import WindowScores
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import LoadedModel, load
from quantkit.support.progress import Listener

Floor = Literal["none", "reference", "all"]
MODELS = 2
"""Models that stay in memory, the reference among them: a model is scored on every text before the next one
comes. With a noise floor there is one more, the reference in float32."""


@dataclass(frozen=True)
class QualityJob:
    """What is scored.

    Attributes:
        reference, reference_revision: the model that others are compared with.
        reference_kv: its setting, as text; ``None``: its own.
        model, revision: that is scored.
        kv: its settings; ``(None,)``: its own.
        text: content, so far as it is needed.
        window, windows, prompt: see :class:`~quantkit.evaluation.protocol.Protocol`.
        dtype, device: as for ``load``.
        floor: whose rows are compared with the reference's weights in float32 arithmetic, too.
    """

    reference: str
    reference_revision: str | None
    reference_kv: str | None
    model: str
    revision: str | None
    kv: tuple[str | None, ...]
    text: str
    window: int
    windows: int
    prompt: int | None
    dtype: str = "auto"
    device: str = "auto"
    floor: Floor = "none"

    @property
    def of_reference(self) -> bool:
        """Whether the model is the reference itself; its first setting is then the reference."""
        return (self.model, self.revision) == (self.reference, self.reference_revision)


_loaded: OrderedDict[tuple[str, str | None, str, str], LoadedModel] = OrderedDict()


def forget_models() -> None:
    """Drop the models that are kept for the next measurement."""
    _loaded.clear()


def kept_model(uri: str, revision: str | None, dtype: str, device: str, loading: Listener,
               models: int = MODELS) -> LoadedModel:
    """A model; the last ones stay in memory."""
    key = (uri, revision, dtype, device)
    if key not in _loaded:
        while len(_loaded) >= models:
            _loaded.popitem(last=False)
        _loaded[key] = load(uri, revision=revision, dtype=dtype, device=device, loading=loading)
    _loaded.move_to_end(key)
    return _loaded[key]


def score_text(job: QualityJob, progress: Listener, loading: Listener) -> MeasurementResult:
    """Score a model on a text.

    Returns:
        ``rows``, one for each KV setting: what is known of the model, each window's mean of every metric
        (``means``), bytes of the cache. ``tokens``: sha256 of the ids; ``words``. Arrays: ``N/kl``, … of
        row N, and ``ids``.

    Raises:
        UsageError: the text is too short.
        QuantkitError: a model can't be loaded, or its logits aren't finite.
    """
    floor = job.floor == "all" or (job.floor == "reference" and job.of_reference)
    models = MODELS + floor
    reference = kept_model(job.reference, job.reference_revision, job.dtype, job.device, loading, models)
    model = reference if job.of_reference else kept_model(job.model, job.revision, job.dtype, job.device,
                                                          loading, models)
    ids = windows_of(reference, job.text, job.window, job.windows)
    exact = None
    if floor:
        exact = kept_model(job.reference, job.reference_revision, "float32", job.device, loading, models)
    runners = [runner_of(model, kv, job.prompt) for kv in job.kv]
    if not job.of_reference:
        runners.insert(0, runner_of(reference, job.reference_kv, job.prompt))
    truth = exact and runner_of(exact, job.reference_kv, job.prompt)
    scores, distances = score(runners, ids, progress, job.prompt or 0, truth)
    first = 0 if job.of_reference else 1
    data: dict[str, Any] = {"tokens": hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
                            "bos": reference.tokenizer.first_id is not None,
                            "words": sum(len(reference.tokenizer.decode(window, skip_special=False).split())
                                         for window in ids.tolist()), "rows": []}
    arrays: dict[str, np.ndarray] = {"ids": ids.numpy().astype(np.int32)}
    for number, place in enumerate(range(first, len(runners))):
        data["rows"].append(_row(runners[place], model, scores, distances, place))
        arrays |= _named(number, "", scores, place)
        if distances is not None and job.of_reference and number == 0:
            arrays |= _named(number, "exact_", distances, place)
    return MeasurementResult(data, arrays)


def runner_of(model: LoadedModel, kv: str | None, prompt: int | None) -> LoadedModel | TeacherForcedModel:
    """A model with its setting, as text; as it is, if no cache is involved."""
    if prompt is None:
        return model
    return TeacherForcedModel(model, model.kv if kv is None else parse_kv(kv), prompt)


def _row(runner: LoadedModel | TeacherForcedModel, model: LoadedModel, scores: WindowScores,
         distances: WindowScores | None, place: int) -> dict[str, Any]:
    means = {name: np.stack(values).tolist() for name, values in scores.means[place].items()}
    if distances is not None:
        means[EXACT] = np.stack(distances.means[place][EXACT]).tolist()
    digest = None if model.manifest is None else hashlib.sha256(model.manifest.to_bytes()).hexdigest()
    row = {"label": model.label, "bits_per_weight": model.bits_per_weight, "file_bytes": model.file_bytes,
           "weight_bytes": weights_in_memory(model), "manifest_sha256": digest,
           "dtype": str(model.dtype).removeprefix("torch."), "means": means, "kv": None,
           "kv_bytes": None, "kv_bytes_per_token": None}
    if isinstance(runner, TeacherForcedModel):
        row |= {"kv": str(runner.kv), "kv_bytes": runner.kv_bytes,
                "kv_bytes_per_token": runner.kv_bytes_per_token}
    return row


def _named(number: int, prefix: str, scores: WindowScores, place: int) -> dict[str, np.ndarray]:
    return {f"{number}/{prefix}{name}": array for name, array in scores.tokens(place).arrays().items()}


def metric_names() -> list[tuple[str, str]]:
    """What is measured and by whom: a part of what makes results comparable."""
    return [(registered.metric.name, registered.owner) for registered in registered_metrics()]
