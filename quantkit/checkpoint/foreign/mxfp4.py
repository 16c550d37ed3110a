"""gpt-oss as OpenAI publishes it (``quant_method: mxfp4``): experts in MXFP4, everything else plain.

A layer's experts are one tensor each of ``…_blocks`` and ``…_scales``, which
:mod:`~quantkit.sources.split_experts` takes apart: of an expert ``blocks`` uint8 ``[out, in/32, 16]``, two
codes a byte with the earlier one in the low half, and ``scales`` uint8 ``[out, in/32]``, powers of 2 (e8m0).
Those are the bytes of ``mxfp4-pack-quantized``; no code changes.

What ``modules_to_not_convert`` names isn't quantized; ``*`` there stands for any part between two dots. Only
experts are ever quantized, whatever else isn't named.

https://huggingface.co/docs/transformers/quantization/mxfp4
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from quantkit.checkpoint.foreign.base import (
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
)
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import EXPERT, LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

SIZE = 32
"""Weights that share a scale."""
STORED = ("blocks", "scales")
KEPT = "modules_to_not_convert"
HARMLESS = frozenset({"quant_method", "dequantize"})
_NAME = re.compile(r"(\w+|\*)(\.(\w+|\*))*")
_LONGEST, _MANY = 200, 10_000
"""Of a name in :data:`KEPT`, and of the list."""


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    kept = _kept(config)
    config.finish(HARMLESS, {})
    if not any(EXPERT in name and name.endswith(f".{STORED[0]}") for name in infos):
        raise config.wrong("quant_method", "mxfp4", "the experts of gpt_oss models are read, and there "
                                                    "are none in MXFP4")
    spec = QuantSpec(kind="fp", bits=4, granularity=Granularity(strategy="group", size=SIZE),
                     scale_dtype="e8m0")

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        stored = [suffix for suffix in STORED if f"{slot.name}.{suffix}" in infos]
        if EXPERT not in slot.name or kept(slot.name.partition(EXPERT)[0] + EXPERT[:-1]):
            if stored:
                raise contradiction(slot, f"'{KEPT}'")
            return None
        check_stored(slot, infos, *STORED)
        if f"{slot.name}.weight" in infos:
            raise CheckpointError(f"{slot.name} is stored twice, plain and quantized",
                                  why="readers would disagree about the layer",
                                  next="download the checkpoint again")
        _check_shapes(slot, infos)
        return ForeignLayer("mxfp4-pack-quantized", spec, dtype, STORED, _packed, STORED)

    return layer


def _packed(tensors: Tensors) -> Tensors:
    """Groups one behind the other, under compressed-tensors' names."""
    return {"weight_packed": tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}


def _check_shapes(slot: LinearSlot, infos: Infos) -> None:
    rows, groups = slot.out_features, slot.in_features // SIZE
    for suffix, shape in (("blocks", (rows, groups, SIZE // 2)), ("scales", (rows, groups))):
        info = infos[f"{slot.name}.{suffix}"]
        if (info.dtype, tuple(info.shape)) != (torch.uint8, shape):
            raise CheckpointError(f"{suffix} of {slot.name} is {info.dtype} {list(info.shape)}",
                                  why=f"of [{rows}, {slot.in_features}] in MXFP4 it is uint8 {list(shape)}",
                                  next="download the checkpoint again")


def _kept(config: ConfigReader) -> Callable[[str], bool]:
    """Tells whether a module is in the list, or inside of one that is.

    Raises:
        UnsupportedModelError: an entry is no name, in which ``*`` may stand for a part.
    """
    names = config.raw(KEPT, [])
    if not isinstance(names, list) or len(names) > _MANY or not all(
            isinstance(name, str) and len(name) <= _LONGEST and _NAME.fullmatch(name) for name in names):
        raise config.wrong(KEPT, names, "it must be a list of names, in which * may stand for a part")
    patterns = [name.split(".") for name in dict.fromkeys(names)]

    def kept(module: str) -> bool:
        parts = module.split(".")
        return any(len(pattern) <= len(parts) and all(
            name in ("*", part) for name, part in zip(pattern, parts)) for pattern in patterns)

    return kept
