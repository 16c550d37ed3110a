"""A server's memory, told before it is loaded: of models that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoint.open import open_model
from quantkit.errors import UsageError
from quantkit.fit import serving
from quantkit.fit.scratch import RUNTIME_BYTES
from quantkit.fit.serving import MemoryPart, serving_plan
from quantkit.kvspec import parse_kv
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import load
from quantkit.spec import KVSpec

CPU = torch.device("cpu")


def planned(folder, **options):
    source = open_model(str(folder))
    try:
        return serving_plan(source, CPU, **options)
    finally:
        source.close()


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    monkeypatch.setattr(serving, "available_memory", lambda: 10**12)


def test_weights_are_those_that_are_loaded(tiny, checkpoint):
    for folder in (tiny, checkpoint):
        model = load(str(folder)).model
        step_bytes = model.step_bytes  # the embedding is the head
        plan = planned(folder)
        assert step_bytes <= plan.weights <= step_bytes + 2**14  # norms
        assert plan.parts[1].bytes >= RUNTIME_BYTES and plan.total == sum(part.bytes for part in plan.parts)


def test_the_dtype_counts(tiny):
    assert planned(tiny, dtype="float32").weights == pytest.approx(2 * planned(tiny).weights, rel=0.05)


def test_a_growing_cache_takes_what_all_sequences_do(tiny):
    plan, two = planned(tiny, sequences=1), planned(tiny, sequences=2)
    assert two.parts[-1].bytes > 1.5 * plan.parts[-1].bytes
    assert plan.sequence_bytes <= plan.parts[-1].bytes and plan.parts[-1].how == ""
    engine = Engine(load(str(tiny)))
    assert plan.context == engine.loaded.config.max_position_embeddings
    assert plan.sequence_bytes == engine.cache.bytes_per_token * plan.context


def test_a_fixed_cache_takes_no_more_than_it_is_given(tiny):
    plan = planned(tiny, kv_bytes=10**5)
    assert plan.parts[-1].bytes == 10**5 and plan.parts[-1].how == "--kv-memory" and plan.fitting is None
    assert planned(tiny, kv_bytes=10**11).parts[-1].bytes == planned(tiny).parts[-1].bytes


def test_other_parts_are_added(tiny):
    prefixes = MemoryPart("prefix cache", 10**9, "--prefix-cache")
    plan = planned(tiny, also=[prefixes])
    assert prefixes in plan.parts and plan.total == planned(tiny).total + 10**9
    assert plan.parts[-1].name == "KV cache"


def test_what_fits(tiny, monkeypatch):
    total, weights = planned(tiny).total, planned(tiny).weights
    monkeypatch.setattr(serving, "available_memory", lambda: total)
    assert planned(tiny).fits and planned(tiny).fitting >= 8
    monkeypatch.setattr(serving, "available_memory", lambda: total - 1)
    assert not planned(tiny).fits and planned(tiny).weights_fit and planned(tiny).fitting < 8
    monkeypatch.setattr(serving, "available_memory", lambda: weights - 1)
    assert not planned(tiny).weights_fit and planned(tiny).fitting == 0
    monkeypatch.setattr(serving, "available_memory", lambda: None)
    assert planned(tiny).fits and planned(tiny).weights_fit and planned(tiny).fitting is None


def test_a_setting_that_does_not_fit_the_model_is_refused_now(tiny):
    assert planned(tiny, kv=parse_kv("int8")).parts[-1].bytes < planned(tiny).parts[-1].bytes
    with pytest.raises(UsageError):
        planned(tiny, kv=KVSpec(policy="no-such-policy"))
