"""What a server will take of a machine's memory, told from headers before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.fit.combinations import Combination, Requirements, combine
from quantkit.fit.weights import WeightOption, kept, of_checkpoint
from quantkit.runtime.cpu.system_memory import available_memory
from quantkit.runtime.gpu import memory as gpu_memory
from quantkit.runtime.gpu.model import declines
from quantkit.runtime.kernels import unread
from quantkit.sources.base import ModelSource
from quantkit.spec import KVSpec


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory.

    Attributes:
        name: what it is for.
        bytes: at most.
        how: what bounds it, for people; empty if nothing need be said.
    """

    name: str
    bytes: int
    how: str = ""


@dataclass(frozen=True)
class ServingPlan:
    """What a server takes, and what there is.

    Attributes:
        parts: weights first, the KV cache last.
        available: bytes that the process can take; ``None``: not known.
        context: tokens of the longest sequence.
        sequence_bytes: bytes of a sequence of that length in the KV cache.
        sequences: that decode side by side, at most.
        fitting: how many of them fit with the weights, if the KV cache grows; ``None``: its size is fixed, or
            it isn't known what is available.
        device: where the memory is.
    """

    parts: tuple[MemoryPart, ...]
    available: int | None
    context: int
    sequence_bytes: int
    sequences: int
    fitting: int | None
    device: torch.device

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.parts[0].bytes

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether all parts fit; if it isn't known what is available, they do."""
        return self.available is None or self.total <= self.available

    @property
    def weights_fit(self) -> bool:
        """Whether at least the weights do."""
        return self.available is None or self.weights <= self.available


def serving_plan(source: ModelSource | AnyCheckpoint, device: torch.device, *, kv: KVSpec | None = None,
                 dtype: str = "auto", sequences: int = 8, kv_bytes: int | None = None,
                 also: Sequence[MemoryPart] = ()) -> ServingPlan | None:
    """Plan the memory of a model that is going to be served.

    Args:
        source: an open checkpoint or source.
        device: where it will run.
        kv: how keys and values are kept; by default as the checkpoint says.
        dtype: of activations, as for :func:`~quantkit.runtime.loader.load`.
        sequences: that decode side by side, at most.
        kv_bytes: what the KV cache may take; ``None``: it grows, and on a GPU it takes what is left.
        also: other parts.

    Returns:
        The plan; ``None`` for a model that can't be counted, of which loading says what is wrong with it.

    Raises:
        UsageError: the KV setting doesn't fit the model.
    """
    manifest = None
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            weights, manifest = of_checkpoint(source, dtype), source.manifest
        else:
            weights = kept(source, dtype)
    except QuantkitError:
        return None
    if kv is None:
        kv = KVSpec() if manifest is None else manifest.kv
    gpu = device.type == "cuda"
    available = torch.cuda.mem_get_info(device)[0] if gpu else available_memory()
    context = weights.config.max_position_embeddings
    chosen, = combine([(weights, kv)], Requirements(context, sequences, available or 0))
    fixed = _gpu_parts(weights, device) if gpu else _cpu_parts(chosen)
    fixed += also
    taken, fitting = sum(part.bytes for part in fixed), None
    cache = chosen.kv_bytes + chosen.spare_bytes
    if kv_bytes is not None:
        part = MemoryPart("KV cache", min(kv_bytes, cache), "--kv-memory")
    elif gpu:
        part = MemoryPart("KV cache", min(cache, max(0, (available or 0) - taken)), "what is left")
    else:
        part = MemoryPart("KV cache", cache)
        if available is not None:
            left = available - sum(part.bytes for part in also)
            fitting = chosen.at(memory=left).most_sequences()
    return ServingPlan((*fixed, part), available, context, chosen.footprint.sequence_bytes, sequences,
                       fitting, device)


def _cpu_parts(chosen: Combination) -> list[MemoryPart]:
    return [MemoryPart("weights", chosen.weights.bytes), MemoryPart("runtime", sum(chosen.scratch.values()))]


def _gpu_parts(weights: WeightOption, device: torch.device) -> list[MemoryPart]:
    """As :func:`quantkit.runtime.gpu.memory.check` counts before it loads."""
    config, dtype = weights.config, weights.dtype
    quantized = {layer.name: unread(layer.row.format, layer.row.spec, layer.shape, layer.row.dtype)
                 for layer in weights.layers if layer.row.format is not None and layer.row.spec is not None}
    size = weights.file_bytes
    if declines(config, dtype, device, quantized) is None:
        size = gpu_memory.weight_bytes(config, dtype, quantized, device)
    return [MemoryPart("weights", size),
            MemoryPart("runtime", gpu_memory.step_bytes(config, dtype) + gpu_memory.LEFT)]
