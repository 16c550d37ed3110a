"""A name → a model that runs: a checkpoint, or any source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.manifest import LayerRow, Manifest
from quantkit.checkpoint.open import AnyCheckpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.device import find_device
from quantkit.errors import CheckpointError, UsageError, did_you_mean
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.models.architecture import all_slots, linear_slots, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM, LanguageModel
from quantkit.models.linear import Weights
from quantkit.models.loadable import check_loadable
from quantkit.ops.cpu_linear import CpuWeight, unavailable
from quantkit.ops.linear import pack
from quantkit.runtime.cpu.malloc import trim_heap
from quantkit.runtime.cpu.model import CpuModel, declines
from quantkit.runtime.gpu import memory
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.gpu.model import declines as gpu_declines
from quantkit.sources.base import ModelSource
from quantkit.spec import KVSpec
from quantkit.text.tokenizer import Tokenizer

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
TRIM_EVERY = 1 << 24
"""Bytes of weights after which freed memory goes back to the system."""


class TensorFiles(Protocol):
    """Where plain tensors come from."""

    def tensor(self, name: str) -> torch.Tensor:
        """By its full name."""


@dataclass
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the network; on a CPU, where its kernels are there, as one program.
        config: its shape.
        tokenizer: text ⇄ ids.
        uri: what was loaded.
        label: ``bf16``, or what was done to it: ``gptq int4 g64 sym``.
        manifest: of a checkpoint of quantkit's, else ``None``.
        file_bytes: of all weights as they are stored (for a source: in the dtype it yields).
        bits_per_weight: stored bits of the Linears over their parameters; the embedding, quantized or not
            and tied or not, and norms are not counted.
        weight_bytes: of all weights as they lie in memory, before any kernel repacks them; a file's
            pages that are mapped count.
        fallback_reason: why it isn't run as one program; ``None`` if it is.
    """

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    uri: str
    label: str
    manifest: Manifest | None
    file_bytes: int
    bits_per_weight: float
    weight_bytes: int
    fallback_reason: str | None = None

    @property
    def kv(self) -> KVSpec:
        """How keys and values are kept unless somebody asks otherwise: a checkpoint's recipe says so.

        Raises:
            UsageError: it names a policy or codec that isn't installed.
        """
        return KVSpec() if self.manifest is None else self.manifest.kv

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in."""
        return self.model.dtype


def load(uri: str, *, revision: str | None = None, dtype: str = "auto",
         device: str = "auto") -> LoadedModel:
    """Load a model. Plain weights whose dtype fits are mapped from their file, not copied; those that a CPU
    multiplies are packed one by one.

    Args:
        uri: a checkpoint's folder, or anything a source takes; on the hub, a checkpoint too.
        revision: branch, tag or commit of a model on the hub.
        dtype: of activations and plain weights: ``float32``, ``bfloat16``, ``float16``; ``auto`` takes
            the model's.
        device: where it runs, as torch names it; ``auto`` takes the GPU if there is one.

    Raises:
        QuantkitError: it isn't there, is damaged, or holds a tensor too many or too few.
    """
    if dtype != "auto" and dtype not in FLOATS:
        raise UsageError(f"no dtype is called {dtype!r}", why=did_you_mean(dtype, ["auto", *FLOATS]))
    place = find_device(device)
    found = open_model(uri, revision)
    try:
        if isinstance(found, Checkpoint | ForeignCheckpoint):
            return _checkpoint(found, uri, dtype, place)
        return _source(found, uri, dtype, place)
    finally:
        found.close()


def label_of(rows: Sequence[LayerRow]) -> str:
    """``gptq int4 g64 sym``; several kinds are joined by commas."""
    kinds = dict.fromkeys(f"{row.method} {row.spec.label()}" for row in rows if row.method and row.spec)
    return ", ".join(kinds) or "unquantized"


def _source(source: ModelSource, uri: str, dtype: str, device: torch.device) -> LoadedModel:
    infos = source.tensors()
    checked = check_loadable(uri, source.config(), infos, source.side_files(), dtype=dtype)
    config, kind = checked.config, checked.dtype
    model, reason = build_model(config, source, infos.__contains__, kind, {}, device, uri)
    slots = [infos[f"{slot.name}.weight"] for slot in linear_slots(config)]
    bits = 8 * sum(i.nbytes for i in slots) / sum(math.prod(i.shape) for i in slots)
    stored = {i.dtype for i in slots}
    label = SHORT.get(stored.pop(), "mixed") if len(stored) == 1 else "mixed"
    return LoadedModel(model, config, checked.tokenizer, uri, label, None,
                       sum(i.nbytes for i in infos.values()), bits,
                       kind.itemsize * sum(map(math.prod, tensor_shapes(config).values())), reason)


def _checkpoint(checkpoint: AnyCheckpoint, uri: str, dtype: str, device: torch.device) -> LoadedModel:
    checked = check_loadable(uri, checkpoint.config(), checkpoint.infos, checkpoint.side_files(),
                             checkpoint.layers, dtype=dtype, error=CheckpointError)
    config, kind = checked.config, checked.dtype
    packed: dict[str, QuantizedTensor] = {}
    for slot in all_slots(config):
        if (found := checkpoint.quantized(slot.name)) is not None:
            # its dtype stays that of the file, whatever activations have: scales are stored in it
            packed[slot.name] = found
    plain = [shape for name, shape in tensor_shapes(config).items()
             if name.removesuffix(".weight") not in packed]
    model, reason = build_model(config, checkpoint, checkpoint.has, kind, packed, device, uri)
    resident = kind.itemsize * sum(map(math.prod, plain)) + sum(
        t.nbytes for q in packed.values() for t in q.tensors.values())
    return LoadedModel(model, config, checked.tokenizer, uri, label_of(checkpoint.layers),
                       checkpoint.manifest, checkpoint.file_bytes, checkpoint.bits_per_weight, resident,
                       reason)


def choose_runtime(config: ModelConfig, kind: torch.dtype, device: torch.device,
                   packed: Mapping[str, QuantizedTensor]) -> tuple[Literal["gpu", "cpu", "operations"], str
                                                                   | None]:
    """How a model runs: by kernels of a GPU, as one program on a CPU, or operation by operation and why."""
    on_gpu = gpu_declines(config, kind, device, packed)
    if on_gpu is None:
        return "gpu", None
    reason = on_gpu if device.type == "cuda" else declines(config, kind, device, packed)
    return ("cpu", None) if reason is None else ("operations", reason)


def build_model(config: ModelConfig, files: TensorFiles, has: Callable[[str], bool],
           kind: torch.dtype, packed: Mapping[str, QuantizedTensor], device: torch.device,
           uri: str) -> tuple[LanguageModel, str | None]:
    """The network, as one program if this device and these weights have kernels for it; else why not. Either
    way a CPU multiplies by packed weights: what torch does with a row may depend on the others."""
    release = getattr(files, "release", lambda: None)
    way, reason = choose_runtime(config, kind, device, packed)
    memory.check(config, kind, packed, device, uri, way == "gpu")
    if way == "gpu":  # weights are taken from the file's pages a layer at a time
        return GpuModel(CausalLM(config, Weights(files.tensor, has, kind, packed.get)), device, release), None
    if device.type != "cpu" or unavailable() is not None:
        moved = {name: weight.to(device) for name, weight in packed.items()}
        return CausalLM(config, Weights(files.tensor, has, kind, moved.get, device)), reason
    passed = 0

    def pack_and_release(weight: torch.Tensor | QuantizedTensor) -> CpuWeight | QuantizedTensor:
        nonlocal passed
        made = pack(weight, kind, release)
        release()  # what was read of the file: it would be in memory twice
        passed += made.nbytes
        if passed > TRIM_EVERY:
            passed = 0
            trim_heap()
        return made

    weights = Weights(files.tensor, has, kind, packed.get, device, pack_and_release)
    model = CausalLM(config, weights)
    release()
    trim_heap()
    return (CpuModel(model), None) if way == "cpu" else (model, reason)
