"""DeepSeek's fp8 checkpoints (``quant_method: fp8`` with ``weight_block_size``), which others make too.

A layer is quantized if it has ``weight_scale_inv``. Some makers store these scales in bfloat16; they become
float32. Scales that are powers of 2 in a byte (``scale_fmt: ue8m0``) and activations whose scale is in the
file aren't read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.checkpoint.foreign.base import (
    ORIGINAL,
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
    square,
)
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

SCALES = "weight_scale_inv"
HARMLESS = frozenset({"quant_method", "dequantize"})
INERT: Mapping[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic",), "fmt": ("e4m3",), "scale_fmt": ("float",), "expert_dtype": ("fp8",),
    "modules_to_convert": ([],)}


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """See the module's docstring; ``modules_to_not_convert`` must agree."""
    kept = [*_names(config, "modules_to_not_convert"), *_names(config, "ignored_layers")]
    tiles = Granularity(strategy="tile", size=square(config, "weight_block_size"))
    spec = QuantSpec(kind="fp", bits=8, granularity=tiles, scale_dtype="float32", activations="group")
    config.finish(HARMLESS, INERT)

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        if f"{slot.name}.{SCALES}" not in infos:
            return None
        if any(slot.name == name or slot.name.startswith(f"{name}.") for name in kept):
            raise contradiction(slot, "'modules_to_not_convert'")
        check_stored(slot, infos, "weight")

        def convert(tensors: Tensors) -> Tensors:
            scales = tensors[SCALES]
            if scales.dtype not in FLOATS.values():
                raise CheckpointError(f"{slot.name}.{SCALES} is {scales.dtype}", next=ORIGINAL,
                                      why=f"known: {', '.join(FLOATS)}")
            return {**tensors, SCALES: scales.to(torch.float32)}

        return ForeignLayer("fine-grained-fp8", spec, dtype, ("weight", SCALES), convert, (SCALES,))

    return layer


def _names(config: ConfigReader, key: str) -> list[str]:
    names = config.raw(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise config.wrong(key, names, "it must be a list of names")
    return names
