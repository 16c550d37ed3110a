"""What several senders answer within a time."""

from __future__ import annotations

import asyncio

from quantkit.serving.replicas.collect import collect


async def answer(value):
    return value


async def fail():
    raise ConnectionError("it is gone")


def test_a_sender_that_fails_or_never_answers_is_left_out():
    cancelled = []

    async def never():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run():
        answers = await collect([answer("a"), never(), fail(), answer("b")], 0.05)
        await asyncio.sleep(0)  # the cancelled one hears of it
        return answers

    assert asyncio.run(run()) == ["a", "b"] and cancelled == [True]


def test_nobody_is_asked():
    assert asyncio.run(collect([], 1)) == []
