"""Times one request at a time through the engine: its prompt, its first token, and gaps between tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from quantkit.evaluation.speed.results import PrefillSpeed, Spread, SweepSettings
from quantkit.kv.spec import KVSpec
from quantkit.runtime.core import TokenInfo
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.machine import resident_bytes
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.trace import Timing

LEAST_RUNS, SLOW = 3, 10
"""Fewest timed runs, because one has no range, and how much longer than a case should take they may take."""
WARM_UP_TOKENS = 2
"""Decode steps before any timing: kernels repack their weights at the first one."""


@dataclass
class AnswerTimes:
    """What one request took.

    Attributes:
        timing: the times of its steps.
        first_token_s: seconds from :meth:`Engine.submit` to its first token.
        gaps: seconds between each token and the next.
    """

    timing: Timing
    first_token_s: float
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class EngineSpeed:
    """What requests through the engine took.

    Attributes:
        prefill: with the answer's speed.
        gap_ms: median and 99th percentile of all gaps.
        resident: bytes of the process at the end of an answer; ``None``: not known.
    """

    prefill: PrefillSpeed
    gap_ms: dict[str, float]
    resident: int | None


def answer_speed(loaded: LoadedModel, ids: Sequence[int], settings: SweepSettings,
                 kv: KVSpec | None = None) -> EngineSpeed:
    """Send a prompt to the engine ``settings.repeats`` times, after once that nobody times. After
    ``settings.case_s`` seconds no run begins beyond :data:`LEAST_RUNS`.

    Args:
        loaded: the model in memory.
        ids: the prompt, ``settings.prefill`` tokens.
        settings: how long the answer is.
        kv: the KV setting; ``None``: the model's own.
    """
    answer, times = settings.decode + 1, list[AnswerTimes]()  # the first new token comes out of the prefill
    # one engine for all: what a GPU's first steps prepare belongs to it
    engine = Engine(loaded, kv=kv, max_batch=1, context=len(ids) + max(answer, WARM_UP_TOKENS + 1))
    _timed(engine, ids, WARM_UP_TOKENS + 1)
    begin = time.perf_counter()
    resident: list[int | None] = []
    for _ in range(settings.repeats):
        times.append(_timed(engine, ids, answer, resident))
        spent = time.perf_counter() - begin
        if spent >= settings.case_s and (len(times) >= LEAST_RUNS or spent >= SLOW * settings.case_s):
            break
    engine.close()
    gaps = sorted(1000 * gap for result in times for gap in result.gaps)
    return EngineSpeed(PrefillSpeed(
        tokens=len(ids), tok_s=Spread.of([t.timing.prefill_tokens / t.timing.prefill_s for t in times]),
        first_token_s=Spread.of([t.first_token_s for t in times]),
        decode_tok_s=Spread.of([t.timing.decode_tokens / t.timing.decode_s for t in times]), runs=len(times)),
        {"median": median(gaps), "p99": gaps[math.ceil(0.99 * len(gaps)) - 1]}, resident[-1])


def _timed(engine: Engine, ids: Sequence[int], tokens: int,
           resident: list[int | None] | None = None) -> AnswerTimes:
    """Send one request. At its last token, when its pages are still there, the resident set is read."""
    before, arrived = dataclasses.replace(engine.timing), list[float]()

    def hear(token: TokenInfo) -> None:
        arrived.append(time.perf_counter())
        if resident is not None and len(arrived) == tokens:
            resident.append(resident_bytes())

    begin = time.perf_counter()
    engine.submit(ids, Sampling(max_tokens=tokens, ignore_eos=True), on_token=hear)
    while engine.step():
        pass
    now, pairs = engine.timing, itertools.pairwise(arrived)
    spent = dataclasses.replace(now, **{item.name: getattr(now, item.name) - getattr(before, item.name)
                                        for item in dataclasses.fields(now)})
    return AnswerTimes(spent, arrived[0] - begin, [later - sooner for sooner, later in pairs])
