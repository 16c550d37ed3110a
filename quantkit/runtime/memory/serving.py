"""What a model takes while it is served: weights, KV cache and all else, and whether that fits.

It is told from headers, before a weight is read. `quantkit plan`, `quantkit serve-local`, the loader and the
scheduler ask here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import AnyCheckpoint
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.base import QuantizedTensor
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec, setting_of
from quantkit.models.config import ModelConfig
from quantkit.models.interfaces import LanguageModel
from quantkit.runtime.memory import scratch
from quantkit.runtime.memory.kv import Footprint, footprint
from quantkit.runtime.memory.machine import GPU_RUNTIME_BYTES, RUNTIME_BYTES
from quantkit.runtime.memory.weights import (
    Declines,
    ModelWeights,
    gpu_weight_bytes,
    of_checkpoint,
    stored_bytes,
    unquantized,
)
from quantkit.sources.base import ModelSource
from quantkit.support.errors import QuantkitError
from quantkit.support.units import human_bytes

MOST_SEQUENCES = 1 << 20
"""More are not looked for."""


@dataclass(frozen=True)
class Requirements:
    """What has to fit.

    Attributes:
        context: tokens of a sequence, prompt and answer.
        concurrency: sequences at once.
        memory: bytes that there are.
        prompt: tokens of a sequence that are its prompt; ``None``: half. It decides what policies drop.
    """

    context: int
    concurrency: int
    memory: int
    prompt: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context // 2) if self.prompt is None else min(self.prompt, self.context)


@dataclass(frozen=True)
class ModelMemory:
    """A model's weights and KV setting, and all that they need on a CPU.

    Attributes:
        weights, kv: which.
        footprint: the bytes that the cache takes for a sequence.
        requirements: the context, the sequences and the memory that it must fit.
        scratch: everything else by what it is for, bytes.
    """

    weights: ModelWeights
    kv: KVSpec
    footprint: Footprint = field(repr=False)
    requirements: Requirements
    scratch: dict[str, int]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages of all sequences that are in use at the worst moment."""
        return self.footprint.used_bytes(self.requirements.concurrency)

    @property
    def spare_bytes(self) -> int:
        """The most bytes of pages that exist without being in use, and of those that are being moved."""
        count = self.requirements.concurrency
        return self.footprint.allocated_bytes(count) - self.kv_bytes + self.footprint.moving_bytes(count)

    @property
    def total(self) -> int:
        return self.weights.bytes + self.kv_bytes + self.spare_bytes + sum(self.scratch.values())

    @property
    def left(self) -> int:
        """Bytes of memory that nothing needs. If negative, that many bytes are missing."""
        return self.requirements.memory - self.total

    def at(self, **changes: int) -> Self:
        """The same for something else asked: ``context=…``, ``concurrency=…``."""
        requirements = dataclasses.replace(self.requirements, **changes)
        footprint = self.footprint
        if requirements.context != self.requirements.context:
            footprint = kv_footprint(self.weights, self.kv, requirements)
        other = scratch.scratch_bytes(self.weights, footprint, requirements.context, requirements.concurrency)
        return dataclasses.replace(self, footprint=footprint, requirements=requirements, scratch=other)

    def most_sequences(self) -> int:
        """How many sequences fit at this context; 0: none."""
        return most_that_fit(lambda count: self.at(concurrency=count).left >= 0, MOST_SEQUENCES)

    def most_context(self) -> int:
        """The longest context that fits for this number of sequences, up to the model's own; 0: none."""
        limit = self.weights.config.max_position_embeddings
        return most_that_fit(lambda tokens: self.at(context=tokens).left >= 0, limit)


def kv_footprint(weights: ModelWeights, kv: KVSpec, requirements: Requirements) -> Footprint:
    """The KV cache's footprint for a sequence of the required length. Raises UsageError if the setting
    doesn't fit the model."""
    return footprint(weights.config, kv, weights.dtype, requirements.context, requirements.prompt_tokens,
                     scratch.PREFILL_CHUNK)


