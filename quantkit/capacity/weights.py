"""Counts what a model's weights take at run time for each recipe, without reading a weight.

What kernels hold isn't what files hold (2- and 3-bit integers are multiplied from 4 bits), so a few rows of
every kind of layer are packed by the kernel that would run it, and counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quantkit.checkpoint.manifest import LayerRow
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.checkpoint.quantization_config import KEYS
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.formats.dtypes import FLOATS, dtype_name
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import EMBEDDING, linear_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import dtype_of
from quantkit.ops import cpu_machine, cpu_weight
from quantkit.ops.cpu_linear import CpuKernel
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.dispatch import choose
from quantkit.ops.linear import query_for
from quantkit.plugins.manager import registry
from quantkit.quantization.planning.plan import make_plan, with_own_head
from quantkit.quantization.recipe import load_recipe
from quantkit.quantization.transforms.apply import transformed
from quantkit.runtime.cpu.model import reason_against
from quantkit.runtime.loader import label_of
from quantkit.sources.base import ModelSource, file_bytes, quantized_types

KEPT = "none"
"""What the weights are called that stay as they are, as in ``--kv none``."""
ROWS = 64
"""Of a layer that are packed for counting: whole stripes, and whole rings of a trellis."""


@dataclass(frozen=True)
class LinearMemory:
    """One Linear, or the embedding, in memory.

    Attributes:
        row: what it is.
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
class WeightOption:
    """One way to have a model's weights.

    Attributes:
        name: the recipe's, :data:`KEPT`, or what was done to a checkpoint.
        description: the recipe's.
        config: of the model, as it is then: its head may have become one of its own.
        dtype: of activations and plain weights.
        file_bytes: of the weight files.
        layers: the embedding, if a product reads it or it is quantized, and every Linear and head.
        other_bytes: held beside these: a looked-up embedding, norms, biases.
        fallback_reason: why the model isn't run as one program on a CPU; ``None`` if it is.
        recipe: what ``--recipe`` must say to make them; ``None``: nothing has to be made.
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
        """Bytes of all weights in memory."""
        return self.other_bytes + sum(layer.bytes for layer in self.layers)

    @property
    def multiplied(self) -> tuple[LinearMemory, ...]:
        """What a decode step multiplies by: Linears and the head, which may be the embedding."""
        tied = self.config.tie_word_embeddings
        return tuple(layer for layer in self.layers if tied or layer.name != EMBEDDING)

    def read_bytes(self, batch: int) -> float:
        """Bytes that a decode step of so many tokens reads; of experts, those that as many tokens reach if
        a router chooses evenly."""
        return sum(layer.read * self._reached(layer, batch) for layer in self.multiplied)

    def multiplications(self) -> float:
        """Multiplications for one token, without attention."""
        return sum(math.prod(layer.shape) * self._reached(layer, 1) for layer in self.multiplied)

    def sample(self, rows: int) -> CpuWeight:
        """``rows`` rows of the largest layer, packed for a CPU kernel; in bfloat16 if none takes it."""
        row = max(self.multiplied, key=lambda layer: layer.read).row
        kind = row.format, row.spec, row.shape[1]
        packed = _packed(*kind, row.dtype, self.dtype, rows)
        return packed or cpu_weight.pack_plain(torch.zeros(rows, row.shape[1], dtype=torch.bfloat16))

    def _reached(self, layer: LinearMemory, tokens: int) -> float:
        experts = self.config.experts
        if experts is None or ".experts." not in layer.name:
            return 1.0
        return float(1.0 - (1.0 - experts.chosen / experts.count) ** tokens)


def kept(source: ModelSource, dtype: str = "auto") -> WeightOption:
    """The model as it is, in the dtype that it is run in: its own, or another.

    Raises:
        QuantkitError: it isn't known, or has a dtype that isn't.
    """
    config, kind = parse_config(source.config()), dtype_of(source.config(), dtype)
    name = dtype_name(kind)
    rows = [LayerRow(name=slot.name, shape=(slot.out_features, slot.in_features), dtype=name,
                     bits=8.0 * kind.itemsize, bytes=slot.out_features * slot.in_features * kind.itemsize)
            for slot in linear_slots(config)]
    total = kind.itemsize * sum(map(math.prod, tensor_shapes(config).values()))
    types = quantized_types(source)
    how = f"{', '.join(types)}, run in {name}" if types else f"in {name}"
    return _weights(KEPT, f"as they are, {how}", config, kind, rows,
                    total - sum(row.bytes for row in rows), file_bytes(source))


def by_recipe(name: str, source: ModelSource) -> WeightOption:
    """What a recipe, named or a file, would make.

    Raises:
        QuantkitError: there is none, it doesn't fit the model, or it leaves a choice to a budget.
    """
    recipe = load_recipe(name)
    seen = with_own_head(recipe, transformed(recipe.transforms, source))
    plan = make_plan(recipe, seen)
    rows = [row.recorded() for row in plan.rows]
    option = _weights(recipe.name, recipe.description, parse_config(seen.config()),
                      dtype_of(seen.config(), "auto"), rows, plan.other_bytes, plan.disk_bytes)
    return dataclasses.replace(option, recipe=name, kv=recipe.kv)


def of_checkpoint(checkpoint: AnyCheckpoint, dtype: str = "auto") -> WeightOption:
    """Those of a checkpoint, run in its own dtype or another; called as the recipe that made it, or after
    what was done.

    Raises:
        QuantkitError: the model isn't known, or has a dtype that isn't.
    """
    manifest = checkpoint.manifest
    label = str(manifest.recipe["name"]) if manifest else label_of(checkpoint.layers)
    config = {k: v for k, v in checkpoint.config().items() if k not in KEYS}
    rows, total = checkpoint.layers, sum(info.nbytes for info in checkpoint.infos.values())
    return _weights(label, "as the checkpoint has them", parse_config(config), dtype_of(config, dtype), rows,
                    total - sum(row.bytes for row in rows), checkpoint.file_bytes)


def _weights(name: str, description: str, config: ModelConfig, dtype: torch.dtype, rows: Sequence[LayerRow],
             other: int, file_bytes: int) -> WeightOption:
    rows = list(rows)
    if config.tie_word_embeddings and all(row.name != EMBEDDING for row in rows):
        # the head is the embedding, which is one of the other tensors
        size = config.vocab_size * config.hidden_size * dtype.itemsize
        rows.insert(0, LayerRow(name=EMBEDDING, shape=(config.vocab_size, config.hidden_size), bytes=size,
                                dtype=dtype_name(dtype), bits=8.0 * dtype.itemsize))
        other -= size
    samples = {row.name: _sample(row.format, row.spec, row.shape[1], row.dtype) for row in rows}
    reason = reason_against(config, dtype, torch.device("cpu"),
                      {name: tensor for name, tensor in samples.items() if tensor is not None})
    kernels = cpu_machine.unavailable() is None
    layers = [_held(row, _packed(row.format, row.spec, row.shape[1], row.dtype, dtype) if kernels else None)
              for row in rows]
    return WeightOption(name, description, config, dtype, file_bytes, tuple(layers), other, reason)


def _held(row: LayerRow, packed: CpuWeight | None) -> LinearMemory:
    """A layer in memory: packed, or as it is stored if no kernel of ours multiplies it."""
    if packed is None:
        return LinearMemory(row, row.bytes, row.bytes)
    full = dataclasses.replace(packed, shape=row.shape)
    size = packed.nbytes // packed.stripes * full.stripes
    return LinearMemory(row, size, size, full)


@functools.lru_cache(maxsize=256)
def _packed(form: str | None, spec: QuantSpec | None, columns: int, stored: str, dtype: torch.dtype,
            rows: int = ROWS) -> CpuWeight | None:
    sample = _sample(form, spec, columns, stored, rows)
    if sample is None:
        return cpu_weight.pack_plain(torch.zeros(rows, columns, dtype=dtype))
    kernel = choose(query_for(sample, dtype, torch.device("cpu"), "decode")).kernel
    return kernel.prepare(sample) if isinstance(kernel, CpuKernel) else None


@functools.lru_cache(maxsize=256)
def _sample(form: str | None, spec: QuantSpec | None, columns: int, dtype: str,
            rows: int = ROWS) -> QuantizedTensor | None:
    """A few rows of such a layer, of level 0 and scale 1; ``None`` of a plain one."""
    if form is None or spec is None:
        return None
    shape = (rows, columns)
    scales = spec.scale_shape(shape)
    zeros = torch.zeros(scales) if spec.kind == "int" and not spec.symmetric else None
    outer = spec.outer_shape(shape)
    numbers = None if outer is None else torch.ones(outer)
    codes = Codes(spec, torch.zeros(shape, dtype=torch.uint8), torch.ones(scales),
                  zeros.to(torch.uint8) if zeros is not None and not spec.minimum else None,
                  minimum=zeros if spec.minimum else None, outer=numbers,
                  outer_minimum=numbers if spec.minimum else None,
                  input_factor=torch.ones(1, 1) if spec.static_inputs else None)
    quantized: QuantizedTensor = registry("formats").get(form).pack(codes, FLOATS[dtype])
    return quantized
