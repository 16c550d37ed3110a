"""The tensors of a GGUF file, and their bytes, from those of a checkpoint.

Names, the order of Q's and K's rows and what norms are stored as come from the families' table
(:mod:`quantkit.sources.gguf_families`), read from Hugging Face's side. Rows of quantized weights are moved as
blocks, so they stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.checkpoint.manifest import LayerRow, Manifest
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.export.gguf.blocks import blocks_of, exact_types, reason_against
from quantkit.export.gguf.file import FileTensor
from quantkit.export.layouts import InexactError
from quantkit.formats.dtypes import FLOATS
from quantkit.models.architecture import EMBEDDING, HEAD, layer_of, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.ops import packing
from quantkit.plugins.manager import registry
from quantkit.sources.base import TensorInfo
from quantkit.sources.gguf_families import BARE, EXPERT, TOP, GGUFFamily
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SpecError
from quantkit.support.progress import Listener, ProgressEvent

_PLAIN = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
OUTSIDE = (EMBEDDING, HEAD)
"""Layers that are decoded where no type of llama.cpp's holds them exactly."""
_ROUTER = "ffn_gate_inp"
"""Small, and what it chooses must not depend on rounding: float32, as llama.cpp's converter writes it."""
_NUMBERED = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class PlainModel(SourceWrapper):
    """A model that isn't quantized, as a checkpoint without quantized layers."""

    layers: Sequence[LayerRow] = ()
    manifest: Manifest | None = None

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self.tensors()

    def quantized(self, layer: str) -> None:
        """No layer is."""


