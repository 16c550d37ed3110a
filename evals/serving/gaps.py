"""A prompt of 3,000 tokens that arrives while four, then eight, answers run: how long do those wait?

    python evals/serving/gaps.py [NAME=]URL [[NAME=]URL …] [--streams 4,8] [--characters N]

Streams decode alone for a while, then the prompt comes. The script prints the gaps between tokens before the
prompt and beside it, and when the prompt's own first token comes. Servers alternate within a run: different
engines, or the same one with the default ``--max-itl`` and with ``--max-itl 1e9``, where the prompt's chunks
are the largest. Each round has another prompt, so that no cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from prompts import text
from stream_client import Clock, Response, model_of, named, quantile, send, stream_times

from quantkit.evaluation.protocol import machine

LONGEST = 3500
"""Tokens of a stream at most; it is left when the prompt's first token is there."""


async def measure(url: str, model: str, streams: int, prompt: str, settle: float) -> dict[str, Any]:
    """One round; times in milliseconds. Raises RuntimeError if a stream fails or ends too early."""
    live = [Response() for _ in range(streams)]
    work = [asyncio.create_task(send(url, "/v1/completions", {
        "model": model, "prompt": f"Story {index}:", "max_tokens": LONGEST, "temperature": 0,
        "stream": True, "ignore_eos": True}, into=response)) for index, response in enumerate(live)]
    try:
        while not all(len(response.events) > 5 for response in live):
            await asyncio.sleep(0.02)
            for response in live:
                if response.error or response.status not in (0, 200):
                    raise RuntimeError(f"a stream failed: {response.error or response.body[:300]!r}")
        begin = time.perf_counter()
        await asyncio.sleep(settle)
        answer = await send(url, "/v1/completions", {
            "model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}})
        times = stream_times(answer)
        answered = times.arrivals[0]
        await asyncio.sleep(settle / 4)
        if any(job.done() for job in work):
            raise RuntimeError("a stream ended before the prompt's first token")
    finally:
        for job in work:
            job.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    before, beside = [], []
    for response in live:
        for (earlier, _), (later, _) in pairwise(response.events):
            if earlier >= begin and later <= answer.sent:
                before.append(1e3 * (later - earlier))
            elif later > answer.sent and earlier < answered:
                beside.append(1e3 * (later - earlier))
    return {"streams": streams, "prompt_tokens": times.prompt_tokens, "before": before, "beside": beside,
            "ttft": 1e3 * times.first}


def line(rounds: list[dict[str, Any]]) -> str:
    """For people."""
    before = [gap for run in rounds for gap in run["before"]]
    beside = [gap for run in rounds for gap in run["beside"]]
    first = ", ".join(f"{run['ttft'] / 1e3:.2f}" for run in rounds)
    p50, p90, p99 = (quantile(beside, part) for part in (0.5, 0.9, 0.99))
    return (f"usual gap {quantile(before, 0.5):5.1f} ms (p99 {quantile(before, 0.99):.1f}); "
            f"beside the prompt median {p50:6.1f}, p90 {p90:6.1f}, p99 {p99:6.1f}, "
            f"longest {max(beside):6.1f} ms; its first token after "
            f"{median(run['ttft'] for run in rounds) / 1e3:.2f} s ({first})")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="[NAME=]URL")
    parser.add_argument("--streams", default="4,8", help="numbers of running answers, separated by commas")
    parser.add_argument("--characters", type=int, default=11600,
                        help="of the long prompt; about 3.9 are a token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of streams alone")
    parser.add_argument("--seed", default="1", help="the prompts depend on it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="raw results as JSON")
    args = parser.parse_args()
    servers = named(args.urls)
    models = {name: model_of(url) for name, url in servers.items()}
    counts = [int(part) for part in args.streams.split(",")]
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for name, url in servers.items():  # kernels are compiled, buffers are there
        asyncio.run(measure(url, models[name], max(counts), "Once upon a time", 0.2))
    with Clock() as clock:
        for turn in range(args.rounds):
            for streams in counts:
                random_ = random.Random(f"gaps {args.seed} {turn} {streams}")
                prompt = f"Text {random_.randrange(10**6)}. {text(random_, args.characters)}"
                for name in list(servers)[::-1 if turn % 2 else 1]:
                    rounds.setdefault((streams, name), []).append(
                        asyncio.run(measure(servers[name], models[name], streams, prompt, args.settle)))
    for streams in counts:
        length = rounds[streams, next(iter(servers))][0]["prompt_tokens"]
        print(f"{streams} answers, then a prompt of {length} tokens")
        for name in servers:
            print(f"{name:>12} {line(rounds[streams, name])}")
    print(f"client: {100 * clock.cpu:.0f}% of a core")
    if args.out:
        rows = [{"server": name, **run} for (_, name), several in rounds.items() for run in several]
        result = {"date": date.today().isoformat(), "machine": machine(), "models": models, "rows": rows}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
