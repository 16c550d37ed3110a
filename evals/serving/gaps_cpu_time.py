"""Gaps between tokens beside a long prompt, in CPU time on one thread: for a machine that is shared.

``python evals/serving/gaps_cpu_time.py MODEL [--kv TEXT …] [--max-itl MS …]``. The engine sizes chunks by the
same clock, and rounds alternate between the settings. ``--max-itl inf`` gives every chunk the largest size.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from quantkit.kv.spec import parse_kv
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.sampler import Sampling

ALONE = 40
"""Steps of the streams before the prompt comes."""


def measure(loaded: LoadedModel, kv: str, max_itl: float, prompt: Sequence[int], streams: int
            ) -> tuple[float, list[float]]:
    """Seconds of the usual step, and of the steps until the prompt's first token."""
    clock = time.process_time
    engine = Engine(loaded, kv=parse_kv(kv), clock=clock,
                    max_itl=None if math.isinf(max_itl) else max_itl / 1000)
    for index in range(streams):
        engine.submit(prompt[index:index + 10], Sampling(max_tokens=4000, ignore_eos=True))

    def step() -> float:
        begin = clock()
        engine.step()
        return clock() - begin

    alone = [step() for _ in range(ALONE)]
    ticket = engine.submit(prompt, Sampling(max_tokens=1, ignore_eos=True))
    beside = []
    while not ticket.result.token_ids:
        beside.append(step())
    engine.close()
    return median(alone[ALONE // 2:]), beside


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--kv", nargs="+", default=["none"])
    parser.add_argument("--max-itl", nargs="+", type=float, default=[math.inf, 100.0], metavar="MS")
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="how long the prompt is")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(chosen.model)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, loaded.config.vocab_size, (chosen.tokens,), generator=generator).tolist()
    for _ in range(chosen.rounds):
        for kv in chosen.kv:
            for max_itl in chosen.max_itl:
                usual, beside = measure(loaded, kv, max_itl, prompt, chosen.streams)
                order = sorted(beside)
                p90, p99 = (order[int(part * len(order))] for part in (0.9, 0.99))
                print(f"{kv}, --max-itl {max_itl:g}: usual {1e3 * usual:.1f} ms; beside the prompt median "
                      f"{1e3 * median(order):.1f}, p90 {1e3 * p90:.1f}, p99 {1e3 * p99:.1f}, longest "
                      f"{1e3 * order[-1]:.1f} ms; first token after {sum(beside):.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
