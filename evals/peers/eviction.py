"""Eviction beside kvpress: the same policies on the same model and text; which positions stay, bytes, speed.

    pip install kvpress==0.5.5 "transformers<5.3" torch==2.13.0        (in an environment of its own)
    python evals/peers/eviction.py --model DIR --text FILE --kvpress PYTHON --work DIR [--window 2048]
        [--only NAME …] [--out FILE]

Both sides keep half of a prompt in float32. Kept positions are compared by layer and head: the share that
both keep of what either does. Seconds are of the prompt, and of one token of an answer; ours also in bfloat16
through the kernels that serve, where the two sides no longer compute the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from commands import without_pythonpath
from safetensors.torch import save_file

from quantkit.cli.present import table
from quantkit.evaluation.protocol import machine
from quantkit.evaluation.quality.feed import prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.runtime.loader import LoadedModel, load

SCRIPT = Path(__file__).with_name("theirs") / "eviction_kvpress.py"
WINDOW = {"window_size": 32, "kernel_size": 5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window({most}, sinks=4)", {"n_sink": 4}),
    "snapkv": ("snapkv(0.5)", WINDOW),
    "pyramidkv": ("pyramidkv(0.5)", WINDOW),
    "adakv": ("adakv(0.5)", WINDOW),
    "tova": ("tova(0.5)", {}),
    "expected": ("expected(0.5)", {"n_future_positions": 512, "n_sink": 4}),
}
"""Ours, and theirs' options beside the ratio."""


def ours(loaded: LoadedModel, kv: str, prompt: torch.Tensor, answer: torch.Tensor) -> dict[str, Any]:
    """What stays, bytes and seconds."""
    cache = KVCache(loaded.config, parse_kv(kv), loaded.dtype)
    row = cache.add(len(prompt) + len(answer))
    with torch.inference_mode():
        begin = time.perf_counter()
        prefill(loaded, cache, row, prompt.tolist())
        prefill_s = time.perf_counter() - begin
        kept = [[[at for at in head if at >= 0] for head in cache.positions(row, layer).tolist()]
                for layer in range(loaded.config.num_layers)]
        cache_bytes = sum(store.pages.used * store.pages.page_bytes for store in cache.stores)
        begin = time.perf_counter()
        for token in answer:
            loaded.model(token[None, None], cache=Batch(cache, [row], "decode"))
        decode = (time.perf_counter() - begin) / len(answer)
    return {"kept": kept, "bytes": cache_bytes, "prefill_s": prefill_s, "decode_s": decode}


def theirs(args: argparse.Namespace, name: str, options: dict[str, Any], tokens: Path) -> dict[str, Any]:
    """The same by kvpress."""
    out = args.work / f"{name}.json"
    spec = {"press": name, "options": {"compression_ratio": 0.5, **options}, "threads": args.threads}
    command = [args.kvpress, str(SCRIPT), str(args.model), str(tokens), str(out), json.dumps(spec)]
    subprocess.run(command, check=True, env=without_pythonpath(OMP_NUM_THREADS=str(args.threads)))
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def agreement(mine: list[list[list[int]]], its: list[list[list[int]]]) -> tuple[float, float]:
    """Mean and least share, over layers and heads, of what both keep in what either does."""
    shares = [len({*a} & {*b}) / len({*a} | {*b}) for x, y in zip(mine, its, strict=True)
              for a, b in zip(x, y, strict=True)]
    return sum(shares) / len(shares), min(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a plain folder that both read")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kvpress", required=True, help="python of its environment")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    exact, served = load(str(args.model), dtype="float32"), load(str(args.model), dtype="bfloat16")
    ids = exact.tokenizer.encode(args.text.read_text(encoding="utf-8")[:20 * args.window])
    prompt, answer = (torch.tensor(tokens) for tokens in (
        ids[:args.window], ids[args.window:args.window + args.max_tokens]))
    tokens = args.work / "tokens.safetensors"
    save_file({"prompt": prompt, "answer": answer}, tokens)
    rows = []
    for name in args.only:
        kv, options = VARIANTS[name]
        kv = kv.format(most=args.window // 2 - 4 + 1)  # of which the next query is one
        mine, its = ours(exact, kv, prompt, answer), theirs(args, name, options, tokens)
        fast = ours(served, kv, prompt, answer)
        same, least = agreement(mine["kept"], its["kept"])
        rows.append({"policy": kv, "same": same, "least": least, "versions": its.pop("versions"), **{
            f"{side}_{field}": result[field] for side, result in (("ours", mine), ("served", fast),
                                                                  ("kvpress", its))
            for field in ("bytes", "prefill_s", "decode_s")}})
        print(f"{kv}: {same:.4f} of the positions are the same, in the worst head {least:.4f}", flush=True)
    sides = ("ours", "kvpress", "served")
    print(table(
        ("policy", "same", "least", "MB", "theirs", "prompt s", "theirs", "served", "token ms", "theirs",
         "served"),
        [(row["policy"], f"{row['same']:.4f}", f"{row['least']:.3f}",
          *(f"{row[f'{side}_bytes'] / 1e6:.1f}" for side in sides[:2]),
          *(f"{row[f'{side}_prefill_s']:.1f}" for side in sides),
          *(f"{1e3 * row[f'{side}_decode_s']:.0f}" for side in sides)) for row in rows],
        right=tuple(range(1, 11)), limit=120))
    if args.out is not None:
        report = {"machine": machine() | {"threads": args.threads}, "model": args.model.name,
                  "text": args.text.name, "length": args.window, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
