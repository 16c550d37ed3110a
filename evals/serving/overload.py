"""A server under ten times the load that it can bear: is every body right, and does its memory stay flat?

    quantkit serve-local MODEL --port 8001 --max-batch 4 --max-queue 8
    python evals/serving/overload.py http://127.0.0.1:8001 [--clients 64] [--times 10] [--minutes 3]

First every request is sent alone, and its answer is kept. Then the server's capacity is measured: the
requests that a few clients get answered in a second. Then clients send ten times as many for three minutes:
chats and texts, streaming and not, long and short, sampled, with tools and schemas, and some that hang up.
Every answer is checked: its status is 200, or 503 with ``Retry-After`` and an error body; JSON and events are
whole and have OpenAI's shape; text, calls, finish reason and usage equal those of the same request alone.
``/health`` must answer all the while. Resident memory is sampled every second. At the end no request may be
left in the server, and all must give the same answers again.

Kinds of requests that the server refuses with 400 when they are alone, for instance schemas without the extra
for them, are named and left out. Exit code 1 if anything is wrong: a body, a 503 later than 100 ms for more
than one in a hundred, memory that grows by more than 5% from the second minute to the last seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from overload_kinds import LoadCase, WrongBodyError, answer_of, cases, check_refusal
from processes import resident, server_process
from stream_client import Clock, Response, model_of, quantile, send

from quantkit.evaluation.protocol import machine

LATE = 100
"""Milliseconds within which a request must be refused."""


@dataclass
class Tally:
    """What came back so far. Times are in milliseconds."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def add(self, case: LoadCase, response: Response, expected: dict[str, Any]) -> None:
        """Check one answer."""
        took = 1e3 * (response.ended - response.sent)
        try:
            if response.status == 503:
                check_refusal(response)
                self.refused.append(took)
                if took > LATE:
                    self.late[case.kind] += 1
                self.answers["503"] += 1
            elif case.leave_after is not None:
                if response.error or response.status not in (0, 200):
                    raise WrongBodyError(f"status {response.status} {response.error}")
                self.answers[case.kind] += 1
            elif response.status != 200:
                reason = response.error or response.body[:300]
                raise WrongBodyError(f"status {response.status}: {reason!r}")
            else:
                if (answer := answer_of(case, response)) != expected:
                    raise WrongBodyError(f"{answer} but alone {expected}")
                self.answers[case.kind] += 1
        except WrongBodyError as error:
            self.wrong.append(f"{case.kind}: {error}")


async def alone(url: str, load: list[LoadCase]) -> list[tuple[LoadCase, dict[str, Any]]]:
    """Each request that the server takes, with its answer. Raises WrongBodyError, RuntimeError."""
    kept, refused = [], {}
    for case in load:
        if case.leave_after is not None:
            kept.append((case, {}))
            continue
        response = await send(url, case.path, case.body)
        if response.status == 400:
            refused[case.kind] = response.json()["error"]["message"]
        elif response.status != 200:
            raise RuntimeError(f"{case.kind} alone: status {response.status} {response.error}")
        else:
            kept.append((case, answer_of(case, response)))
    for kind, why in refused.items():
        print(f"left out: {kind}: {why}")
    return kept


async def capacity(url: str, known: list[tuple[LoadCase, dict[str, Any]]], clients: int,
                   seconds: float) -> float:
    """Requests a second that this many clients get answered, who send as fast as they are answered."""
    end, done = time.perf_counter() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        random_ = random.Random(number)
        while time.perf_counter() < end:
            case, _ = random_.choice(known)
            response = await send(url, case.path, case.body, leave_after=case.leave_after)
            done += response.status != 503

    begin = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return done / (time.perf_counter() - begin)


async def overload(url: str, known: list[tuple[LoadCase, dict[str, Any]]], clients: int, rate: float,
                   seconds: float, tally: Tally) -> None:
    """Send ``rate`` requests a second in all. A client whose answer takes longer sends its next at once."""
    begin = time.perf_counter()
    process = server_process(url)
    turn = 0

    async def client(number: int) -> None:
        nonlocal turn
        random_ = random.Random(f"client {number}")
        while time.perf_counter() - begin < seconds:
            due, turn = begin + turn / rate, turn + 1
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            case, expected = random_.choice(known)
            response = await send(url, case.path, case.body, leave_after=case.leave_after)
            tally.add(case, response, expected)

    async def watch() -> None:
        while True:
            if process:
                tally.rss.append((time.perf_counter() - begin, resident(process)))
            response = await send(url, "/health", timeout=30)
            tally.health.append(1e3 * (response.ended - response.sent))
            if response.status != 200:
                tally.wrong.append(f"/health: {response.status} {response.error}")
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(clients)))
    watching.cancel()


