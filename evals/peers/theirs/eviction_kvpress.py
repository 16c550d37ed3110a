"""Which positions kvpress keeps of a prompt, what it holds then, and how fast it goes on.

Called as ``PYTHON SCRIPT MODEL TOKENS OUT SPEC``: a plain model folder, a prompt and what follows
(safetensors, ``prompt`` and ``answer`` int64 ``[n]``), a file to write, ``{"press", "options", "threads"}``
as JSON. Keys that are left are found again among those of a run without a press: a position's key is like no
other.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import kvpress
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

PRESSES = {"window": kvpress.StreamingLLMPress, "snapkv": kvpress.SnapKVPress, "tova": kvpress.TOVAPress,
           "pyramidkv": kvpress.PyramidKVPress, "expected": kvpress.ExpectedAttentionPress}


def made(name: str, options: dict[str, Any]) -> Any:
    """A press by our policy's name."""
    if name == "adakv":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(**options))
    return PRESSES[name](**options)


def main() -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True,
                                                 attn_implementation="sdpa")
    parts, spec = load_file(sys.argv[2]), json.loads(sys.argv[4])
    torch.set_num_threads(spec["threads"])
    prompt, answer = parts["prompt"][None], parts["answer"]
    with torch.inference_mode():
        full = DynamicCache()
        model.model(prompt, past_key_values=full)
        cache, press = DynamicCache(), made(spec["press"], spec["options"])
        begin = time.perf_counter()
        with press(model):
            model.model(prompt, past_key_values=cache)
            prefill = time.perf_counter() - begin
            kept, cache_bytes = [], 0
            for index, (layer, full_layer) in enumerate(zip(cache.layers, full.layers)):
                masked = getattr(model.model.layers[index].self_attn, "masked_key_indices", None)
                rows = []
                for head in range(full_layer.keys.shape[1]):
                    if masked is None:
                        distance = torch.cdist(layer.keys[0, head], full_layer.keys[0, head])
                        rows.append(sorted(distance.argmin(-1).tolist()))
                    else:
                        gone = set(masked[2][masked[1] == head].tolist())
                        rows.append([at for at in range(prompt.shape[1]) if at not in gone])
                kept.append(rows)
                cache_bytes += layer.keys.nbytes + layer.values.nbytes
            begin = time.perf_counter()
            for token in answer:
                model(token[None, None], past_key_values=cache)
            decode = time.perf_counter() - begin
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    Path(sys.argv[3]).write_text(json.dumps({
        "kept": kept, "bytes": cache_bytes, "prefill_s": prefill, "decode_s": decode / len(answer),
        "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main()