Exportable = AnyCheckpoint | PlainModel


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file and where its values come from.

    Attributes:
        file: how the file lists it.
        layers: names of Linears in the checkpoint, without ``.weight``, one below the other; of the experts'
            tensors all experts'.
        suffix: ``weight`` or ``bias``; nothing of tensors that are called like a layer (``…sinks``).
        heads: by which its rows are put into the order of GGUF's RoPE; ``None``: they stay.
        offset: a number that is added to each value.
        index: the number of the model's layer.
    """

    file: FileTensor
    layers: tuple[str, ...]
    suffix: str
    heads: int | None
    offset: float
    index: int | None

    def stored(self, layer: str) -> str:
        """What the checkpoint calls the tensor of one of its layers."""
        return f"{layer}.{self.suffix}" if self.suffix else layer


def planned_tensors(config: ModelConfig, family: GGUFFamily) -> list[PlannedTensor]:
    """All tensors of a model, as float32; :func:`with_types` gives them their types.

    Raises:
        SpecError: the family has no place for one.
    """
    places = {place: part for part, place in family.tensors.items()}
    heads = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    tensors: dict[str, PlannedTensor] = {}
    for full, shape in tensor_shapes(config).items():
        layer, _, suffix = full.rpartition(".") if not full.endswith(tuple(BARE)) else (full, "", "")
        index = layer_of(full, config.num_layers)
        name, part = _ggml_name(layer, index, places)
        if part is None and index is not None:
            raise SpecError(f"GGUF has no place for {full} in a {family.architecture} model",
                            why="llama.cpp's model of this family has no such tensor",
                            next="run it with quantkit, or export it to another layout for vLLM")
        offset = family.norm_offset if layer.endswith("norm") else 0.0
        permuted = family.permuted.get(part or "")
        file = FileTensor(f"{name}.{suffix or 'weight'}", "F32", shape)
        tensor = PlannedTensor(file, (layer,), suffix, heads[permuted] if permuted else None, offset, index)
        if (known := tensors.get(tensor.file.name)) is not None:
            tensor = replace(known, layers=(*known.layers, layer))
        tensors[tensor.file.name] = tensor
    return [_stacked(tensor) for tensor in tensors.values()]


def _ggml_name(layer: str, index: int | None, places: Mapping[str, str]) -> tuple[str, str | None]:
    """GGUF's name without the suffix, and the part of it that is in the families' table."""
    if index is None:
        return next(name for name, place in TOP.items() if place == layer), None
    place = _NUMBERED.sub(EXPERT, layer.split(".", 3)[3])
    part = places.get(place)
    return f"blk.{index}.{part}", part


def _stacked(tensor: PlannedTensor) -> PlannedTensor:
    if not _NUMBERED.search(f"{tensor.layers[0]}."):
        return tensor
    return replace(tensor, file=replace(tensor.file, shape=(len(tensor.layers), *tensor.file.shape)))


def visited(tensors: Sequence[PlannedTensor], checkpoint: Exportable,
            progress: Listener) -> Iterator[PlannedTensor]:
    """Each tensor in its order; the memory of a layer that was read is given back before the next one."""
    last = None
    for number, tensor in enumerate(tensors):
        if tensor.index != last:
            checkpoint.release()
            last = tensor.index
        progress(ProgressEvent(number, len(tensors), tensor.file.name))
        yield tensor


def with_types(tensors: list[PlannedTensor], checkpoint: Exportable,
               progress: Listener) -> list[PlannedTensor]:
    """The same with the type of each: of quantized layers the smallest one that holds them exactly.

    Raises:
        InexactError: there is none for a layer.
        SpecError: experts of a layer have no type in common.
    """
    typed, quantized = [], {row.name for row in checkpoint.layers if row.spec is not None}
    for tensor in visited(tensors, checkpoint, progress):
        common: dict[str, None] | None = None
        for layer in tensor.layers:
            kinds = _types(tensor, layer, checkpoint, layer in quantized)
            common = dict.fromkeys(kinds if common is None else (kind for kind in common if kind in kinds))
            if not common:
                raise SpecError(f"{tensor.file.name} has experts that no type of llama.cpp's holds together",
                                why=f"{layer} could be {' or '.join(kinds)}, others can't; GGUF has one "
                                    "tensor of all experts",
                                next="quantize the original by a recipe that treats all experts of a layer "
                                     "alike")
        assert common
        typed.append(replace(tensor, file=replace(tensor.file, kind=next(iter(common)))))
    return typed


def _types(tensor: PlannedTensor, layer: str, checkpoint: Exportable, quantized: bool) -> tuple[str, ...]:
    if quantized and tensor.suffix == "weight":
        packed = checkpoint.quantized(layer)
        assert packed is not None
        if layer not in OUTSIDE:
            return exact_types(layer, packed)
        try:
            if reason_against(packed.format, packed.spec, packed.shape) is None:
                return exact_types(layer, packed)
        except InexactError:
            pass  # it is written as plain numbers then
        return (_PLAIN[packed.dtype],)
    stored = checkpoint.infos[tensor.stored(layer)].dtype
    if (len(tensor.file.shape) == 1 or tensor.suffix != "weight" or _ROUTER in tensor.file.name
            or stored not in FLOATS.values()):
        return ("F32",)
    return (_PLAIN[stored],)


def tensor_bytes(tensor: PlannedTensor, checkpoint: Exportable) -> Iterator[memoryview]:
    """The values as the file has them, a Linear at a time."""
    for layer in tensor.layers:
        packed = checkpoint.quantized(layer) if tensor.suffix == "weight" else None
        if packed is not None and tensor.file.kind == _PLAIN[packed.dtype]:
            values = packing.dequantize(registry("formats").get(packed.format), packed).to(packed.dtype)
        elif packed is not None:
            values = blocks_of(packed, tensor.file.kind)
        else:
            values = checkpoint.tensor(tensor.stored(layer))
            if tensor.file.kind == "F32":
                values = values.to(torch.float32) + tensor.offset
        if tensor.heads is not None:
            values = values[row_order(len(values), tensor.heads)]
        yield values.contiguous().flatten().view(torch.uint8).numpy().data
    if tensor.file.padding:
        yield memoryview(bytes(tensor.file.padding))


def row_order(rows: int, heads: int) -> torch.Tensor:
    """Which row of a weight comes where in GGUF, int64 ``[rows]``: in each head the first half's and the
    second half's by turns, since GGUF's RoPE turns neighbors."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)
