"""Bytes that the KV cache holds after prompts of growing length: ``python evals/kv_bytes.py [MODEL]``.

A prompt goes in by chunks of 512 tokens, then 64 are decoded. They are random: bytes don't depend on them.
"""

from __future__ import annotations

import sys

import torch

from quantkit.evaluation.quality.feed import prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import load

LENGTHS = (576, 1024, 2048, 4096, 8000)
DECODED = 64
SETTINGS = ("none", "window(512, sinks=4)", "window(512, sinks=4)+int8")


@torch.inference_mode()
def main() -> None:
    """Prints a line a setting."""
    loaded = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    model = loaded.model
    print(f"{'tokens':<28}" + "".join(f"{length:>9}   " for length in LENGTHS))
    for kv in SETTINGS:
        sizes = []
        for length in LENGTHS:
            cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype, model.device)
            row, prompt = cache.add(), length - DECODED
            ids = torch.randint(0, loaded.config.vocab_size, (1, length))
            prefill(loaded, cache, row, ids[0, :prompt].tolist())
            for at in range(prompt, length):
                batch = Batch(cache, [row], "decode")
                model(ids[:, at:at + 1], cache=batch)
            sizes.append(cache.allocated_bytes)
        print(f"{kv:<28}" + "".join(f"{count / 1e6:>9.2f} MB" for count in sizes), flush=True)


if __name__ == "__main__":
    main()
