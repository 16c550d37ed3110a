"""The measurements of a comparison: each can be done anywhere, and says all that its numbers depend on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple

from quantkit.evaluation.peers.row import PeerData
from quantkit.evaluation.peers.run import PeerSpeedSettings, measure_peer
from quantkit.evaluation.protocol import cpu_name
from quantkit.evaluation.quality.hidden_states import HiddenStates, model_of
from quantkit.evaluation.roofline.result import Roofline
from quantkit.evaluation.speed.machine_load import busy_reason
from quantkit.evaluation.speed.results import SpeedSweep, SweepSettings
from quantkit.evaluation.sweep.models import LoadedModels, ModelRef, TextWindows
from quantkit.evaluation.sweep.store import Data, MeasuredData, MeasurementResult
from quantkit.executor.base import TaskNeeds
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.quantization.budget.sensitivity import sensitivities
from quantkit.quantization.planning.plan import candidate_rows, make_plan
from quantkit.quantization.recipe import CalibrationSpec, Candidate, Recipe, Rule
from quantkit.runtime.loader import LoadedModel
from quantkit.sources.open import open_source
from quantkit.support.errors import UsageError
from quantkit.support.frozen import Frozen
from quantkit.support.progress import Listener, ProgressEvent, silent

TOKENS_OF_ITEM, DECODE_SHARE = 70, 0.04
"""Tokens of a task's item with its options; speed of decoding as a part of that of reading."""
ROOFLINE_S, STEP_S = 12.0, 2.0
"""Seconds of a roofline, and of starting a process and loading a model."""
SENSITIVITY_TOKENS = 12 * 8 * 512
"""Tokens that take as long as two walks through a model and solving each layer."""
SENSITIVITY_GROUP = 64


@dataclass(frozen=True)
class JobRun:
    """What a job works with.

    Attributes:
        models: the models in memory.
        progress, loading: hear of the job's parts, and of weights that are loaded.
    """

    models: LoadedModels
    progress: Listener
    loading: Listener

    def load(self, ref: ModelRef) -> LoadedModel:
        return self.models.get(ref, self.loading)

    def states(self, ref: ModelRef, kv: str | None, text: TextWindows, progress: Listener) -> HiddenStates:
        return self.models.states(ref, kv, text, progress, self.loading)

    def part(self, first: int, steps: int, total: int) -> Listener:
        """Hears of ``steps`` of the job's ``total`` steps, which come after the ``first`` ones."""
        return lambda event: self.progress(ProgressEvent(
            first * event.total + steps * event.done, total * event.total, event.label))


class Job(ABC, Generic[Data]):
    """Plain data that any process can work on.

    Attributes:
        data: the class of what it gives.
    """

    data: ClassVar[type[MeasuredData]]

    @property
    def copies(self) -> int:
        """Models in 16 bits that its memory holds."""
        return 2

    @property
    def timed(self) -> bool:
        """Whether it must have a machine to itself."""
        return False

    @abstractmethod
    def measure(self, run: JobRun) -> MeasurementResult[Data]:
        """Do it, here and now. Raises QuantkitError: it can't be done."""

    @abstractmethod
    def seconds(self, tok_s: float) -> float:
        """The time that it may take with a model that reads ``tok_s`` tokens a second."""


class Place(NamedTuple):
    """Whose a measurement is: a model's number, and the number of a text or KV setting."""

    model: int
    part: int = 0


@dataclass(frozen=True)
class Measurement:
    """A job with its name.

    Attributes:
        kind: ``quality``, ``peer``, ``tasks``, ``exact_tasks`` (the reference's in float32), ``speed``, …
        label: its name for people: ``quality of int4 on code``.
        job: the work that is done.
        key: everything that the numbers depend on; ``None``: that can't be known, so that it isn't kept.
        place: the model and the text or setting that it is of.
        seconds: the time that it may take.
        needs: the resources that it takes of a machine.
    """

    kind: str
    label: str
    job: Job[MeasuredData]
    key: dict[str, Any] | None
    place: Place
    seconds: float = 0.0
    needs: TaskNeeds = field(default_factory=TaskNeeds)


