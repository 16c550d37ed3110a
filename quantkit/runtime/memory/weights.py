"""Counts what a model's weights take at run time, without reading a weight.

What kernels hold isn't what files hold (2- and 3-bit integers are multiplied from 4 bits), so a few rows of
every kind of layer are packed by the kernel that would run it, and counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quantkit.checkpoint.manifest import LayerRow, quantization_label
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.checkpoint.quantization_config import KEYS
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, dtype_name
from quantkit.formats.gguf_blocks import FORMATS
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, LinearSlot, all_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import dtype_of
from quantkit.ops import cpu_machine, cpu_weight
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import choose, has_kernel, query_for
from quantkit.ops.triton_linear import TritonKernel
from quantkit.plugins.manager import registry
from quantkit.sources.base import BlockSource, ModelSource, file_bytes, quantized_types

UNQUANTIZED = "none"
"""What the weights are called that stay as they are, as in ``--kv none``."""
ROWS = 64
"""Of a layer that are packed for counting: whole stripes, and whole rings of a trellis."""
CPU = torch.device("cpu")
TILE_ROWS = 128
"""Rows of a tile of a GPU's kernels: a weight's are filled up to whole ones."""
Declines = Callable[[ModelConfig, torch.dtype, torch.device, Mapping[str, QuantizedTensor]], str | None]
"""Why a runtime doesn't run a model by its quantized weights; ``None`` if it does."""


@dataclass(frozen=True)
class LinearMemory:
    """One Linear, or the embedding, in memory.

    Attributes:
        row: the layer's row of a manifest.
        bytes: all that is held for it.
        read: bytes of these that a product reads.
        packed: a few of its rows as a CPU kernel reads them, if one does; ``shape`` is the whole layer's.
    """

    row: LayerRow
    bytes: int
    read: int
    packed: CpuWeight | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.shape


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """A model's weights in memory, unquantized or by a recipe.

    Attributes:
        name: the recipe's, :data:`UNQUANTIZED`, or what was done to a checkpoint.
        description: the recipe's words.
        config: the model's shape as it is then: its head may have become one of its own.
        dtype: the dtype of activations and plain weights.
        file_bytes: the size of the weight files.
        layers: the embedding, if a product reads it or it is quantized, and every Linear and head.
        other_bytes: held beside these: a looked-up embedding, norms, biases.
        fallback_reason: why no program of our kernels runs the model; ``None`` if one does.
        recipe: the value of ``--recipe`` that makes them; ``None``: nothing has to be made.
        kv: the recipe's own KV setting.
    """

    name: str
    description: str
    config: ModelConfig
    dtype: torch.dtype
    file_bytes: int
    layers: tuple[LinearMemory, ...] = field(repr=False)
    other_bytes: int
    fallback_reason: str | None = None
    recipe: str | None = None
    kv: str | None = None

    @property
    def bytes(self) -> int:
        return self.other_bytes + sum(layer.bytes for layer in self.layers)

    @property
    def quantized(self) -> dict[str, QuantizedTensor]:
        """The quantized layers by name, without their numbers: what kernels are chosen by."""
        weights = {layer.name: weight_of(layer.row) for layer in self.layers}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @property
    def multiplied(self) -> tuple[LinearMemory, ...]:
        """What a decode step multiplies by: Linears and the head, which may be the embedding."""
        tied = self.config.tie_word_embeddings
        return tuple(layer for layer in self.layers if tied or layer.name != EMBEDDING)

    def read_bytes(self, batch: int) -> float:
        """Bytes that a decode step of ``batch`` tokens reads; of experts, those that as many tokens reach if
        a router chooses evenly."""
        return sum(layer.read * self._reached(layer, batch) for layer in self.multiplied)

    def multiplications(self) -> float:
        """Multiplications for one token, without attention."""
        return sum(math.prod(layer.shape) * self._reached(layer, 1) for layer in self.multiplied)

    def _reached(self, layer: LinearMemory, tokens: int) -> float:
        experts = self.config.experts
        if experts is None or ".experts." not in layer.name:
            return 1.0
        return float(1.0 - (1.0 - experts.chosen / experts.count) ** tokens)


def weight_of(row: LayerRow) -> QuantizedTensor | None:
    """The quantized weight of a row without its numbers: what kernels are chosen by; ``None`` of a plain
    one."""
    if row.format is None or row.spec is None:
        return None
    return QuantizedTensor(row.format, row.spec, row.shape, FLOATS[row.dtype], {})


