"""How fast blocks are written, by their steps, beside a token after the other: shapes of real models.

    python evals/blocks.py 1.5b --recipe int8,int4-rtn --kv none,int8,int4 --out FILE

Weights are random, so that what is written means nothing: each step commits as many tokens as it must. Prints
what a step costs by its rows, and how many tokens a step would have to commit for blocks to be faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quantkit.evaluation.bench.random_model import random_model
from quantkit.evaluation.protocol import machine
from quantkit.kv.spec import parse_kv
from quantkit.runtime.denoising import Denoising
from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import Sampling

MODELS = {"135m": ("smollm2-135m", "blocks-135m"), "1.5b": ("qwen2.5-1.5b", "blocks-1.5b"),
          "1.7b": ("qwen3-1.7b", "sdar-1.7b")}


def written(loaded: LoadedModel, kv: str, batch: int, tokens: int, steps: int | None) -> dict[str, float]:
    """Answers of a batch side by side: tokens a second together, and seconds of a step."""
    engine = Engine(loaded, kv=parse_kv(kv), max_batch=batch,
                    denoising=None if steps is None else Denoising(steps=steps, confidence=1.0))
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    prompts = [[5 + row + place % 200 for place in range(64)] for row in range(batch)]
    requests, seconds = [engine.submit(prompt, sampling) for prompt in prompts], []
    while engine.stats()["running"] + engine.stats()["waiting"]:
        reads, begin = engine.stats()["prompt_tokens"], time.perf_counter()
        engine.step()
        if engine.stats()["prompt_tokens"] == reads:  # a step that reads a prompt says nothing of blocks
            seconds.append(time.perf_counter() - begin)
    count = sum(len(request.result.token_ids) for request in requests)
    engine.close()
    return {"tok_s": count / sum(seconds), "step_ms": 1e3 * median(seconds)}


def rows_of(name: str, recipe: str, kvs: Sequence[str], batches: Sequence[int], tokens: int,
            block_steps: Sequence[int]) -> list[dict[str, Any]]:
    """Measure one shape with one kind of weights."""
    single, blocks = (random_model(f"synthetic:{uri}", recipe, torch.device("cpu")) for uri in MODELS[name])
    assert blocks.config.diffusion is not None
    size, rows = blocks.config.diffusion.block_size, []
    for kv in kvs:
        for batch in batches:
            written(single, kv, batch, 8, None)  # compiles what isn't yet
            plain = written(single, kv, batch, tokens, None)
            written(blocks, kv, batch, size, 1)
            for steps in block_steps:
                row = written(blocks, kv, batch, tokens, steps)
                # of size / steps tokens a step; a block's last step has the next one's rows too
                rows.append({"model": name, "recipe": recipe, "kv": kv, "batch": batch, "block": size,
                             "steps": steps, **row, "token_by_token": plain,
                             "times": row["tok_s"] / plain["tok_s"],
                             "tokens_a_step_to_win": plain["tok_s"] / row["tok_s"] * size / steps})
                print(f"{name} {recipe:9} KV {kv:5} batch {batch}: {steps:2} steps a block of {size}: "
                      f"{row['tok_s']:6.1f} tok/s, {rows[-1]['times']:.2f} of token by token "
                      f"({plain['tok_s']:.1f}); wins from {rows[-1]['tokens_a_step_to_win']:.1f} tokens "
                      "a step", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--recipe", default="int8,int4-rtn")
    parser.add_argument("--kv", default="none,int8,int4")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", default="32,16,8,4,2")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    batches, steps = ([int(number) for number in text.split(",")] for text in (given.batch, given.steps))
    with torch.inference_mode():
        rows = [row for recipe in given.recipe.split(",")
                for row in rows_of(given.model, recipe, given.kv.split(","), batches, given.tokens, steps)]
    if given.out is not None:
        lines = ",\n".join(json.dumps(row) for row in rows)
        given.out.write_text(f'{{"machine": {json.dumps(machine())},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
