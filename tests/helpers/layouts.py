"""The cells of docs/layouts.yaml, and a tiny checkpoint of each layout."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from quantkit.quantization.run import quantize
from quantkit.testing import tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
                         "tie_word_embeddings": False}
"""A tiny Llama whose layers are as wide as the widest blocks are, and engines' kernels want them."""


def generator() -> ModuleType:
    """``docs/generate_layouts.py``."""
    spec = importlib.util.spec_from_file_location("generate_layouts", ROOT / "docs" / "generate_layouts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LayoutCase(NamedTuple):
    """A rule that makes a layout, and the layout's row: engine → cell."""

    rule: dict[str, Any]
    row: dict[str, Any]

    def __str__(self) -> str:
        spec = self.rule.get("spec", {})
        granularity = spec.get("granularity", {})
        return "-".join(str(part) for part in (
            self.rule["format"], spec.get("kind"), spec.get("bits"), granularity.get("strategy"),
            spec.get("symmetric") is False and "zero", spec.get("minimum") and "minimum",
            spec.get("nested") and "nested", spec.get("activations")) if part)

    @property
    def rounds_inputs(self) -> bool:
        """Whether its layers round what they multiply."""
        return bool(self.rule.get("spec", {}).get("activations"))


def cases() -> Iterator[LayoutCase]:
    """Every layout as each of its rules makes it."""
    for row in generator().read()["layouts"]:
        for rule in row["cases"]:
            yield LayoutCase(rule, row)


def maker(folder: Path, dtype: str = "bfloat16") -> Callable[[LayoutCase], Path]:
    """``make(case)`` → a checkpoint below ``folder`` of a tiny model of that dtype, made once."""
    model = tiny_model(folder / "model", dtype=dtype, **MODEL)

    def make(case: LayoutCase) -> Path:
        out = folder / str(case)
        if not out.exists():
            recipe = folder / f"{case}.yaml"
            rule = {"match": "*", "method": "rtn", **case.rule}
            recipe.write_text(json.dumps({"calibration": {"windows": 8, "window": 64},
                                          "rules": [{"match": "lm_head"}, rule]}), encoding="utf-8")
            quantize(str(model), str(recipe), out)
        return out

    return make
