"""Streaming clients of a running server, one at a time and all at once: are texts the same, and how fast.

``quantkit serve-local MODEL``, then ``python evals/serving/equal_texts.py [URL] [--clients N]
[--max-tokens N]``. Needs the ``openai`` package. Exit code 1 if a greedy text depends on who else is served.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import openai

QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "Explain photosynthesis.",
             "List five prime numbers.", "Who was Ada Lovelace?", "How does a bicycle work?",
             "Translate 'good morning' into German.", "Tell me a joke about computers.")


class ClientResponse(NamedTuple):
    """What a client got: seconds are from its request on."""

    text: str
    tokens: int
    first: float
    seconds: float


def ask(client: openai.OpenAI, model: str, question: str, tokens: int) -> ClientResponse:
    """Stream one greedy answer of exactly so many tokens."""
    begin = time.perf_counter()
    first = 0.0
    text = ""
    count = 0
    for chunk in client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0,
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}):
        count = chunk.usage.completion_tokens if chunk.usage else count
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter() - begin
                text += choice.delta.content
    return ClientResponse(text, count, first, time.perf_counter() - begin)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    chosen = parser.parse_args()
    client = openai.OpenAI(base_url=chosen.url.rstrip("/") + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    questions = [f"{QUESTIONS[i % 8]}{' ' * (i // 8)}" for i in range(chosen.clients)]
    ask(client, model, questions[0], chosen.tokens)
    alone = [ask(client, model, question, chosen.tokens) for question in questions]
    begin = time.perf_counter()
    with ThreadPoolExecutor(chosen.clients) as pool:
        together = list(pool.map(lambda question: ask(client, model, question, chosen.tokens), questions))
    wall = time.perf_counter() - begin
    alone_rate = sum(a.tokens for a in alone) / sum(a.seconds for a in alone)
    many = sum(a.tokens for a in together) / wall
    same = sum(a.text == b.text for a, b in zip(alone, together))
    print(f"model {model}, {chosen.tokens} tokens each, greedy")
    for name, rate, answers in (("one client", alone_rate, alone),
                                (f"{chosen.clients} clients", many, together)):
        first = median(a.first for a in answers)
        print(f"{name:<12} {rate:7.1f} tok/s in all, first token after {first:.2f} s")
    print(f"{many / alone_rate:.2f} x as many; the same text as alone: {same} of {chosen.clients}")
    return 0 if same == chosen.clients else 1


if __name__ == "__main__":
    sys.exit(main())
