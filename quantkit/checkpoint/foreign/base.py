"""The interface of readers for other tools' checkpoints: each translates a layer's description into ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import LIMIT, ConfigReader
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import CheckpointError

ORIGINAL = "get the original model, then: quantkit quantize ORIGINAL --recipe int4 --out OUT"
Infos = Mapping[str, TensorInfo]
Tensors = dict[str, torch.Tensor]


def unchanged(tensors: Tensors) -> Tensors:
    """The file's tensors are the layout's."""
    return tensors


@dataclass(frozen=True)
class ForeignLayer:
    """A quantized layer of another tool.

    Attributes:
        format: the layout of ours that is the same.
        spec: the weight's spec, with ``scale_dtype`` as the file has it.
        dtype: logical dtype of the weight.
        stored: suffixes of the file's tensors that it is made of.
        convert: those tensors → those of the layout, where they differ.
        rewritten: suffixes that ``convert`` makes anew; all others must be as the layout says.
    """

    format: str
    spec: QuantSpec
    dtype: str
    stored: tuple[str, ...]
    convert: Callable[[Tensors], Tensors] = unchanged
    rewritten: tuple[str, ...] = ()


Layers = Callable[[LinearSlot], ForeignLayer | None]
"""A Linear → how it is quantized; ``None`` if it isn't. Raises CheckpointError."""
Dialect = Callable[[ConfigReader, Infos, str], Layers]
"""``(quantization_config, the file's tensors, dtype of the model) → Layers``. Raises UnsupportedModelError
for a key or value that changes the maths and isn't implemented."""


def granularity(size: int) -> Granularity:
    """The granularity of a ``group_size`` as GPTQ and AWQ write it: -1 means one scale per row."""
    return Granularity(strategy="channel") if size == -1 else Granularity(strategy="group", size=size)


def group_size(config: ConfigReader, key: str = "group_size") -> int:
    """A group size, or -1 for a scale a row."""
    value = config.raw(key)
    return -1 if value == -1 else config.integer(key, minimum=2)


def square(config: ConfigReader, key: str) -> int:
    """The size of blocks that are squares. UnsupportedModelError if they are no squares."""
    block = config.raw(key)
    if not isinstance(block, list) or len(block) != 2 or block[0] != block[1] or (
            type(block[0]) is not int or not 2 <= block[0] <= LIMIT):
        raise config.wrong(key, block, "only squares, such as [128, 128], can be read")
    return int(block[0])


def check_stored(slot: LinearSlot, infos: Infos, *suffixes: str) -> None:
    """Raise CheckpointError for a layer without one of these tensors."""
    for suffix in suffixes:
        if f"{slot.name}.{suffix}" not in infos:
            raise CheckpointError(f"{slot.name} has no {suffix}", next="download the checkpoint again",
                                  why="its quantization_config says that it is quantized")


def contradiction(slot: LinearSlot, claim: str) -> CheckpointError:
    """The error for a quantized layer that the config excludes."""
    return CheckpointError(f"{slot.name} is stored quantized, and {claim} says that it isn't",
                           why="readers would disagree about the layer", next="download the checkpoint again")
