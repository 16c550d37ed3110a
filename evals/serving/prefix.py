"""A long prefix that is sent again with another ending: when does the first token come?

    python evals/serving/prefix.py [NAME=]URL [[NAME=]URL …] [--characters N] [--again N]

A round sends a chat whose message is a text of the project's documents (about 2,800 tokens) with a short
question at its end, and then the same text with other questions. Every round has another text, so that its
first request meets no cache. Servers alternate. The server's own count of cached tokens is printed where it
reports one. ``--fresh URL`` names a server of the first one's model that has its prefix cache turned off: it
gets the same requests, and an answer that differs between the two is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from prompts import text
from stream_client import StreamTimes, model_of, named, send, stream_times

from quantkit.evaluation.protocol import machine

QUESTIONS = ("Summarize it.", "Which words appear often?", "What is the first sentence about?",
             "Who wrote this, and for whom?", "What is missing?", "Name one number in it.")


def ask(url: str, model: str, prefix: str, question: str, tokens: int) -> StreamTimes:
    """One greedy answer. Raises RuntimeError."""
    body = {"model": model, "messages": [{"role": "user", "content": f"{prefix}\n\n{question}"}],
            "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}}
    return stream_times(asyncio.run(send(url, "/v1/chat/completions", body)))


def round_of(url: str, model: str, prefix: str, again: int, tokens: int) -> dict[str, Any]:
    """The first request and those that share its prefix; times in milliseconds."""
    answers = [ask(url, model, prefix, QUESTIONS[i % len(QUESTIONS)], tokens) for i in range(1 + again)]
    return {"prompt_tokens": answers[0].prompt_tokens, "ttft": [1e3 * answer.first for answer in answers],
            "cached": [answer.cached for answer in answers], "text": [answer.text for answer in answers]}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="[NAME=]URL")
    parser.add_argument("--characters", type=int, default=10800, help="of the prefix; about 3.9 are a token")
    parser.add_argument("--again", type=int, default=3, help="times that the prefix is sent again in a round")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", metavar="URL", help="the first server's model without a prefix cache")
    parser.add_argument("--seed", default="1", help="the texts depend on it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="raw results as JSON")
    args = parser.parse_args()
    servers = named(args.urls)
    models = {name: model_of(url) for name, url in servers.items()}
    differ = 0
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for name, url in servers.items():  # kernels are compiled, buffers are there
        ask(url, models[name], text(random.Random("warm"), args.characters), QUESTIONS[0], 8)
    for turn in range(args.rounds):
        random_ = random.Random(f"prefix {args.seed} {turn}")
        prefix = f"Text {random_.randrange(10**6)}. {text(random_, args.characters)}"
        for name in list(servers)[::-1 if turn % 2 else 1]:
            rounds[name].append(round_of(servers[name], models[name], prefix, args.again, args.max_tokens))
        if args.fresh:
            fresh = round_of(args.fresh.rstrip("/"), model_of(args.fresh.rstrip("/")), prefix, args.again,
                             args.max_tokens)
            cached_texts = rounds[next(iter(servers))][-1]["text"]
            differ += sum(a != b for a, b in zip(fresh["text"], cached_texts, strict=True))
    best = next(iter(servers))
    repeats: dict[str, float] = {}
    for name, several in rounds.items():
        first = median(run["ttft"][0] for run in several)
        later = [value for run in several for value in run["ttft"][1:]]
        repeats[name] = median(later)
        cached = [run["cached"][1:] for run in several]
        length = median(run["prompt_tokens"] for run in several)
        print(f"{name:>12} prompt of {length:.0f} tokens: first token after {first:.0f} ms, with the prefix "
              f"again {repeats[name]:.0f} ms ({min(later):.0f}–{max(later):.0f}), "
              f"{first / repeats[name]:.1f} times as fast; cached tokens {cached[-1]}")
    for name in list(servers)[1:]:
        pairs = zip(rounds[best], rounds[name], strict=True)
        ratio = median(ours["ttft"][0] / theirs["ttft"][0] for ours, theirs in pairs)
        print(f"  {best} / {name}: first {ratio:.2f}, "
              f"with the prefix again {repeats[best] / repeats[name]:.2f}")
    if args.fresh:
        print(f"{differ} answers of {best} differ from those without a prefix cache")
    if args.out:
        result = {"date": date.today().isoformat(), "machine": machine(), "models": models, "rounds": rounds}
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
