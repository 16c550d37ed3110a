"""The measurements of a comparison: each can be done anywhere, and says all that its numbers depend on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantkit.evaluation.machine_load import busy_reason
from quantkit.evaluation.peers.run import PeerSpeedSettings, measure_peer
from quantkit.evaluation.protocol import cpu_name
from quantkit.evaluation.quality import windows_of
from quantkit.evaluation.speed_sweep import SweepSettings
from quantkit.evaluation.sweep.quality import QualityJob, forget_models, kept_model, runner_of, score_text
from quantkit.evaluation.sweep.sensitivity import sensitivity_map
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.executor.base import TaskNeeds
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.support.errors import UsageError
from quantkit.support.progress import Listener, ProgressEvent, silent


@dataclass(frozen=True)
class TasksJob:
    """Tasks that one variant is asked.

    Attributes:
        model, revision, dtype, device: as for ``load``.
        kv: the setting, as text; ``None``: the model's own.
        tasks: names or paths.
        data: folder of their data.
        limit: items a task.
    """

    model: str
    revision: str | None
    dtype: str
    device: str
    kv: str | None
    tasks: tuple[str, ...]
    data: Path | None
    limit: int | None


@dataclass(frozen=True)
class SpeedJob:
    """One variant's speed and memory, in a process of its own.

    Attributes:
        model, revision, dtype, device: as for ``load``.
        kv: the setting, as text; ``None``: the model's own.
        ids: of the prompt.
        settings: batches, contexts and so on.
        threads: of torch.
    """

    model: str
    revision: str | None
    dtype: str
    device: str
    kv: str | None
    ids: tuple[int, ...]
    settings: SweepSettings
    threads: int


@dataclass(frozen=True)
class RooflineJob:
    """A model's operators below the machine's ceilings; attributes as for ``load``."""

    model: str
    revision: str | None
    dtype: str
    device: str


@dataclass(frozen=True)
class SensitivityJob:
    """What 4 bits cost in each Linear of a source; attributes as for ``load``."""

    model: str
    revision: str | None


@dataclass(frozen=True)
class PeerJob:
    """Another tool on the same texts.

    Attributes:
        peer: as it is written in ``--peer``.
        reference, revision, dtype, device: what it is scored against, as for ``load``.
        kv: the reference's setting; ``None``: its own.
        texts: each one's name, content and number of windows.
        window, prompt: see :class:`~quantkit.evaluation.protocol.Protocol`.
        speed: what is timed; ``None``: nothing.
    """

    peer: str
    reference: str
    revision: str | None
    dtype: str
    device: str
    kv: str | None
    texts: tuple[tuple[str, str, int], ...]
    window: int
    prompt: int | None
    speed: PeerSpeedSettings | None


Job = PeerJob | QualityJob | TasksJob | SpeedJob | RooflineJob | SensitivityJob


@dataclass(frozen=True)
class Measurement:
    """A job with its name.

    Attributes:
        kind: ``quality``, ``peer``, ``tasks``, ``exact_tasks`` (the reference's in float32), ``speed``,
            ``roofline`` or ``sensitivity``.
        label: for people: ``quality of int4 on code``.
        job: what is done.
        key: everything that the numbers depend on; ``None``: that can't be known, so that it isn't kept.
        seconds: that it may take.
        variant: whose it is: the model's number, and the text's or the KV setting's.
        needs: what it takes of the machine that does it.
    """

    kind: str
    label: str
    job: Job
    key: dict[str, Any] | None
    seconds: float
    variant: tuple[int, int] = (0, 0)
    needs: TaskNeeds = field(default_factory=TaskNeeds)


def do(job: Job, progress: Listener | None = None, loading: Listener | None = None) -> MeasurementResult:
    """Do a measurement, here and now.

    Raises:
        QuantkitError: it can't be done.
    """
    begin = time.monotonic()
    done = _work(job)(job, progress or silent, loading or silent)
    done.data["cpu"] = cpu_name()
    return replace(done, measured=datetime.now(UTC).isoformat(timespec="seconds"),
                   seconds=time.monotonic() - begin)


def _work(job: Job) -> Callable[[Any, Listener, Listener], MeasurementResult]:
    kinds: dict[type, Callable[[Any, Listener, Listener], MeasurementResult]] = {
        PeerJob: _peer, QualityJob: score_text, TasksJob: _tasks, SpeedJob: _speed, RooflineJob: _roofline,
        SensitivityJob: _sensitivity}
    return kinds[type(job)]


def _tasks(job: TasksJob, progress: Listener, loading: Listener) -> MeasurementResult:
    from quantkit.evaluation.tasks import prepare_tasks, run_tasks

    loaded = kept_model(job.model, job.revision, job.dtype, job.device, loading)
    ready = prepare_tasks(job.tasks, data=job.data, limit=job.limit)
    scores = run_tasks(loaded, ready, kv=None if job.kv is None else parse_kv(job.kv), progress=progress)
    return MeasurementResult({"scores": [
        {"task": score.task, "metric": score.metric, "items": score.items, "values": list(score.values or ()),
         "interval": [score.interval.value, score.interval.low, score.interval.high]} for score in scores]})


def _peer(job: PeerJob, progress: Listener, loading: Listener) -> MeasurementResult:
    reference = kept_model(job.reference, job.revision, job.dtype, job.device, loading)
    texts = {name: windows_of(reference, content, job.window, windows)
             for name, content, windows in job.texts}
    runner = runner_of(reference, job.kv, job.prompt)
    done = measure_peer(job.peer, texts, job.prompt or 0, runner, job.speed, progress)
    return MeasurementResult(done.data, done.arrays)


def _speed(job: SpeedJob, progress: Listener, loading: Listener) -> MeasurementResult:
    from quantkit.evaluation.speed import measure_sweep

    forget_models()  # the memory belongs to the process that is timed
    sweep = measure_sweep(job.model, job.ids, job.settings, revision=job.revision, dtype=job.dtype,
                          device=job.device, kv=job.kv, threads=job.threads)
    if (reason := busy_reason(sweep.load)) is not None:
        sweep = sweep.without_speed(reason)
    return MeasurementResult({"sweep": sweep.model_dump(mode="json")}, lasting=sweep.withheld is None)


def _roofline(job: RooflineJob, progress: Listener, loading: Listener) -> MeasurementResult:
    from quantkit.evaluation.roofline.measure import measure_roofline

    forget_models()
    loaded = kept_model(job.model, job.revision, job.dtype, job.device, loading)
    try:
        roofline = measure_roofline(loaded, kv=KVSpec(), progress=progress)
    except UsageError as error:  # it isn't one program: there are no operators to time
        return MeasurementResult({"roofline": None, "left_out": error.why or error.what})
    finally:
        forget_models()
    return MeasurementResult({"roofline": roofline.model_dump(mode="json")})


def _sensitivity(job: SensitivityJob, progress: Listener, loading: Listener) -> MeasurementResult:
    def phases(event: ProgressEvent) -> None:
        before, total = (0, 1) if event.phase is None else (event.phase.number - 1, event.phase.total)
        units = max(1, event.total)
        progress(ProgressEvent(before * units + event.done, total * units, event.label))

    return MeasurementResult({"losses": sensitivity_map(job.model, job.revision, phases)})
