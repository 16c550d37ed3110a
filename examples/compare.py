"""Quantizes a model twice and measures what each cost: python examples/compare.py [MODEL] [FOLDER]"""

import sys
from pathlib import Path

import quantkit

name, folder = (*sys.argv[1:], *("smollm2", "compared")[len(sys.argv) - 1:])[:2]
made = []
for recipe in ("int8", "int4-rtn"):
    out = Path(folder) / recipe
    checkpoint = quantkit.Checkpoint.open(out) if out.exists() else quantkit.quantize(name, recipe, out)
    worst = max((layer for layer in checkpoint.layers if layer.error), key=lambda layer: layer.error)
    print(f"{checkpoint}: most error in {worst.name}, {worst.error:.2%}")
    made.append(str(out))
result = quantkit.evaluate([name, *made], windows=4, speed=False)
for row in result.rows[1:]:
    kl = row.metrics["kl_mean"]
    print(f"{row.method}: {row.file_bytes / 1e6:.0f} MB, KL {kl.value:.4f} ({kl.low:.4f} to {kl.high:.4f})")
