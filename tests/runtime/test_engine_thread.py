"""The engine on a thread of its own: many callers, draining, closing, and nobody hangs."""

from __future__ import annotations

import threading

import pytest

from quantkit.runtime.core import EngineClosed, EngineDeadError
from quantkit.runtime.engine import Engine, FairLock
from quantkit.runtime.generate import generate
from quantkit.runtime.sampler import Sampling

WAIT = 60.0  # seconds; only a hang takes so long
pytestmark = pytest.mark.usefixtures("short_chunks")


@pytest.fixture
def started(small):
    engines = []

    def start(**options):
        engines.append(Engine(small, **options))
        engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
        assert not engine.thread.is_alive() and engine.cache.allocated_bytes == 0


def test_requests_from_many_threads(small, started, prompt_of, submit):
    engine, results = started(max_batch=4, max_queue=50), {}
    sampling = Sampling(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)

    def ask(seed):
        finished = threading.Event()
        request = engine.submit(prompt_of(3 + seed, seed), sampling, on_done=lambda _: finished.set())
        assert finished.wait(WAIT)
        results[seed] = request.result

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert engine.drain(WAIT)
    assert results == {seed: generate(small, [prompt_of(3 + seed, seed)], sampling)[0] for seed in range(9)}


def test_drain_ends_what_is_there_and_takes_nothing_new(started, submit):
    engine = started()
    submitted = [submit(engine, 30, Sampling(max_tokens=20, ignore_eos=True), seed=i)[0] for i in range(3)]
    assert engine.drain(WAIT)
    assert [request.result.finish_reason for request in submitted] == ["length"] * 3
    with pytest.raises(EngineClosed):
        submit(engine, 3)
    assert engine.drain(WAIT) and engine.cache.allocated_bytes == 0


def test_drain_does_not_wait_longer_than_asked(started, submit):
    engine = started()
    request, ends = submit(engine, 30)
    assert not engine.drain(0.001) and not request.done
    request.cancel()
    assert engine.drain(WAIT) and ends == ["cancelled"]


def test_who_is_cancelled_is_told_before_it_is_gone(small, submit):
    """Else :meth:`drain` returns while somebody still waits for an answer's end."""
    engine, ended = Engine(small, max_batch=2), []
    submitted = [submit(engine, length, on_done=lambda request: ended.append((request.id,
                                                                              engine.drain(0))))[0]
               for length in (5, 200, 5)]
    for _ in range(2):
        engine.step()
    for request in (submitted[2], submitted[0], submitted[1]):
        request.cancel()
        engine.step()
    assert ended == [(2, False), (0, False), (1, False)] and engine.drain(0)


def test_a_thread_survives_errors_that_nobody_hears(started, monkeypatch, prompt_of, submit, long):
    engine, hooked = started(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args))

    def broken(_):
        raise RuntimeError("listener")

    engine.submit(prompt_of(5), long, on_token=broken)
    engine.submit(prompt_of(5), long, on_token=broken, on_error=broken)
    engine.submit(prompt_of(5), Sampling(max_tokens=1), on_done=broken)
    request, ends = submit(engine, 5, Sampling(max_tokens=4, ignore_eos=True))
    assert engine.drain(WAIT) and ends == ["length"] and len(request.result.token_ids) == 4
    assert [str(args.exc_value) for args in hooked] == ["listener"] * 3


class DyingLock(FairLock):
    """A lock that raises before a step, where no request is at fault."""

    def __enter__(self):
        raise SystemExit("no device")


def test_when_the_thread_dies_every_request_is_told_even_if_nobody_hears_of_the_death(
        small, monkeypatch, prompt_of, submit, long):
    errors, hooked, raised = [], [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: hooked.append(args.exc_value))
    engine = Engine(small, lock=DyingLock())
    for _ in range(3):
        engine.submit(prompt_of(5), long, on_error=errors.append)

    def broken(_):
        raise OSError("the terminal is gone")

    engine.start(broken)
    engine.thread.join(WAIT)
    assert [error.why for error in errors] == ["SystemExit: no device"] * 3 and engine.drain(WAIT)
    assert list(map(str, hooked)) == ["the terminal is gone"]
    for refused in (engine.check_alive, lambda: submit(engine, 3)):
        with pytest.raises(EngineDeadError, match="the engine has stopped") as caught:
            refused()
        raised.append(caught.value)
    assert raised[0] is not raised[1], "an error keeps all that was there when it was raised"
    engine.close()
    assert engine.cache.allocated_bytes == 0


def test_a_thread_starts_once_and_closes_at_once(started, submit):
    engine = started()
    with pytest.raises(EngineClosed, match="started before"):
        engine.start()
    request, ends = submit(engine, 5)
    engine.close()
    assert request.done and ends == ["cancelled"]
    assert engine.drain(WAIT)


def test_callbacks_come_on_the_engines_thread(started, submit):
    engine, names = started(), set()
    submit(engine, 5, Sampling(max_tokens=3), on_token=lambda _: names.add(threading.current_thread().name),
           on_done=lambda _: names.add(threading.current_thread().name))
    assert engine.drain(WAIT) and names == {"quantkit-engine"}


def test_it_sleeps_when_there_is_nothing_to_do(started, monkeypatch, submit):
    engine, steps = started(), []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda: steps.append(1) or step())
    finished = threading.Event()
    submit(engine, 5, Sampling(max_tokens=2), on_done=lambda _: finished.set())
    assert finished.wait(WAIT)
    threading.Event().wait(0.2)
    assert len(steps) < 10


def test_a_broken_engine_fails_its_requests_instead_of_hanging(small, monkeypatch):
    engine, ended, printed, failed = Engine(small, max_batch=1), threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    failing = iter([OSError("no pages")])

    def admit():
        raise next(failing)

    def fail(error):
        failed.append(error)
        if len(failed) == 2:
            ended.set()

    monkeypatch.setattr(engine._scheduler, "admit", admit)
    for _ in range(2):
        engine.submit([5, 6, 7], Sampling(max_tokens=4), on_error=fail)
    engine.start()
    assert ended.wait(WAIT) and [str(error) for error in failed] == ["no pages"] * 2
    engine.close()
    assert [str(error) for error in printed] == ["no pages"]
    assert not engine._settings.default.texts


def test_what_a_request_holds_may_be_lost_but_its_listener_is_told(started, monkeypatch, prompt_of, long):
    engine, ended, printed = started(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(str(args.exc_value)))
    free, failing = engine._settings.default.free, iter([MemoryError("no pages to move")])

    def fails_once(text, **options):
        free(text, **options)
        for error in failing:
            raise error

    def broken(_):
        raise RuntimeError("listener")

    monkeypatch.setattr(engine._settings.default, "free", fails_once)
    engine.submit(prompt_of(5), long, on_token=broken, on_error=lambda error: ended.set())
    assert ended.wait(WAIT) and engine.drain(WAIT)
    assert printed == ["no pages to move"]


def test_who_cannot_begin_fails_alone(small, monkeypatch, prompt_of):
    engine, errors = Engine(small, max_batch=1), []
    begin = engine._settings.default.begin

    def fails(text):
        if len(text.prompt) == 7:
            raise MemoryError("no pages")
        return begin(text)

    monkeypatch.setattr(engine._settings.default, "begin", fails)
    bad, good = (engine.submit(prompt_of(length), Sampling(max_tokens=3, ignore_eos=True),
                               on_error=errors.append) for length in (7, 8))
    while engine.step():
        pass
    assert [str(error) for error in errors] == ["no pages"] and bad.done
    assert len(good.result.token_ids) == 3 and not engine._settings.default.texts