def stored_blocks(source: ModelSource, config: ModelConfig, dtype: torch.dtype,
                  device: torch.device) -> dict[str, QuantizedTensor]:
    """The weights by which a model is run as its file has them, by name, without their numbers: those of a
    GGUF file that a kernel takes. All others are plain, or decoded to plain ones when they are loaded."""
    if not isinstance(source, BlockSource):
        return {}
    stored, blocks = source.stored(), {}
    for slot in all_slots(config):
        tensor = stored.get(f"{slot.name}.weight")
        if tensor is not None and (form := FORMATS.get(tensor.type)) is not None:
            shape = slot.out_features, slot.in_features
            numbers = {name: torch.empty(size, dtype=kind, device="meta")
                       for name, (kind, size) in form.layout(form.spec, shape, dtype).items()}
            weight = QuantizedTensor(form.name, form.spec, shape, torch.bfloat16, numbers)
            if has_kernel(weight, dtype, device):
                blocks[slot.name] = weight
    return blocks


def unquantized(source: ModelSource, reason_against: Declines, device: torch.device = CPU,
                dtype: str = "auto") -> ModelWeights:
    """The model as it is, in the dtype that it is run in: its own, or another; a GGUF file by its blocks.

    Raises:
        QuantkitError: it isn't known, or has a dtype that isn't.
    """
    config = parse_config(source.config())
    kind = dtype_of(source.config(), dtype)
    name = dtype_name(kind)
    blocks = stored_blocks(source, config, kind, device)
    rows = [_stored_row(slot, blocks.get(slot.name), kind) for slot in all_slots(config)
            if slot.name in blocks or slot.name != EMBEDDING]
    types = quantized_types(source)
    how = f"in {name}" if not types else ", ".join(types) if blocks else f"{', '.join(types)}, run in {name}"
    return model_weights(UNQUANTIZED, f"as they are, {how}", config, kind, rows,
                         stored_bytes(config, kind, blocks) - sum(row.bytes for row in rows),
                         file_bytes(source), reason_against, device)


def _stored_row(slot: LinearSlot, weight: QuantizedTensor | None, dtype: torch.dtype) -> LayerRow:
    """The row of a layer of a source: quantized as its file has it, or plain."""
    shape = slot.out_features, slot.in_features
    if weight is None:
        return LayerRow(name=slot.name, shape=shape, dtype=dtype_name(dtype), bits=8.0 * dtype.itemsize,
                        bytes=math.prod(shape) * dtype.itemsize)
    return LayerRow(name=slot.name, shape=shape, dtype=dtype_name(weight.dtype), method="gguf",
                    format=weight.format, spec=weight.spec, bits=8 * weight.nbytes / math.prod(shape),
                    bytes=weight.nbytes)


def of_checkpoint(checkpoint: AnyCheckpoint, reason_against: Declines, device: torch.device = CPU,
                  dtype: str = "auto") -> ModelWeights:
    """Those of a checkpoint, run in its own dtype or another; called as the recipe that made it, or after
    what was done.

    Raises:
        QuantkitError: the model isn't known, or has a dtype that isn't.
    """
    manifest = checkpoint.manifest
    label = str(manifest.recipe["name"]) if manifest else quantization_label(checkpoint.layers)
    config = {k: v for k, v in checkpoint.config().items() if k not in KEYS}
    rows = checkpoint.layers
    other = sum(info.nbytes for info in checkpoint.infos.values()) - sum(row.bytes for row in rows)
    return model_weights(label, "as the checkpoint has them", parse_config(config), dtype_of(config, dtype),
                         rows, other, checkpoint.file_bytes, reason_against, device)


def model_weights(name: str, description: str, config: ModelConfig, dtype: torch.dtype,
                  rows: Sequence[LayerRow], other: int, file_bytes: int, reason_against: Declines,
                  device: torch.device = CPU) -> ModelWeights:
    """Count the weights of some layers.

    Args:
        name, description, config, dtype, file_bytes: see :class:`ModelWeights`.
        rows: the rows of its layers.
        other: bytes of all other tensors.
        reason_against: the function of that name of the runtime that would run the model.
    """
    rows = list(rows)
    if config.tie_word_embeddings and all(row.name != EMBEDDING for row in rows):
        # the head is the embedding, which is one of the other tensors
        size = config.vocab_size * config.hidden_size * dtype.itemsize
        rows.insert(0, LayerRow(name=EMBEDDING, shape=(config.vocab_size, config.hidden_size), bytes=size,
                                dtype=dtype_name(dtype), bits=8.0 * dtype.itemsize))
        other -= size
    kernels = cpu_machine.reason_against_kernels() is None
    layers = [_in_memory(row, packed_sample(row.format, row.spec, row.shape[1], row.dtype, dtype)
                         if kernels else None) for row in rows]
    weights = ModelWeights(name, description, config, dtype, file_bytes, tuple(layers), other)
    return dataclasses.replace(weights,
                               fallback_reason=reason_against(config, dtype, device, weights.quantized))


