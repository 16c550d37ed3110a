"""Settings that requests choose: which are in use, which make room, and what stays counted."""

from __future__ import annotations

import threading

import pytest

from quantkit.kv.spec import parse_kv
from quantkit.runtime.core import EngineFull
from quantkit.runtime.engine import Engine
from quantkit.runtime.kv_settings import MAX_SETTINGS
from quantkit.runtime.sampler import Sampling
from quantkit.support.errors import UsageError

SHORT = Sampling(max_tokens=2, ignore_eos=True)
SETTINGS = [parse_kv(f"window({size})") for size in range(100, 101 + MAX_SETTINGS)]


def finish(engine):
    while engine.step():
        pass


def test_a_setting_is_in_use_from_the_moment_a_request_waits_with_it(small, prompt_of):
    engine = Engine(small, max_batch=1, max_queue=99)
    waiting = [engine.submit(prompt_of(5), SHORT, kv=setting) for setting in SETTINGS[:-1]]
    managers = engine._settings.managers
    with pytest.raises(EngineFull, match="8 other KV settings are in use"):
        engine.submit(prompt_of(5), SHORT, kv=SETTINGS[-1])
    assert engine._settings.managers == managers
    waiting[3].cancel()
    engine.step()
    assert engine.submit(prompt_of(5), SHORT, kv=SETTINGS[-1]).kv not in managers
    assert waiting[3].kv.manager not in engine._settings.managers
    finish(engine)
    assert all(request.done for request in waiting) and not any(
        manager.texts for manager in engine._settings.managers)


def test_a_request_that_is_refused_uses_nothing(small, prompt_of):
    engine = Engine(small, max_batch=1, max_queue=1)
    engine.submit(prompt_of(5), SHORT)
    with pytest.raises(EngineFull):
        engine.submit(prompt_of(5), SHORT, kv=SETTINGS[0])
    with pytest.raises(UsageError):
        engine.submit([], SHORT, kv=SETTINGS[0])
    assert [len(manager.texts) for manager in engine._settings.managers] == [1, 0]


def test_what_was_prepared_is_used_even_if_it_was_dropped_since(small, prompt_of):
    engine = Engine(small, max_queue=99)
    prepared = engine.prepare(SETTINGS[0])
    for setting in SETTINGS[1:]:
        engine.prepare(setting)
    assert prepared not in engine._settings.managers
    request = engine.submit(prompt_of(5), SHORT, kv=prepared)
    assert request.kv.manager is prepared and prepared in engine._settings.managers
    assert engine.submit(prompt_of(5), SHORT, kv=SETTINGS[0]).kv.manager is prepared
    finish(engine)
    for size in range(200, 200 + MAX_SETTINGS):
        engine.prepare(parse_kv(f"window({size})"))
    other = engine.prepare(SETTINGS[0])
    assert other is not prepared
    assert engine.submit(prompt_of(5), SHORT, kv=prepared).kv.manager is other, "one setting has one cache"
    finish(engine)


def test_counts_outlive_their_setting(small, prompt_of):
    engine = Engine(small, max_queue=99, prefix_cache=None)
    for _ in range(2):
        engine.submit(prompt_of(130), SHORT, kv=parse_kv("int8"))
        finish(engine)
    assert engine.stats()["prefix_queries"] == 260 and engine.stats()["prefix_hits"] == 128
    prefix_bytes = engine.stats()["prefix_cache_bytes"]
    assert prefix_bytes == engine.stats()["kv_used_bytes"] > 0
    for setting in SETTINGS:
        engine.prepare(setting)
    assert engine.stats()["prefix_queries"] == 260 and engine.stats()["prefix_hits"] == 128
    assert engine.stats()["prefix_cache_bytes"] == 0
    engine.submit(prompt_of(130), SHORT, logprobs=0, echo=True)
    finish(engine)
    assert engine.stats()["prefix_queries"] == 260, "a prompt that is scored isn't looked up"


def test_a_setting_that_is_made_holds_up_nobody_else(small, prompt_of, monkeypatch):
    engine, begun, goes_on = Engine(small), threading.Event(), threading.Event()
    make = engine._settings._make

    def slow(*given):
        begun.set()
        assert goes_on.wait(60)
        return make(*given)

    monkeypatch.setattr(engine._settings, "_make", slow)
    thread = threading.Thread(target=engine.prepare, args=(SETTINGS[0],))
    thread.start()
    assert begun.wait(60)
    engine.submit(prompt_of(5), SHORT)
    assert thread.is_alive()
    goes_on.set()
    thread.join(60)
    finish(engine)
    assert len(engine._settings.managers) == 2


def test_dropped_settings_that_come_back_are_no_more_than_others(small, prompt_of):
    engine = Engine(small, max_queue=99)
    prepared = [engine.prepare(setting) for setting in SETTINGS]
    for manager in prepared[1:]:
        engine.submit(prompt_of(5), SHORT, kv=manager)
    with pytest.raises(EngineFull):
        engine.submit(prompt_of(5), SHORT, kv=prepared[0])
    assert len(engine._settings.managers) == 1 + MAX_SETTINGS
    finish(engine)
