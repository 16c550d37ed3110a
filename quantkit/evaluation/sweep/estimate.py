"""How long a comparison may take, said before it begins: from models' sizes and this machine's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.evaluation.sweep.facts import ModelFacts
from quantkit.evaluation.sweep.jobs import Measurement, PeerJob, SpeedJob, TasksJob
from quantkit.evaluation.sweep.plan import SweepPlan
from quantkit.evaluation.sweep.quality import QualityJob
from quantkit.quantization.planning.duration import operations

SHARE = 1.3
"""Of that arithmetic in float32, what a model reaches with its own kernels, loading and scoring included."""
CACHED = 1.2
"""How many times as long a window takes that goes through a compressed cache."""
TOKENS_OF_ITEM, DECODE_SHARE = 70, 0.04
"""Tokens of a task's item with its options; speed of decoding as a part of that of reading."""
ROOFLINE_S, STEP_S = 12.0, 2.0
"""Seconds of a roofline, and of starting a process and loading a model."""


def estimated(plan: SweepPlan, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements with the seconds that they may take."""
    if not measurements:
        return []
    rate = operations()
    return [replace(measurement, seconds=_seconds(measurement, plan.models[0], rate))
            for measurement in measurements]


def _seconds(measurement: Measurement, model: ModelFacts, rate: float) -> float:
    tok_s = SHARE * rate / (2 * model.parameters)
    job = measurement.job
    if isinstance(job, QualityJob):
        passes = len(job.kv) * (CACHED if job.prompt is not None else 1.0)
        passes += not job.of_reference
        passes += 2.0 * (job.floor == "all" or (job.floor == "reference" and job.of_reference))
        return job.window * job.windows * passes / tok_s
    if isinstance(job, PeerJob):
        return STEP_S + 3 * job.window * sum(windows for *_, windows in job.texts) / tok_s
    if isinstance(job, TasksJob):
        items = (job.limit or 1000) * len(job.tasks)
        return STEP_S + items * TOKENS_OF_ITEM / tok_s
    if isinstance(job, SpeedJob):
        settings = job.settings
        reads = settings.repeats * 2 * settings.prefill + sum(settings.contexts)
        writes = len(settings.batches) * len(settings.contexts) * (settings.repeats + 1) * settings.decode
        return STEP_S + reads / tok_s + writes / (DECODE_SHARE * tok_s)
    if measurement.kind == "roofline":
        return ROOFLINE_S
    return 12 * 8 * 512 / tok_s  # of sensitivity: two walks and each layer solved