def most_that_fit(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, where all smaller ones do."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory.

    Attributes:
        name: names its purpose.
        bytes: its size, at most.
        how: the reason for its bound, for people; empty if nothing need be said.
        grows: whether it is taken little by little, by requests.
    """

    name: str
    bytes: int
    how: str = ""
    grows: bool = False


@dataclass(frozen=True)
class ServerMemory:
    """What a model of a server takes, and what there is.

    Attributes:
        parts: weights first, the KV cache last.
        free: bytes that the process could take before it loaded any model; ``None``: not known.
        before: the models that are loaded before this one.
        context: tokens of the longest sequence.
        sequence_bytes: bytes of a sequence of that length in the KV cache.
        sequences: the largest number of sequences that decode side by side.
        fitting: the number of them that fit with the weights, if the KV cache grows; ``None``: its size is
            fixed, or it isn't known what is available.
    """

    parts: tuple[MemoryPart, ...]
    free: int | None
    before: tuple[ServerMemory, ...]
    context: int
    sequence_bytes: int
    sequences: int
    fitting: int | None
    device: torch.device

    @property
    def available(self) -> int | None:
        """Bytes that the models before this one always leave; ``None``: not known."""
        return None if self.free is None else max(0, self.free - sum(model.total for model in self.before))

    @property
    def available_now(self) -> int | None:
        """Bytes that they leave as long as no request comes; ``None``: not known."""
        return None if self.free is None else max(0, self.free - sum(model.reserved for model in self.before))

    @property
    def weights(self) -> int:
        return self.parts[0].bytes

    @property
    def total(self) -> int:
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


def server_memory(source: ModelSource | AnyCheckpoint, device: torch.device, free: int | None,
                  reason_against: Declines, *, before: Sequence[ServerMemory] = (), kv: KVSpec | None = None,
                  dtype: str = "auto", sequences: int = 8, kv_bytes: int | None = None,
                  also: Sequence[MemoryPart] = ()) -> ServerMemory | None:
    """The memory of a model that is going to be served.

    Args:
        source: an open checkpoint or source.
        free: :func:`~quantkit.runtime.memory.machine.free_memory` before any model was loaded.
        reason_against: the function of that name of the runtime for that device.
        before: the models that the same process loads before this one.
        kv: how keys and values are kept; by default as the checkpoint says.
        dtype: the dtype of activations, as for :func:`~quantkit.runtime.loader.load`.
        sequences: the largest number of sequences that decode side by side.
        kv_bytes: a bound of the KV cache; ``None``: it grows, and on a GPU it takes what is left.
        also: other parts that are added.

    Returns:
        ``None`` for a model that can't be counted, of which loading says what is wrong with it.

    Raises:
        UsageError: the KV setting doesn't fit the model.
    """
    manifest = None
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            weights, manifest = of_checkpoint(source, reason_against, device, dtype), source.manifest
        else:
            weights = unquantized(source, reason_against, device, dtype)
    except QuantkitError:
        return None
    if kv is None:
        kv = KVSpec() if manifest is None else setting_of(manifest.recipe)
    gpu = device.type == "cuda"
    available = None if free is None else max(0, free - sum(model.total for model in before))
    requirements = Requirements(weights.config.max_position_embeddings, sequences, available or 0)
    model = ModelMemory(weights, kv, kv_footprint(weights, kv, requirements), requirements, {})
    shared = RUNTIME_BYTES if before else 0  # one process has one runtime
    if gpu:
        fixed = _gpu_parts(weights, device)
    else:
        model = model.at()
        fixed = [MemoryPart("weights", weights.bytes),
                 MemoryPart("runtime", sum(model.scratch.values()) - shared)]
    fixed += also
    fitting = None
    cache = model.kv_bytes + model.spare_bytes
    if kv_bytes is not None:
        part = MemoryPart("KV cache", min(kv_bytes, cache), "--kv-memory")
    elif gpu:
        left = (available or 0) - sum(part.bytes for part in fixed)
        part = MemoryPart("KV cache", min(cache, max(0, left)), "what is left")
    else:
        part = MemoryPart("KV cache", cache, grows=True)
        if available is not None:
            left = available + shared - sum(part.bytes for part in also)
            fitting = model.at(memory=left).most_sequences()
    return ServerMemory((*fixed, part), free, tuple(before), requirements.context,
                        model.footprint.sequence_bytes, sequences, fitting, device)


def _gpu_parts(weights: ModelWeights, device: torch.device) -> list[MemoryPart]:
    """As :func:`check_gpu_memory` counts before a model is loaded."""
    size = weights.file_bytes
    if weights.fallback_reason is None:
        size = gpu_weight_bytes(weights.config, weights.dtype, weights.quantized, device) + (
            scratch.dequantized_bytes(weights.config, weights.dtype))
    step = scratch.gpu_step_bytes(weights.config, weights.dtype)
    return [MemoryPart("weights", size), MemoryPart("runtime", step + GPU_RUNTIME_BYTES)]


def check_gpu_memory(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, QuantizedTensor],
                     device: torch.device, uri: str, ours: bool) -> None:
    """Before anything is loaded.

    Args:
        config, dtype, quantized: of the model.
        uri: the model's name in the error.
        ours: whether kernels of ours will run it, which lay weights out anew.

    Raises:
        QuantkitError: the GPU's free memory isn't enough.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    working = scratch.gpu_step_bytes(config, dtype)
    if ours:
        weights = gpu_weight_bytes(config, dtype, quantized, device)
        working = max(working + scratch.dequantized_bytes(config, dtype), scratch.packing_bytes(config))
    else:
        weights = stored_bytes(config, dtype, quantized)
    working += GPU_RUNTIME_BYTES
    if weights + working > free:
        raise QuantkitError(
            f"{uri} doesn't fit on {device}",
            why=f"its weights take {human_bytes(weights)}, a step or loading {human_bytes(working)}; "
                f"{human_bytes(free)} of {human_bytes(total)} are free",
            next=f"quantkit plan {uri} --memory {free // 10**6}MB, or --device cpu")


def spare_bytes(model: LanguageModel, cache: KVCache, sequences: int, chunk: int) -> int | None:
    """What is left for pages of a cache, now that the model is loaded; ``None`` on a CPU, where nothing is
    planned.

    Args:
        cache: the cache, with its largest number of concurrent sequences.
        sequences: the largest number of concurrent sequences.
        chunk: prompt tokens that go through the model at once.
    """
    if model.device.type != "cuda":
        return None
    config = model.config
    free, _ = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    queries = chunk * config.num_layers * config.num_heads * config.head_dim * model.dtype.itemsize
    return max(0, free + cached - scratch.gpu_step_bytes(config, model.dtype) - GPU_RUNTIME_BYTES
               - scratch.gpu_table_bytes(cache, sequences, config.max_position_embeddings)
               - (queries if cache.policy.query_window else 0))
