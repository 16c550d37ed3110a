"""``/metrics``: what Prometheus reads, under vLLM's names, so that its dashboards and alerts work.

Numbers that the engines count anyway are read from them when somebody asks. Of each request its times are
observed at its end, and of each token the gap before it, which takes about a microsecond.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quantkit.runtime.core import Request
from quantkit.runtime.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "cancelled": "abort"}
"""Why a request ended, in vLLM's words."""
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
            480.0, 960.0, 1920.0, 7680.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
        80.0)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        engines: The name and the engine of each model.
    """

    def __init__(self, engines: Sequence[tuple[str, Engine]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines))

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", about, LABELS, registry=self._registry, buckets=buckets)

        histograms = {
            "first_token": histogram("time_to_first_token_seconds",
                                     "Seconds from a request's arrival to its first token.", _FIRST_TOKEN),
            "gap": histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.", _GAP),
            "whole": histogram("e2e_request_latency_seconds",
                               "Seconds from a request's arrival to its end.", _LATENCY),
            "queue": histogram("request_queue_time_seconds", "Seconds that a request waited.", _LATENCY),
            "prefill": histogram("request_prefill_time_seconds",
                                 "Seconds from a request's admission to its first token.", _LATENCY),
            "decode": histogram("request_decode_time_seconds",
                                "Seconds from a request's first token to its last.", _LATENCY),
            "prompt": histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS),
            "answer": histogram("request_generation_tokens", "Tokens of a request's answer.", _TOKENS),
        }
        success = Counter("vllm:request_success", "Requests that ended, by the reason.",
                          (*LABELS, "finished_reason"), registry=self._registry)
        self._models = {
            name: ModelMetrics({key: part.labels(name, str(i)) for key, part in histograms.items()},
                               {ended: success.labels(name, str(i), reason)
                                for ended, reason in REASONS.items()})
            for i, (name, _) in enumerate(engines)}

    def of(self, name: str) -> ModelMetrics:
        """Those of one model."""
        return self._models[name]

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class ModelMetrics:
    """What requests to one model tell.

    Attributes:
        histograms: The histograms by what they observe.
        ended: The counters of requests by the reason for their end.
    """

    histograms: dict[str, Histogram]
    ended: dict[str, Counter]


class RequestClock:
    """The times of one request, which arrives now. It belongs to the engine's thread once that is queued."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics, self._arrived = metrics, time.perf_counter()
        self._first: float | None = None
        self._last = self._arrived
        self._observe_gap = metrics.histograms["gap"].observe

    def token(self) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.histograms["first_token"].observe(now - self._arrived)
        else:
            self._observe_gap(now - self._last)
        self._last = now

    def done(self, request: Request) -> None:
        observed, now = self._metrics.histograms, time.perf_counter()
        self._metrics.ended[request.result.finish_reason].inc()
        if request.result.finish_reason == "cancelled":
            return
        first = now if self._first is None else self._first
        admitted = request.schedule.admitted_at
        for name, value in (("whole", now - self._arrived), ("queue", admitted - self._arrived),
                            ("prefill", first - admitted), ("decode", self._last - first),
                            ("prompt", len(request.prompt)), ("answer", len(request.result.token_ids))):
            observed[name].observe(max(value, 0))


class _Number(NamedTuple):
    """A number that an engine counts: its key there, its name in vLLM, and what it is."""

    key: str
    name: str
    about: str


GAUGES = (_Number("running", "num_requests_running", "Requests that are read or decoded."),
          _Number("waiting", "num_requests_waiting", "Requests that wait."))
COUNTERS = (
    _Number("prefix_queries", "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache."),
    _Number("prefix_hits", "prefix_cache_hits", "Prompt tokens that were found there."),
    _Number("preemptions", "num_preemptions", "Requests that gave their memory back to go on later."),
    _Number("prompt_tokens", "prompt_tokens", "Prompt tokens that were read."),
    _Number("tokens_generated", "generation_tokens", "Tokens that were generated."))
DRAFT_COUNTERS = (_Number("drafts", "spec_decode_num_drafts", "Drafts that were checked."),
                  _Number("tokens", "spec_decode_num_draft_tokens", "Tokens of drafts."),
                  _Number("accepted", "spec_decode_num_accepted_tokens", "Tokens of drafts that were right."))


def _family(kind: type[GaugeMetricFamily | CounterMetricFamily], number: _Number,
            counted: Iterable[tuple[tuple[str, str], Mapping[str, Any]]]) -> Metric:
    """A number of all engines, by their labels."""
    family = kind(f"vllm:{number.name}", number.about, labels=LABELS)
    for labels, values in counted:
        family.add_metric(labels, values[number.key])
    return family


class _EngineCollector(Collector):
    """Reads what the engines count."""

    def __init__(self, engines: Sequence[tuple[str, Engine]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """All of it, as it is now."""
        stats = [((name, str(i)), engine.stats()) for i, (name, engine) in enumerate(self._engines)]
        yield from (_family(GaugeMetricFamily, number, stats) for number in GAUGES)
        yield from (_family(CounterMetricFamily, number, stats) for number in COUNTERS)
        yield from self._drafts()
        yield from self._memory(stats)
        yield self._steps(stats)

    def _drafts(self) -> Iterator[Metric]:
        counted = [((name, str(i)), engine.speculator.counts if engine.speculator else None)
                   for i, (name, engine) in enumerate(self._engines)]
        drafted = [(labels, dataclasses.asdict(counts)) for labels, counts in counted if counts is not None]
        yield from (_family(CounterMetricFamily, number, drafted) for number in DRAFT_COUNTERS)
        places = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos",
                                     "Tokens of drafts that were right, by their place in the draft.",
                                     labels=(*LABELS, "position"))
        for labels, counts in counted:
            for place, number in enumerate([] if counts is None else list(counts.accepted_at)):
                places.add_metric((*labels, str(place)), number)
        yield places

    def _memory(self, stats: list[tuple[tuple[str, str], dict[str, int]]]) -> Iterator[Metric]:
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Of the KV cache's memory the part that "
                                  "requests use, from 0 to 1; 0 where the cache grows.", labels=LABELS)
        config = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is kept; always 1.",
                                   labels=(*LABELS, "cache_dtype", "kv_total_bytes", "prefix_cache_bytes"))
        for (labels, values), (_, engine) in zip(stats, self._engines, strict=True):
            total = values["kv_allocated_bytes"] if engine.reservation is not None else 0
            used = max(0, values["kv_used_bytes"] - values["prefix_cache_bytes"])
            usage.add_metric(labels, used / total if total else 0)
            config.add_metric((*labels, str(engine.cache.spec), str(total or "grows"),
                               str(values["prefix_cache_bytes"])), 1)
        yield usage
        yield config

    def _steps(self, stats: list[tuple[tuple[str, str], dict[str, int]]]) -> Metric:
        # how many tokens each step had isn't kept: sum and count give the mean
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step; sum and count only.",
                                       labels=LABELS)
        for labels, values in stats:
            steps = values["steps"]
            tokens = values["prompt_tokens"] + values["tokens_generated"]
            family.add_metric(labels, [("+Inf", steps)], sum_value=tokens)
        return family
