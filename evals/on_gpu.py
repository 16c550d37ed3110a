"""Whether a GPU computes what the CPU does, with real weights: ``python evals/on_gpu.py MODEL``.

For every kind of weights and of KV cache a model is scored four ways: exactly (on the CPU, in float32, by
torch's operators on the dequantized weights), by the GPU in portions as a prompt is read, by the GPU a token
at a time as an answer is written, and by the CPU's kernels. Each way's KL from the exact one is printed; the
GPU's should be about that of the dtype alone. A model of 64 MB is enough; one in parts is joined by
``cat PART… > FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.protocol import machine
from quantkit.evaluation.quality.feed import force, prefill
from quantkit.evaluation.quality.score import windows_of
from quantkit.evaluation.quality.window_scores import WindowScores
from quantkit.evaluation.text import load_text
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv, split_settings
from quantkit.quantization.run import quantize
from quantkit.runtime.loader import LoadedModel, load
from quantkit.support.errors import QuantkitError

PLAIN = "none"
MOST = 0.02
"""KL in nats that a GPU may be farther from the exact result than 16-bit arithmetic on the CPU is."""


class PromptComparison:
    """A model as a prompt is read; results on the CPU.

    All windows, and every way that a model is run, share one ``cache``: on a GPU it takes all the memory that
    is left, and the graphs of decode steps are made for it.
    """

    def __init__(self, loaded: LoadedModel, prompt: int, cache: KVCache) -> None:
        self.loaded, self._prompt, self._cache = loaded, prompt, cache

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """Logits ``[n - prompt, vocab]`` of ``window`` int64 ``[n]`` from position ``prompt`` on."""
        ids: list[int] = window.tolist()
        row = self._cache.add(len(ids))
        prefill(self.loaded, self._cache, row, ids[:self._prompt])
        logits = self.read(row, ids[self._prompt:]).cpu()
        self._cache.free([row])
        return logits

    def read(self, row: int, ids: list[int]) -> torch.Tensor:
        """Logits ``[len(ids), vocab]`` behind the prompt of a sequence."""
        return force(self.loaded, self._cache, row, ids)


class DecodeComparison(PromptComparison):
    """As an answer is written: a token a step."""

    def read(self, row: int, ids: list[int]) -> torch.Tensor:
        model, results = self.loaded.model, []
        for token in ids:
            batch = Batch(self._cache, [row], "decode")
            results.append(model(torch.tensor([[token]], device=model.device), cache=batch)[0].cpu().clone())
        return torch.cat(results)


def check(uri: str, kv: str, tokens: torch.Tensor, models: tuple[LoadedModel, ...]) -> dict[str, Any]:
    """Perplexity and KL of each way."""
    exact, gpu, cpu = models
    prompt, spec = tokens.shape[1] // 2, parse_kv(kv)
    of_exact, of_gpu, of_cpu = (KVCache(model.config, spec, model.dtype, model.model.device)
                                for model in models)
    ways = [PromptComparison(exact, prompt, of_exact), PromptComparison(gpu, prompt, of_gpu),
            DecodeComparison(gpu, prompt, of_gpu), PromptComparison(cpu, prompt, of_cpu)]
    names = ("exact", "portions", "one_by_one", "cpu")
    scores = WindowScores(registered_metrics(), len(ways))
    for window in tokens:
        logits = [way.logits(window)[:-1] for way in ways]
        for number, candidate in enumerate(logits):
            scores.add(number, logits[0], candidate, window[1 + prompt:])
    return {"model": uri, "label": gpu.label, "kv": kv, "unfused": gpu.fallback_reason,
            "cpu_unfused": cpu.fallback_reason, **{name: {key: metric.value
                                                          for key, metric in metrics.items()}
               for name, metrics in zip(names, scores.summaries())}}


def main() -> int:
    """The command line; returns the exit code."""
    try:
        return _run()
    except QuantkitError as error:
        print("\n".join(f"{name}: {text}" for name, text in (
            ("error", error.what), ("why", error.why), ("next", error.next)) if text), file=sys.stderr)
        return 1


def _run() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--recipe", default=f"{PLAIN},int8,int4-rtn,nf4", help="of weights, by commas")
    parser.add_argument("--kv", default="none,int8,fp8,int4,rotation(4)", help="KV settings, by commas")
    parser.add_argument("--text", help="a file, or what `quantkit eval --text` takes")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the GPU's side and the CPU's kernels")
    parser.add_argument("--out", type=Path, help="JSON, written after every case")
    args = parser.parse_args()
    text = load_text(args.text) if args.text else load_text()
    rows: list[dict[str, Any]] = []
    print(f"KL from exact, nats\n{'weights':<24} {'kv':<12} {'portions':>9} {'one by one':>10} {'cpu':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.recipe.split(","):
            uri = args.model
            if recipe != PLAIN:
                uri = str(Path(folder) / recipe)
                quantize(args.model, recipe, Path(uri))
            exact = load(uri, dtype="float32", device="cpu")
            gpu = load(uri, dtype=args.dtype, device=args.device)
            cpu = load(uri, dtype=args.dtype, device="cpu")
            if cpu.fallback_reason is not None:
                print(f"the CPU's side is torch in {args.dtype}: {cpu.fallback_reason}", file=sys.stderr)
            tokens = windows_of(exact, text.content, args.window, args.windows)
            for kv in split_settings(args.kv):
                rows.append(row := check(uri, kv, tokens, (exact, gpu, cpu)))
                kls = [row[path_name]["kl_mean"] for path_name in ("portions", "one_by_one", "cpu")]
                print(f"{row['label']:<24} {kv:<12} {kls[0]:>9.5f} {kls[1]:>10.5f} {kls[2]:>9.5f}",
                      flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps(
                        {"machine": machine(gpu.model.device), "text": text.name, "window": args.window,
                         "windows": args.windows, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    worst = max(row[path_name]["kl_mean"] - row["cpu"]["kl_mean"]
                for row in rows for path_name in ("portions", "one_by_one"))
    print(f"at most {worst:.5f} farther from it than the CPU's kernels are; {MOST} is allowed")
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
