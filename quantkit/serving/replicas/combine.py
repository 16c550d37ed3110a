"""One answer of what all replicas say of their state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from quantkit.serving.answers import ModelState
from quantkit.serving.replicas.base import ReplicaAnswer


def combined_state(answers: Sequence[ReplicaAnswer]) -> dict[str, Any]:
    """``/ready`` of the server: sums over the replicas, of all models and of each."""
    states = [json.loads(answer.body) for answer in answers]
    names = list(dict.fromkeys(name for state in states for name in state["models"]))
    return {"status": "ready", **_sum(states),
            "models": {name: _sum([state["models"][name] for state in states]) for name in names}}


def combined_metrics(answers: Sequence[ReplicaAnswer]) -> bytes:
    """``/metrics`` of the server: those of every replica, with its name as the label ``replica``."""
    registry = CollectorRegistry()
    registry.register(_Collected(answers))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, answers: Sequence[ReplicaAnswer]) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for answer in self._answers:
            for family in text_string_to_metric_families(answer.body.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation,
                                                                 family.type, family.unit))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": answer.id}, sample.value)
        return families.values()

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before it is collected."""
        return iter(())


def _sum(states: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(state[key] for state in states) for key in ModelState.model_fields}
