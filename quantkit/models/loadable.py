"""Checks that a model's files hold exactly the tensors that its ``config.json`` describes.

The same question is asked before a model is quantized or exported, when a checkpoint is verified, and when a
model is loaded. So what is published also loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quantkit.formats.dtypes import FLOATS
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import all_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.ops import packing
from quantkit.plugins.manager import registry
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import QuantkitError, SourceError
from quantkit.text.tokenizer import Tokenizer

PLAIN = (*FLOATS.values(), torch.float64)
"""Dtypes of weights that aren't quantized."""
DERIVED = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints store and that follow from the config."""
HEADS = ("mtp.", "model.mtp_layers.")
"""Beginnings of names of heads that draft further tokens; see docs/drafts.md."""
SHOWN = 5


class LayerRecord(Protocol):
    """What is needed of a layer of a checkpoint."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def format(self) -> str | None: ...
    @property
    def spec(self) -> QuantSpec | None: ...


@dataclass(frozen=True)
class LoadablePlan:
    """What a look at the files gives: the model's shape, the dtype of its activations, its tokenizer."""

    config: ModelConfig
    dtype: torch.dtype
    tokenizer: Tokenizer


def check_loadable(uri: str, hf: Mapping[str, Any], infos: Mapping[str, TensorInfo],
                   files: Mapping[str, bytes], rows: Sequence[LayerRecord] = (), *, dtype: str = "auto",
                   error: type[QuantkitError] = SourceError) -> LoadablePlan:
    """Check all that can be told without reading a weight.

    Args:
        infos: every stored tensor.
        files: the tokenizer's and generation files by name.
        rows: every layer of a checkpoint; those with a format are quantized.
        dtype: the dtype of activations; ``auto``: what ``hf`` says.
        error: the class that is raised if tensors are missing, unused, or of another shape or dtype.

    Raises:
        UnsupportedModelError: the architecture, or a key of the config that changes its maths, isn't known.
        SourceError: the dtype isn't known, or the tokenizer is missing or malformed.
        QuantkitError: of the class ``error``, with the first faults.
    """
    config, kind = parse_config(hf, infos), dtype_of(hf, dtype)
    faults = list(_faults(config, infos, rows))
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise error(f"{uri} doesn't hold the model that its config.json describes: {config.model_type}, "
                    f"{config.num_layers} layers", why="\n".join(faults[:SHOWN] + more),
                    next="get config.json and the weights from the same place again")
    return LoadablePlan(config, kind, Tokenizer(files, hf))


def dtype_of(hf: Mapping[str, Any], dtype: str = "auto") -> torch.dtype:
    """The dtype of activations and plain weights: as asked for, or what ``config.json`` says."""
    if dtype == "auto":
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in FLOATS:
        raise SourceError(f"config.json has dtype {dtype[:80]!r}", why=f"known: {', '.join(FLOATS)}",
                          next="write \"dtype\": \"bfloat16\" there; generate, eval and bench take --dtype")
    return FLOATS[dtype]


def _faults(config: ModelConfig, infos: Mapping[str, TensorInfo],
            rows: Sequence[LayerRecord]) -> Iterator[str]:
    """A sentence for each tensor that is missing, that nothing uses, or that is of another shape or dtype."""
    slots = {slot.name: (slot.out_features, slot.in_features) for slot in all_slots(config)}
    packed = {row.name: row for row in rows if row.spec is not None and row.format is not None}
    needed = {name: shape for name, shape in tensor_shapes(config).items()
              if name.removesuffix(".weight") not in packed}
    parts = {f"{row.name}.{suffix}" for row in packed.values() for suffix in _suffixes(row)}
    for name in sorted((needed.keys() | parts) - infos.keys()):
        yield f"it lacks the tensor {name!r}"
    unused = infos.keys() - needed.keys() - parts
    beyond = f"model.layers.{config.num_layers}."
    heads = (*HEADS, beyond) if f"{beyond}eh_proj.weight" in infos else HEADS
    for name in sorted(unused):
        if not name.endswith(DERIVED) and not name.startswith(heads):
            yield f"it holds a tensor that nothing uses: {name[:120]!r}"
    for name, row in packed.items():
        if name not in slots:
            yield f"it has no layer {name[:120]!r}, which is listed as quantized"
        elif row.shape != slots[name]:
            yield f"layer {name} has shape {list(row.shape)}, by config.json {list(slots[name])}"
    for name, shape in needed.items():
        if (info := infos.get(name)) is None:
            continue
        if tuple(info.shape) != shape:
            yield f"tensor {name} has shape {list(info.shape)}, by config.json {list(shape)}"
        if info.dtype not in PLAIN:
            yield f"tensor {name} is stored as {info.dtype}, which says nothing without a scale"


def _suffixes(row: LayerRecord) -> Sequence[str]:
    assert row.spec is not None and row.format is not None
    return tuple(packing.layout(registry("formats").get(row.format), row.spec, row.shape, FLOATS[row.dtype]))
