"""Streams beside a long prompt: the gaps between their tokens, and when the prompt's own first token comes.

``quantkit serve-local MODEL``, then ``python evals/gaps.py URL [URL …]``. With several servers, such as one
with the default ``--max-itl`` and one with ``--max-itl 1e9`` (the prompt's chunks are the largest), rounds
alternate between them, so that they meet the same machine. Needs the ``openai`` package.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import openai

WORDS = ("harbour", "lantern", "quiet", "river", "seven", "copper", "walked", "under", "morning", "because")


class GapRound(NamedTuple):
    """Seconds between tokens before and while the prompt is read, and from its request to its first token."""

    before: list[float]
    during: list[float]
    first: float


def stream(client: openai.OpenAI, model: str, prompt: str, tokens: int, arrived: list[float],
           stop: threading.Event) -> None:
    """Note when each event of a greedy answer comes, until ``stop``."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0,
                                       stream=True, extra_body={"ignore_eos": True})
    for _ in answer:
        arrived.append(time.perf_counter())
        if stop.is_set():
            break
    answer.close()


def measure(url: str, streams: int, words: int, settle: float, salt: int) -> GapRound:
    """One round: streams decode, and after a while a long prompt comes."""
    client = openai.OpenAI(base_url=url.rstrip("/") + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    prompt = " ".join(WORDS[(i * i + i // 7 + salt) % len(WORDS)] + str(i) for i in range(words))
    stop = threading.Event()
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        work = [pool.submit(stream, client, model, f"Story {i}:", 4000, mine, stop)
                for i, mine in enumerate(arrivals)]
        try:
            while not all(len(mine) > 5 for mine in arrivals):
                time.sleep(0.05)
                for job in work:
                    if job.done():
                        job.result()
                        raise RuntimeError("a stream ended before the prompt came")
            begin = time.perf_counter()
            time.sleep(settle)
            sent = time.perf_counter()
            for _ in client.completions.create(model=model, prompt=prompt, max_tokens=1, stream=True):
                break
            answered = time.perf_counter()
            time.sleep(settle / 4)
        finally:
            stop.set()
    before, during = [], []
    for mine in arrivals:
        for first, other in itertools.pairwise(mine):
            if first >= begin and other <= sent:
                before.append(other - first)
            elif other > sent and first < answered:
                during.append(other - first)
    return GapRound(before, during, answered - sent)


def worst(gaps: list[float], part: float) -> float:
    """The gap that this part of all gaps doesn't exceed, in milliseconds."""
    return 1e3 * sorted(gaps)[min(len(gaps) - 1, int(part * len(gaps)))]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--words", type=int, default=900, help="of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of streams alone")
    chosen = parser.parse_args()
    rounds: dict[str, list[GapRound]] = {url: [] for url in chosen.urls}
    for url in chosen.urls:  # kernels are compiled
        measure(url, chosen.streams, 40, 0.2, 0)
    for number in range(chosen.rounds):
        for url in chosen.urls:
            rounds[url].append(measure(url, chosen.streams, chosen.words, chosen.settle, number))
    for url, several in rounds.items():
        print(url)
        for name, gaps in (("alone", [gap for run in several for gap in run.before]),
                           ("beside the prompt", [gap for run in several for gap in run.during])):
            print(f"  gaps {name:<18} median {worst(gaps, 0.5):7.1f}  p90 {worst(gaps, 0.9):7.1f}  "
                  f"p99 {worst(gaps, 0.99):7.1f}  max {worst(gaps, 1):7.1f} ms")
        print(f"  the prompt's first token after {median(run.first for run in several):.2f} s "
              f"({', '.join(f'{run.first:.2f}' for run in several)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
