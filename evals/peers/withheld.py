"""Quantizes a model of a known family as if its mathematics weren't known, through transformers' modules.

    python evals/peers/withheld.py MODEL RECIPE OUT

The result beside that of ``quantkit quantize MODEL --recipe RECIPE --for vllm`` says what calibrating through
modules costs in quality, on a real model and real text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def main(model: str, recipe: str, out: str) -> None:
    from quantkit.quantization.planning import plan
    from quantkit.quantization.run import quantize
    from quantkit.quantization.transforms import base

    def unknown(config: Mapping[str, Any], infos: Mapping[str, Any]) -> bool:
        return False

    plan.is_known = base.is_known = unknown
    result = quantize(model, recipe, out, progress=lambda event: print(f"{event.label}: {event.detail}"))
    print(f"{result.out}: {result.seconds:.0f} s, {result.plan.bits_per_weight:.2f} bits a weight")


if __name__ == "__main__":
    main(*sys.argv[1:])
