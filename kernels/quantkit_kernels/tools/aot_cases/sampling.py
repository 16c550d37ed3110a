"""Choosing tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels.tools.aot_cases.case import POINTERS, AotCase, made
from quantkit_kernels.triton import argmax, bounds, sampling

VOCABULARY = 128256


def cases(family: str) -> Iterator[AotCase]:
    """Everything in bfloat16, and what reads logits in other dtypes too."""
    cut = argmax.cut(VOCABULARY)
    size = {"PARTS": cut.parts, "PAD": cut.pad}
    for dtype, label in ((torch.bfloat16, ""), (torch.float16, " fp16"), (torch.float32, " fp32")):
        search = {"PASSES": bounds.passes(dtype), "LOW": bounds.LOW[dtype], **size}
        x = POINTERS[dtype]
        yield made(f"argmax peak{label}", argmax.peak_kernel,
                   {"x_ptr": x, "value_ptr": "*fp32", "id_ptr": "*i32", "finite_ptr": "*i32",
                    "step": "i32", "v": "i32"},
                   {"PARTS": cut.parts, "PART": cut.size, "num_warps": argmax.WARPS},
                   multiples=("step", "v"), wide_loads=1)
        for weighted in (False, True):
            rule = "top-p" if weighted else "top-k"
            yield made(f"sampling {rule}{label}", bounds.search_kernel,
                       {"x_ptr": x, **_SETTINGS, **_SEARCH, "bound_ptr": "*fp32", "step": "i32", "v": "i32",
                        "rows": "i32", "done": "i32"},
                       {"WEIGHTED": weighted, "BOUND": weighted, "PART": cut.size,
                        "CHUNK": bounds.CHUNK, "num_warps": bounds.WARPS, **search},
                       multiples=("step", "v"))
            if dtype == torch.bfloat16:
                yield made(f"sampling {rule} settle", bounds.settle_kernel,
                           {**_SETTINGS, **_SEARCH, "v": "i32", "rows": "i32",
                            **dict.fromkeys(("before_ptr", "bound_ptr", "total_ptr"), "*fp32")},
                           {"WEIGHTED": weighted, "BOUND": weighted, "num_warps": 1, **search},
                           multiples=("v",))
        options = {"BOUND": True, "FLOOR": True, "PART": cut.size, "num_warps": argmax.WARPS, **size}
        floats = ("value_ptr", "warm_ptr", "min_ptr", "bound_ptr", "tally_ptr")
        yield made(f"sampling tally{label}", sampling.tally_kernel,
                   {"x_ptr": x, **dict.fromkeys(floats, "*fp32"), "step": "i32", "v": "i32", "rows": "i32"},
                   options, multiples=("step", "v"), wide_loads=1)
        yield made(f"sampling draw{label}", sampling.draw_kernel,
                   {"x_ptr": x, **dict.fromkeys((*floats, "total_ptr"), "*fp32"), "id_ptr": "*i32",
                    "finite_ptr": "*i32", "good_ptr": "*i32", "seed_ptr": "*i64", "step_ptr": "*i64",
                    "out_ptr": "*i64", "step": "i32", "v": "i32", "rows": "i32"},
                   {"SHARE": True, **options}, multiples=("step", "v"), wide_loads=1)
    yield made("argmax join", argmax.join_peaks_kernel,
               {"value_ptr": "*fp32", "id_ptr": "*i32", "finite_ptr": "*i32", "out_ptr": "*i64",
                "good_ptr": "*i32"}, {**size, "num_warps": 1})


_SETTINGS = {"value_ptr": "*fp32", "warm_ptr": "*fp32", "k_ptr": "*i32", "p_ptr": "*fp32"}
_SEARCH = {"table_ptr": "*fp32", "key_ptr": "*i32", "sum_ptr": "*fp32"}
