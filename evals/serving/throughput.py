"""Throughput, time to first token and gaps of one or more running servers, with 1, 4, 8 and 16 clients.

    quantkit serve-local MODEL --port 8001
    llama-server -m MODEL.gguf --port 8002 …
    python evals/serving/throughput.py quantkit=http://127.0.0.1:8001 llama=http://127.0.0.1:8002

Each client sends a streaming request, reads the answer to its end and sends the next. All servers get the
same requests: greedy, of mixed lengths, from the project's documents. Servers alternate within a run (A B,
then B A, …), so that they meet the same machine. The CPU time that idle servers take while another one is
measured is printed. Ratios are those of the first server to each other one, the median over rounds.

It works with every server that has OpenAI's routes; ``ignore_eos`` is sent too, which quantkit, llama-server
and vLLM know, so that answers have the same number of tokens everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from processes import cpu_seconds, server_process
from prompts import PromptRequest, requests
from stream_client import Clock, StreamTimes, model_of, named, quantile, send, stream_times

from quantkit.evaluation.protocol import machine

Point = dict[str, Any]
"""What one server did for one number of clients in one round."""


async def closed_loop(url: str, model: str, todo: list[PromptRequest], clients: int, route: str
                      ) -> list[StreamTimes]:
    """Every client takes the next request of the list until none is left. Raises RuntimeError."""
    waiting = iter(todo)
    done: list[StreamTimes] = []

    async def client() -> None:
        for request in waiting:
            body: dict[str, Any] = {"model": model, "max_tokens": request.max_tokens, "temperature": 0,
                                    "stream": True, "stream_options": {"include_usage": True},
                                    "ignore_eos": True}
            if route == "chat":
                body["messages"] = [{"role": "user", "content": request.message}]
                path = "/v1/chat/completions"
            else:
                body["prompt"], path = request.message, "/v1/completions"
            done.append(stream_times(await send(url, path, body)))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return done


def measure(url: str, model: str, todo: list[PromptRequest], clients: int, route: str,
            others: list[psutil.Process]) -> Point:
    """One point. Times are in milliseconds, rates in tokens a second."""
    idle = sum(map(cpu_seconds, others))
    with Clock() as clock:
        answers = asyncio.run(closed_loop(url, model, todo, clients, route))
    firsts = [1e3 * answer.first for answer in answers]
    gaps = [1e3 * gap for answer in answers for gap in answer.gaps]
    tokens = sum(answer.tokens for answer in answers)
    return {"clients": clients, "requests": len(answers), "seconds": clock.wall, "client_cpu": clock.cpu,
            "others_cpu": (sum(map(cpu_seconds, others)) - idle) / clock.wall,
            "tokens": tokens, "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
            "events": sum(len(answer.arrivals) for answer in answers), "tok_s": tokens / clock.wall,
            "ttft_median": median(firsts), "ttft_p95": quantile(firsts, 0.95),
            "gap_median": quantile(gaps, 0.5), "gap_p99": quantile(gaps, 0.99), "gap_max": max(gaps),
            "ttft": firsts, "gaps": gaps}


def line(name: str, points: list[Point]) -> str:
    """For people: the median over rounds, and of the longest gap the longest."""
    def mid(key: str) -> float:
        return median(point[key] for point in points)

    return (f"{name:>12} {mid('tok_s'):7.1f} tok/s   TTFT {mid('ttft_median'):6.0f} ms, p95 "
            f"{mid('ttft_p95'):6.0f}   gaps {mid('gap_median'):6.1f} ms, p99 {mid('gap_p99'):6.1f}, longest "
            f"{max(point['gap_max'] for point in points):6.0f}   "
            f"client {100 * mid('client_cpu'):.0f}% of a core"
            + (f", idle servers {100 * mid('others_cpu'):.0f}%" if mid("others_cpu") > 0.005 else ""))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="[NAME=]URL")
    parser.add_argument("--clients", default="1,4,8,16", help="numbers of clients, separated by commas")
    parser.add_argument("--per-client", type=int, default=3, help="requests a client, but at least 8 in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--seed", default="1", help="the requests' lengths, texts and order depend on it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="raw results as JSON")
    args = parser.parse_args()
    servers = named(args.urls)
    models = {name: model_of(url) for name, url in servers.items()}
    processes = {name: process for name, url in servers.items() if (process := server_process(url))}
    counts = [int(text) for text in args.clients.split(",")]
    points: dict[tuple[str, int], list[Point]] = {}
    for name, url in servers.items():  # kernels are compiled, buffers are there
        measure(url, models[name], requests(f"warm {args.seed} {name}", 8), 4, args.route, [])
    for turn in range(args.rounds):
        for clients in counts:
            for name in list(servers)[::-1 if turn % 2 else 1]:
                todo = requests(f"{args.seed} {turn} {clients}", max(8, args.per_client * clients))
                others = [process for other, process in processes.items() if other != name]
                point = measure(servers[name], models[name], todo, clients, args.route, others)
                points.setdefault((name, clients), []).append(point)
                print(f"round {turn + 1}, {clients:2} clients {line(name, [point])}", file=sys.stderr,
                      flush=True)
    best = next(iter(servers))
    for clients in counts:
        sizes = points[best, clients][0]
        print(f"{clients} client{'s' if clients > 1 else ''}: {sizes['requests']} requests a round, "
              f"{sizes['prompt_tokens']} tokens of prompts, {sizes['tokens']} of answers")
        for name in servers:
            print(line(name, points[name, clients]))
        for name in list(servers)[1:]:
            pairs = list(zip(points[best, clients], points[name, clients], strict=True))
            ratios = {key: median(ours[key] / theirs[key] for ours, theirs in pairs)
                      for key in ("tok_s", "ttft_median", "ttft_p95", "gap_median", "gap_p99", "gap_max")}
            print(f"  {best} / {name}: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items()))
    if args.out:
        rows = [{"server": name, **point} for (name, _), several in points.items() for point in several]
        result = {"date": date.today().isoformat(), "machine": machine(), "models": models,
                  "route": args.route, "seed": args.seed, "rows": rows}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
