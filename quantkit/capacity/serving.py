"""What a server will take of a machine's memory, told from headers before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.capacity.combinations import Combination, Requirements, combine
from quantkit.capacity.scratch import RUNTIME_BYTES
from quantkit.capacity.weights import WeightOption, kept, of_checkpoint
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.kv.spec import KVSpec, setting_of
from quantkit.runtime.cpu.system_memory import available_memory
from quantkit.runtime.gpu import memory as gpu_memory
from quantkit.runtime.gpu.model import reason_against
from quantkit.runtime.kernels import unread
from quantkit.sources.base import ModelSource
from quantkit.support.errors import QuantkitError


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory.

    Attributes:
        name: what it is for.
        bytes: at most.
        how: what bounds it, for people; empty if nothing need be said.
        grows: whether it is taken little by little, by requests.
    """

    name: str
    bytes: int
    how: str = ""
    grows: bool = False


@dataclass(frozen=True)
class ServingPlan:
    """What a server takes, and what there is.

    Attributes:
        parts: weights first, the KV cache last.
        free: bytes that the process could take before it loaded any model; ``None``: not known.
        before: the plans of the models that are loaded before this one.
        context: tokens of the longest sequence.
        sequence_bytes: bytes of a sequence of that length in the KV cache.
        sequences: that decode side by side, at most.
        fitting: how many of them fit with the weights, if the KV cache grows; ``None``: its size is fixed, or
            it isn't known what is available.
        device: where the memory is.
    """

    parts: tuple[MemoryPart, ...]
    free: int | None
    before: tuple[ServingPlan, ...]
    context: int
    sequence_bytes: int
    sequences: int
    fitting: int | None
    device: torch.device

    @property
    def available(self) -> int | None:
        """Bytes that the models before this one always leave; ``None``: not known."""
        return None if self.free is None else max(0, self.free - sum(plan.total for plan in self.before))

    @property
    def available_now(self) -> int | None:
        """Bytes that they leave as long as no request comes; ``None``: not known."""
        return None if self.free is None else max(0, self.free - sum(plan.reserved for plan in self.before))

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.parts[0].bytes

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def reserved(self) -> int:
        """Bytes of the parts that don't grow."""
        return sum(part.bytes for part in self.parts if not part.grows)

    @property
    def fits(self) -> bool:
        """Whether all parts fit; if it isn't known what is available, they do."""
        return self.available is None or self.total <= self.available

    @property
    def weights_fit(self) -> bool:
        """Whether at least the weights do, before any request."""
        return self.available_now is None or self.weights <= self.available_now


def free_memory(device: torch.device) -> int | None:
    """Bytes on a device that this process can take now; ``None``: not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def serving_plan(source: ModelSource | AnyCheckpoint, device: torch.device, free: int | None, *,
                 before: Sequence[ServingPlan] = (), kv: KVSpec | None = None, dtype: str = "auto",
                 sequences: int = 8, kv_bytes: int | None = None,
                 also: Sequence[MemoryPart] = ()) -> ServingPlan | None:
    """Plan the memory of a model that is going to be served.

    Args:
        source: an open checkpoint or source.
        device: where it will run.
        free: of :func:`free_memory`, before any model was loaded.
        before: plans of the models that the same process loads before this one.
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
        kv = KVSpec() if manifest is None else setting_of(manifest.recipe)
    gpu = device.type == "cuda"
    available = None if free is None else max(0, free - sum(plan.total for plan in before))
    context = weights.config.max_position_embeddings
    chosen, = combine([(weights, kv)], Requirements(context, sequences, available or 0))
    shared = RUNTIME_BYTES if before else 0  # one process has one runtime
    fixed = _gpu_parts(weights, device) if gpu else _cpu_parts(chosen, shared)
    fixed += also
    fitting = None
    cache = chosen.kv_bytes + chosen.spare_bytes
    if kv_bytes is not None:
        part = MemoryPart("KV cache", min(kv_bytes, cache), "--kv-memory")
    elif gpu:
        left = (available or 0) - sum(part.bytes for part in fixed)
        part = MemoryPart("KV cache", min(cache, max(0, left)), "what is left")
    else:
        part = MemoryPart("KV cache", cache, grows=True)
        if available is not None:
            left = available + shared - sum(part.bytes for part in also)
            fitting = chosen.at(memory=left).most_sequences()
    return ServingPlan((*fixed, part), free, tuple(before), context, chosen.footprint.sequence_bytes,
                       sequences, fitting, device)


def _cpu_parts(chosen: Combination, shared: int) -> list[MemoryPart]:
    return [MemoryPart("weights", chosen.weights.bytes),
            MemoryPart("runtime", sum(chosen.scratch.values()) - shared)]


def _gpu_parts(weights: WeightOption, device: torch.device) -> list[MemoryPart]:
    """As :func:`quantkit.runtime.gpu.memory.check` counts before it loads."""
    config, dtype = weights.config, weights.dtype
    quantized = {layer.name: unread(layer.row.format, layer.row.spec, layer.shape, layer.row.dtype)
                 for layer in weights.layers if layer.row.format is not None and layer.row.spec is not None}
    size = weights.file_bytes
    if reason_against(config, dtype, device, quantized) is None:
        size = gpu_memory.weight_bytes(config, dtype, quantized, device)
    return [MemoryPart("weights", size),
            MemoryPart("runtime", gpu_memory.step_bytes(config, dtype) + gpu_memory.LEFT)]