def _in_memory(row: LayerRow, packed: CpuWeight | None) -> LinearMemory:
    """A layer in memory: packed, or as it is stored if no kernel of ours multiplies it."""
    if packed is None:
        return LinearMemory(row, row.bytes, row.bytes)
    full = dataclasses.replace(packed, shape=row.shape)
    size = packed.nbytes // packed.stripes * full.stripes
    return LinearMemory(row, size, size, full)


@functools.lru_cache(maxsize=256)
def packed_sample(form: str | None, spec: QuantSpec | None, columns: int, stored: str,
                  dtype: torch.dtype) -> CpuWeight | None:
    """:data:`ROWS` rows of such a layer, of level 0 and scale 1, as a CPU kernel reads them; ``None`` if none
    does."""
    sample = _sample(form, spec, columns, stored)
    if sample is None:
        return cpu_weight.pack_plain(torch.zeros(ROWS, columns, dtype=dtype))
    kernel = choose(query_for(sample, dtype, CPU, "decode")).kernel
    return kernel.prepare(sample) if isinstance(kernel, CpuKernel) else None


@functools.lru_cache(maxsize=256)
def _sample(form: str | None, spec: QuantSpec | None, columns: int,
            dtype: str) -> QuantizedTensor | None:
    """A few rows of such a layer, of level 0 and scale 1; ``None`` of a plain one."""
    if form is None or spec is None:
        return None
    codes = _codes(spec, (ROWS, columns))
    quantized: QuantizedTensor = registry("formats").get(form).pack(codes, FLOATS[dtype])
    return quantized


def _codes(spec: QuantSpec, shape: tuple[int, int], number: float = 1.0, zero_level: int = 0) -> Codes:
    """Of level 0, with every scale ``number``."""
    outer_shape = spec.outer_shape(shape)
    scale = torch.full(spec.scale_shape(shape), number)
    zero = minimum = None
    if spec.minimum:
        minimum = -scale if zero_level else torch.zeros_like(scale)
    elif spec.kind == "int" and not spec.symmetric:
        zero = torch.full(scale.shape, zero_level, dtype=torch.uint8)
    outer = torch.ones(outer_shape) if outer_shape else None
    return Codes(spec, torch.zeros(shape, dtype=torch.uint8), scale, zero, minimum=minimum, outer=outer,
                 outer_minimum=outer if spec.minimum else None,
                 input_factor=torch.ones(1, 1) if spec.static_inputs else None)


def gpu_packed_bytes(weight: QuantizedTensor, dtype: torch.dtype, device: torch.device) -> int:
    """What a weight takes there in a kernel's order: as 128 rows of nothing do."""
    kernel = choose(query_for(weight, dtype, device, "decode")).kernel
    assert isinstance(kernel, TritonKernel)
    rows, k = weight.shape
    return -(-rows // TILE_ROWS) * _tile_bytes(kernel, weight.spec, kernel.filled(k, device))


@functools.lru_cache(maxsize=256)
def _tile_bytes(kernel: TritonKernel, spec: QuantSpec, k: int) -> int:
    # a third has as many digits as the dtype: kernels keep scales in as few bytes as hold them exactly
    number = 1.0
    if spec.scale_dtype in FLOATS and spec.outer_shape((TILE_ROWS, k)) is None:
        number = float(torch.tensor(1 / 3, dtype=FLOATS[spec.scale_dtype]))
    return kernel.pack(_codes(spec, (TILE_ROWS, k), number, 2**spec.bits - 1)).nbytes


def gpu_weight_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor],
                     device: torch.device) -> int:
    """What all weights take on the device in the kernels' order."""
    weights = sum(gpu_packed_bytes(weight, dtype, device) for weight in quantized.values())
    for name, shape in tensor_shapes(config).items():
        if name.removesuffix(".weight") not in quantized:
            rows = -(-shape[0] // TILE_ROWS) * TILE_ROWS if len(shape) > 1 else shape[0]
            weights += rows * math.prod(shape[1:]) * dtype.itemsize
    return weights


def stored_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor]) -> int:
    """What they take as they are stored, or in ``dtype``."""
    return sum(weight.nbytes for weight in quantized.values()) + sum(
        math.prod(shape) * dtype.itemsize for name, shape in tensor_shapes(config).items()
        if name.removesuffix(".weight") not in quantized)