def run_job(job: Job[Data], progress: Listener | None = None, loading: Listener | None = None,
            models: LoadedModels | None = None) -> MeasurementResult[Data]:
    """Do a measurement, here and now.

    Args:
        job: the job of a measurement.
        progress, loading: hear of it.
        models: the models in memory; without them the job loads its own.

    Raises:
        QuantkitError: it can't be done.
    """
    begin = time.monotonic()
    done = job.measure(JobRun(models or LoadedModels(), progress or silent, loading or silent))
    return replace(done, data=done.data.model_copy(update={"cpu": cpu_name()}),
                   measured=datetime.now(UTC).isoformat(timespec="seconds"), seconds=time.monotonic() - begin)


class StoredScore(Frozen):
    """A :class:`~quantkit.evaluation.tasks.score.TaskScore` without its choices."""

    task: str
    metric: str
    items: int
    values: tuple[float, ...]
    interval: tuple[float, float, float]


class TasksData(MeasuredData):
    """The scores of all tasks."""

    scores: tuple[StoredScore, ...]


@dataclass(frozen=True)
class TasksJob(Job[TasksData]):
    """Tasks that one variant is asked.

    Attributes:
        model: the model that is measured.
        kv: its setting, as text; ``None``: the model's own.
        tasks: names or paths.
        folder: the folder with their data.
        limit: items a task.
    """

    data = TasksData

    model: ModelRef
    kv: str | None
    tasks: tuple[str, ...]
    folder: Path | None
    limit: int | None

    @property
    def copies(self) -> int:
        return 4 if self.model.dtype == "float32" else 2

    def measure(self, run: JobRun) -> MeasurementResult[TasksData]:
        from quantkit.evaluation.tasks.run import prepare_tasks, run_tasks

        loaded = run.load(self.model)
        ready = prepare_tasks(self.tasks, data=self.folder, limit=self.limit)
        scores = run_tasks(loaded, ready, kv=None if self.kv is None else parse_kv(self.kv),
                           progress=run.progress)
        return MeasurementResult(TasksData(scores=tuple(
            StoredScore(task=score.task, metric=score.metric, items=score.items, values=score.values,
                        interval=(score.interval.value, score.interval.low, score.interval.high))
            for score in scores)))

    def seconds(self, tok_s: float) -> float:
        return STEP_S + (self.limit or 1000) * len(self.tasks) * TOKENS_OF_ITEM / tok_s


class SpeedData(MeasuredData):
    """Speed and memory of a variant."""

    sweep: SpeedSweep


@dataclass(frozen=True)
class SpeedJob(Job[SpeedData]):
    """One variant's speed and memory, in a process of its own.

    Attributes:
        model: the model that is measured.
        kv: its setting, as text; ``None``: the model's own.
        ids: the tokens of the prompt.
        settings: batches, contexts and so on.
        threads: the number of torch's threads.
    """

    data, timed = SpeedData, True

    model: ModelRef
    kv: str | None
    ids: tuple[int, ...]
    settings: SweepSettings
    threads: int

    def measure(self, run: JobRun) -> MeasurementResult[SpeedData]:
        """Start the process that is timed, to which the memory belongs."""
        from quantkit.evaluation.speed.process import measure_sweep

        run.models.clear(states=True)
        model = self.model
        sweep = measure_sweep(model.uri, self.ids, self.settings, revision=model.revision, dtype=model.dtype,
                              device=model.device, kv=self.kv, threads=self.threads)
        if (reason := busy_reason(sweep.load)) is not None:
            sweep = sweep.without_speed(reason)
        return MeasurementResult(SpeedData(sweep=sweep), lasting=sweep.withheld is None)

    def seconds(self, tok_s: float) -> float:
        """By the tokens that are read and written."""
        settings = self.settings
        reads = settings.repeats * 2 * settings.prefill + sum(settings.contexts)
        writes = len(settings.batches) * len(settings.contexts) * (settings.repeats + 1) * settings.decode
        return STEP_S + reads / tok_s + writes / (DECODE_SHARE * tok_s)


class RooflineData(MeasuredData):
    """The operators of a model; ``left_out`` says why there are none."""

    roofline: Roofline | None
    left_out: str | None = None


