"""Ctrl-C while replicas start."""

from __future__ import annotations

import signal
import threading

import pytest

from quantkit.serving.replicas.interrupt import interrupt_put_off


def test_it_waits_for_the_next_look():
    before, steps = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), interrupt_put_off() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        steps.append("the step is done")
        check()
        steps.append("the next one isn't")
    assert steps == ["the step is done"] and signal.getsignal(signal.SIGINT) is before


def test_it_waits_no_longer_than_the_block():
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupt_put_off():
        signal.raise_signal(signal.SIGINT)
        steps.append("done")
    assert steps == ["done"]


def test_a_second_one_doesn_t_wait():
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupt_put_off():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        steps.append("never")
    assert steps == []


def test_another_thread_leaves_signals_alone():
    handlers = []

    def work():
        with interrupt_put_off() as check:
            check()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