async def left_over(url: str) -> dict[str, Any]:
    """What ``/ready`` says once nothing runs, or after ten seconds."""
    state: dict[str, Any] = {}
    for _ in range(40):
        state = (await send(url, "/ready")).json()
        if not state.get("running") and not state.get("waiting"):
            break
        await asyncio.sleep(0.25)
    return state


def growth(rss: list[tuple[float, int]], seconds: float) -> tuple[int, int, int]:
    """Bytes at the start, in the middle and at the end: medians of tenths of the time."""
    def at(first: float, last: float) -> int:
        return int(median(size for when, size in rss if first * seconds <= when <= last * seconds))

    return at(0, 0.1), at(0.35, 0.5), at(0.9, 10)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--times", type=float, default=10.0, help="the load, as a multiple of the capacity")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the summary and all samples as JSON")
    args = parser.parse_args()
    url = args.url.rstrip("/")
    seconds = 60 * args.minutes
    tally = Tally()
    known = asyncio.run(alone(url, cases(model_of(url), args.seed)))
    able = asyncio.run(capacity(url, known, 8, min(20.0, seconds / 4)))
    print(f"capacity {able:.1f} requests a second; {args.clients} clients send {args.times * able:.1f} "
          f"for {seconds:.0f} s", flush=True)
    with Clock() as clock:
        asyncio.run(overload(url, known, args.clients, args.times * able, seconds, tally))
    state = asyncio.run(left_over(url))
    if state.get("running") or state.get("waiting"):
        tally.wrong.append(f"requests are left in the server: {state}")
    for case, expected in known:  # alone once more
        if case.leave_after is None:
            tally.add(case, asyncio.run(send(url, case.path, case.body)), expected)
    return report(args, tally, clock, able, seconds)


def report(args: argparse.Namespace, tally: Tally, clock: Clock, able: float, seconds: float) -> int:
    """Print the summary. Returns the exit code."""
    total = sum(tally.answers.values()) + len(tally.wrong)
    print(f"{total} answers in {clock.wall:.0f} s ({total / clock.wall / able:.1f} times the capacity): "
          + ", ".join(f"{count} {kind}" for kind, count in tally.answers.most_common()))
    late = tally.late.total()
    if tally.refused:
        print(f"503 after {median(tally.refused):.1f} ms, p99 {quantile(tally.refused, 0.99):.1f}, longest "
              f"{max(tally.refused):.1f}; {late} of {len(tally.refused)} later than {LATE} ms"
              + "".join(f", {count} {kind}" for kind, count in tally.late.most_common(6)))
    print(f"/health after {median(tally.health):.1f} ms, longest {max(tally.health):.1f}; "
          f"client {100 * clock.cpu:.0f}% of a core")
    problems = [f"{late} refusals were late"] * (late > 0.01 * len(tally.refused))
    if tally.rss:
        start, middle, end = growth(tally.rss, seconds)
        print(f"memory: {start / 1e6:.0f} MB at the start, {middle / 1e6:.0f} MB in the middle, "
              f"{end / 1e6:.0f} MB at the end, at most {max(size for _, size in tally.rss) / 1e6:.0f} MB")
        if end > 1.05 * middle:
            problems.append(f"memory grew by {(end - middle) / 1e6:.0f} MB in the second half")
    for text in tally.wrong[:10]:
        print(f"wrong: {text[:600]}")
    print("; ".join([f"{len(tally.wrong)} wrong bodies", *problems]))
    if args.out:
        result = {"date": date.today().isoformat(), "machine": machine(), "capacity": able,
                  "answers": tally.answers, "wrong": tally.wrong, "refused_ms": tally.refused,
                  "health_ms": tally.health, "rss": tally.rss}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 1 if tally.wrong or problems else 0


if __name__ == "__main__":
    sys.exit(main())
