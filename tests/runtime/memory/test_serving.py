"""A server's memory, told before it is loaded: of models that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from quantkit.checkpoint.open import open_model
from quantkit.kv.spec import KVSpec, parse_kv
from quantkit.runtime.cpu import model as cpu_model
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import model as gpu_model
from quantkit.runtime.loader import load
from quantkit.runtime.memory.machine import RUNTIME_BYTES
from quantkit.runtime.memory.serving import MemoryPart, server_memory
from quantkit.support.errors import UsageError

CPU = torch.device("cpu")


def planned(folder, device=CPU, free=10**12, **options):
    source = open_model(str(folder))
    try:
        reason_against = (gpu_model if device.type == "cuda" else cpu_model).reason_against
        return server_memory(source, device, free, reason_against, **options)
    finally:
        source.close()


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


def test_what_fits(tiny):
    total, weights = planned(tiny).total, planned(tiny).weights
    fits, narrow, none, unknown = (planned(tiny, free=free) for free in (total, total - 1, weights - 1, None))
    assert fits.fits and fits.fitting >= 8
    assert not narrow.fits and narrow.weights_fit and narrow.fitting < 8
    assert not none.weights_fit and none.fitting == 0
    assert unknown.fits and unknown.weights_fit and unknown.fitting is None


def test_what_models_before_it_take_is_gone(tiny):
    first, two = planned(tiny), planned(tiny, sequences=2)
    second = planned(tiny, before=[first, two], free=first.total + two.total + first.total - RUNTIME_BYTES)
    assert second.total == second.available == first.total - RUNTIME_BYTES, "one process has one runtime"
    assert second.fits and second.fitting >= 8
    narrow = planned(tiny, before=[first], free=first.total + second.total - 1)
    assert not narrow.fits and narrow.weights_fit and narrow.fitting < 8


def test_what_grows_later_leaves_weights_their_place(tiny):
    cache = planned(tiny).parts[-1].bytes
    for options, grows in (({}, True), ({"kv_bytes": cache}, False)):
        first = planned(tiny, **options)
        assert first.reserved == first.total - grows * cache
        assert planned(tiny, before=[first], free=first.total).weights_fit == grows
        assert planned(tiny, before=[first], free=first.reserved + first.weights).weights_fit
        assert not planned(tiny, before=[first], free=first.reserved + first.weights - 1).weights_fit


def test_on_a_gpu_the_cache_takes_what_is_left(tiny, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    for folder in (tiny, checkpoint):
        plan = planned(folder, gpu, 10**12)
        assert [part.name for part in plan.parts] == ["weights", "runtime", "KV cache"]
        assert plan.parts[-1].how == "what is left" and plan.fits and plan.fitting is None
        fixed = plan.total - plan.parts[-1].bytes
        narrow = planned(folder, gpu, fixed + 10**6)
        assert narrow.parts[-1].bytes == 10**6 and narrow.total == narrow.free
        nothing = planned(folder, gpu, fixed - 1)
        assert nothing.parts[-1].bytes == 0 and not nothing.fits
        assert planned(folder, gpu, fixed + 10**6, kv_bytes=10**5).parts[-1].bytes == 10**5
        second = planned(folder, gpu, fixed + 10**6, before=[narrow])
        assert second.available == 0 and not second.weights_fit


def test_a_setting_that_does_not_fit_the_model_is_refused_now(tiny):
    assert planned(tiny, kv=parse_kv("int8")).parts[-1].bytes < planned(tiny).parts[-1].bytes
    with pytest.raises(UsageError):
        planned(tiny, kv=KVSpec(policy="no-such-policy"))