@dataclass(frozen=True)
class RooflineJob(Job[RooflineData]):
    """A model's operators below the machine's ceilings."""

    data, timed = RooflineData, True

    model: ModelRef

    def measure(self, run: JobRun) -> MeasurementResult[RooflineData]:
        """Time the operators, with no other model in memory."""
        from quantkit.evaluation.roofline.measure import measure_roofline

        run.models.clear()
        try:
            roofline = measure_roofline(run.load(self.model), kv=KVSpec(), progress=run.progress)
        except UsageError as error:  # it isn't one program: there are no operators to time
            return MeasurementResult(RooflineData(roofline=None, left_out=error.why or error.what))
        finally:
            run.models.clear()
        return MeasurementResult(RooflineData(roofline=roofline))

    def seconds(self, tok_s: float) -> float:
        return ROOFLINE_S


class SensitivityData(MeasuredData):
    """Nats a token that 4 bits cost in each Linear."""

    losses: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class SensitivityJob(Job[SensitivityData]):
    """What 4 bits cost in each Linear of a source."""

    data, copies = SensitivityData, 4

    model: ModelRef

    def measure(self, run: JobRun) -> MeasurementResult[SensitivityData]:
        """The divergence that rounding one Linear to 4 bits in groups of 64 would cause, nats a token, by the
        measure of :mod:`quantkit.quantization.budget.sensitivity`."""
        spec = QuantSpec(bits=4, granularity=Granularity(strategy="group", size=SENSITIVITY_GROUP))
        recipe = Recipe(name="sensitivity", description="What four bits cost in each layer.",
                        rules=(Rule(match="lm_head", optional=True),),
                        candidates=(Candidate(method="rtn", spec=spec), Candidate(method=None)),
                        calibration=CalibrationSpec(windows=8, window=512))

        def phases(event: ProgressEvent) -> None:
            before, total = (0, 1) if event.phase is None else (event.phase.number - 1, event.phase.total)
            units = max(1, event.total)
            run.progress(ProgressEvent(before * units + event.done, total * units, event.label))

        with closing(open_source(self.model.uri, self.model.revision)) as source:
            plan = make_plan(recipe.model_copy(update={"candidates": ()}), source)
            rows = candidate_rows(recipe, source)
            costs = sensitivities(source, plan, recipe.candidates, rows, phases)
        return MeasurementResult(SensitivityData(losses=tuple(
            (name, choices[0]) for name, choices in costs.items() if 0 in choices)))

    def seconds(self, tok_s: float) -> float:
        return SENSITIVITY_TOKENS / tok_s


class PeerText(NamedTuple):
    """A text that another tool is asked about: its name, its content and its number of windows."""

    name: str
    content: str
    windows: int


@dataclass(frozen=True)
class PeerJob(Job[PeerData]):
    """Another tool on the same texts.

    Attributes:
        peer: the tool as it is written in ``--peer``.
        reference: the model that it is scored against.
        kv: the reference's setting; ``None``: its own.
        texts: the texts that are scored.
        window, prompt: see :class:`~quantkit.evaluation.protocol.Protocol`.
        speed: the speed test; ``None``: nothing is timed.
    """

    data = PeerData

    peer: str
    reference: ModelRef
    kv: str | None
    texts: tuple[PeerText, ...]
    window: int
    prompt: int | None
    speed: PeerSpeedSettings | None

    @property
    def timed(self) -> bool:
        return self.speed is not None

    def measure(self, run: JobRun) -> MeasurementResult[PeerData]:
        """Score the tool, with no model of ours in memory."""
        total, states = 2 * len(self.texts), {}
        for number, text in enumerate(self.texts):
            windows = TextWindows(text.content, self.window, text.windows, self.prompt)
            states[text.name] = run.states(self.reference, self.kv, windows, run.part(number, 1, total))
        run.models.clear()
        reference = model_of(states[self.texts[0].name].runner)
        return measure_peer(self.peer, states, self.prompt or 0, reference, self.speed,
                            run.part(len(states), len(states), total))

    def seconds(self, tok_s: float) -> float:
        """By the windows, three times: the tool may be slower."""
        return STEP_S + 3 * self.window * sum(text.windows for text in self.texts) / tok_s
