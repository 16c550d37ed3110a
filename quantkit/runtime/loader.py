"""Loads a model that runs, from a checkpoint or any source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.integrity import check_files, check_sample
from quantkit.checkpoint.manifest import Manifest, quantization_label
from quantkit.checkpoint.open import AnyCheckpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.kv.spec import KVSpec, setting_of
from quantkit.models.architecture import all_slots, linear_slots, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.interfaces import LanguageModel
from quantkit.models.linear import Weights
from quantkit.models.loadable import check_loadable
from quantkit.ops.cpu_machine import pool, reason_against_kernels, trim_heap
from quantkit.ops.linear_weight import LinearWeight
from quantkit.ops.stored_weight import StoredWeight
from quantkit.runtime.cpu.model import CpuModel
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.kernels import choose_runtime
from quantkit.runtime.memory.serving import check_gpu_memory
from quantkit.runtime.memory.weights import stored_blocks, stored_bytes
from quantkit.runtime.packed_file import packed_weights
from quantkit.sources.base import (
    BlockSource,
    MappedFile,
    ModelSource,
    file_bytes,
    mapped_files,
    quantized_types,
    stored_tensors,
)
from quantkit.support.device import find_device
from quantkit.support.errors import CheckpointError, UsageError, did_you_mean
from quantkit.support.progress import Listener, ProgressEvent, silent
from quantkit.text.tokenizer import Tokenizer

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
MIB = 1 << 20
Stored = TypeVar("Stored", StoredWeight, QuantizedTensor)
TRIM_EVERY = 1 << 24
"""Bytes of weights after which freed memory goes back to the system."""

THREADS_FROM = 1 << 22
"""Numbers in a model's largest Linear from which torch packs with all its threads. Packing a smaller one
takes a millisecond, in which threads cost more than they help; with other work on the cores, many times more.
"""


class TensorFiles(Protocol):
    """Where plain tensors come from."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor with this full name."""


@dataclass
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        model: the network, for the runtime that was chosen.
        tokenizer: text ⇄ ids.
        uri: the name that it was loaded by.
        label: ``bf16``, of a GGUF file ``Q4_K, Q6_K``; or how it was quantized: ``gptq int4 g64``.
        manifest: the manifest of a checkpoint made by quantkit, else ``None``.
        file_bytes: bytes of the weight files; of a source without files, of its tensors.
        bits_per_weight: stored bits of the Linears over their parameters. The embedding, tied or not, and
            norms don't count.
        weight_bytes: bytes of all weights in memory before kernels repack them; mapped pages of a file count.
            Of a decoded GGUF file, what it takes otherwise; 0: who serves it will keep them in another way.
        fallback_reason: why it is run one operation after another; ``None`` if kernels run it.
        decoded: whether it is a GGUF file that is run by 16-bit numbers, though kernels take its blocks.
        files: the files whose pages weights may be.
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
    decoded: bool = False
    files: Sequence[MappedFile] = ()

    @property
    def kv(self) -> KVSpec:
        """The KV setting that is used by default: the one that is saved in the checkpoint.

        Raises:
            UsageError: it names a policy or codec that isn't installed.
        """
        return KVSpec() if self.manifest is None else setting_of(self.manifest.recipe)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def check_files(self) -> None:
        """Raise SourceError if a file was written to whose pages are weights of the model."""
        for file in self.files:
            file.check_unchanged()


def load(uri: str, *, revision: str | None = None, dtype: str = "auto", device: str = "auto",
         verify: bool = False, decoded: bool = False, progress: Listener = silent, loading: Listener = silent,
         on_open: Callable[[ModelSource | AnyCheckpoint, torch.device], object] = lambda source, device: None,
         on_tokenizer: Callable[[Tokenizer], object] = lambda tokenizer: None) -> LoadedModel:
    """Load a model.

    Plain weights with the right dtype are mapped from their file, not copied. Weights that a CPU multiplies
    by are packed one after another. A checkpoint of ours is first checked for damage, in a bounded number of
    bytes: a small one wholly, a large one in places.

    Args:
        uri: a checkpoint's folder, or anything that a source accepts; on the hub, a checkpoint too.
        revision: branch, tag or commit of a model on the hub.
        dtype: the dtype of activations and plain weights, ``float32``, ``bfloat16`` or ``float16``; ``auto``
            takes the model's.
        device: the device, as torch names it; ``auto`` takes the GPU if there is one.
        verify: check all bytes against their hashes before anything is loaded.
        decoded: run a GGUF file by 16-bit numbers that its weights are decoded to, which leaves activations
            as they are, and not by its own blocks: it is what others are compared with.
        progress: told of what is verified.
        loading: told of the weights that are there, in MiB as they are stored.
        on_open: called with what is going to be loaded, and where, before more than headers is read; what it
            raises ends loading.
        on_tokenizer: called with the tokenizer, which is there before a weight is read.

    Raises:
        UsageError: an argument is off, or nothing is recorded that ``verify`` could compare with.
        QuantkitError: the model isn't there, is damaged, or has a tensor too many or too few.
    """
    if dtype != "auto" and dtype not in FLOATS:
        raise UsageError(f"no dtype is called {dtype!r}", why=did_you_mean(dtype, ["auto", *FLOATS]))
    place = find_device(device)
    source = open_model(uri, revision)
    try:
        on_open(source, place)
        if verify and not isinstance(source, Checkpoint):
            raise UsageError(f"{uri} can't be verified", next="leave out --verify",
                             why="only checkpoints of quantkit record the hashes of their files")
        if isinstance(source, Checkpoint):
            if verify:
                check_files(source, progress)
            with nullcontext() if verify else _checked_meanwhile(source):
                loaded = _checkpoint(source, uri, dtype, place, loading, on_tokenizer)
        elif isinstance(source, ForeignCheckpoint):
            loaded = _checkpoint(source, uri, dtype, place, loading, on_tokenizer)
        else:
            loaded = _source(source, uri, dtype, place, loading, on_tokenizer, decoded)
        loaded = replace(loaded, files=mapped_files(source))
        loaded.check_files()
        return loaded
    finally:
        source.close()


@contextmanager
def _checked_meanwhile(checkpoint: Checkpoint) -> Iterator[None]:
    """A thread looks for damage; that is raised rather than what came of it."""
    with ThreadPoolExecutor(1) as threads:
        check = threads.submit(check_sample, checkpoint)
        try:
            yield
        finally:
            check.result()


def load_source(source: ModelSource, device: torch.device) -> LanguageModel:
    """A model's network, from a source that stays open; activations in the model's own dtype.

    Raises:
        QuantkitError: it doesn't fit on the device, or has a tensor too many or too few.
    """
    uri, infos = source.identity().uri, source.tensors()
    checked = check_loadable(uri, source.config(), infos, source.side_files())
    return build_model(checked.config, source, infos.__contains__, checked.dtype, {}, device, uri)[0]


def _source(source: ModelSource, uri: str, dtype: str, device: torch.device, loading: Listener,
            on_tokenizer: Callable[[Tokenizer], object], decoded: bool) -> LoadedModel:
    infos = source.tensors()
    checked = check_loadable(uri, source.config(), infos, source.side_files(), dtype=dtype)
    config, kind = checked.config, checked.dtype
    on_tokenizer(checked.tokenizer)
    blocks = stored_blocks(source, config, kind, device)
    model, reason = build_model(config, source, infos.__contains__, kind, {} if decoded else blocks, device,
                                uri, loading)
    names = [f"{slot.name}.weight" for slot in linear_slots(config)]
    stored, weights = stored_tensors(source), sum(math.prod(infos[name].shape) for name in names)
    bits = 8 * sum(stored[name].nbytes for name in names) / weights
    dtypes = {infos[name].dtype for name in names}
    label = SHORT.get(dtypes.pop(), "mixed") if len(dtypes) == 1 else "mixed"
    if types := quantized_types(source, set(names)):
        label = ", ".join(types) + ("" if blocks else f" as {label}")
    return LoadedModel(model, config, checked.tokenizer, uri, label, None, file_bytes(source), bits,
                       stored_bytes(config, kind, blocks), reason, decoded and bool(blocks))


def _checkpoint(checkpoint: AnyCheckpoint, uri: str, dtype: str, device: torch.device, loading: Listener,
                on_tokenizer: Callable[[Tokenizer], object]) -> LoadedModel:
    checked = check_loadable(uri, checkpoint.config(), checkpoint.infos, checkpoint.side_files(),
                             checkpoint.layers, dtype=dtype, error=CheckpointError)
    config, kind = checked.config, checked.dtype
    on_tokenizer(checked.tokenizer)
    packed: dict[str, QuantizedTensor] = {}
    for slot in all_slots(config):
        if (weight := checkpoint.quantized(slot.name)) is not None:
            # its dtype stays that of the file, whatever activations have: scales are stored in it
            packed[slot.name] = weight
    plain = [shape for name, shape in tensor_shapes(config).items()
             if name.removesuffix(".weight") not in packed]
    model, reason = build_model(config, checkpoint, checkpoint.has, kind, packed, device, uri, loading)
    resident = kind.itemsize * sum(map(math.prod, plain)) + sum(
        t.nbytes for q in packed.values() for t in q.tensors.values())
    return LoadedModel(model, config, checked.tokenizer, uri, quantization_label(checkpoint.layers),
                       checkpoint.manifest, checkpoint.file_bytes, checkpoint.bits_per_weight, resident,
                       reason)


class _LoadedBytes:
    """Counts weights as they are loaded.

    Args:
        total: bytes of all.
        listener: told whenever there are more.
    """

    def __init__(self, total: int, listener: Listener) -> None:
        self._total = total
        self._done = 0
        self._listener = listener
        self._tell()

    def counted(self, weight: Stored) -> Stored:
        """The same weight, which is there now."""
        self._done += weight.nbytes
        self._tell()
        return weight

    def layer(self, config: ModelConfig) -> None:
        """Another layer is there, or embedding and head; about as large as each other."""
        self._done += -(-self._total // (config.num_layers + 1))
        self._tell()

    def finish(self) -> None:
        """All others are there too: tables that are looked up, norms, biases."""
        self._done = self._total
        self._tell()

    def _tell(self) -> None:
        total = max(1, self._total // MIB)
        self._listener(ProgressEvent(min(self._done // MIB, total), total, "weights", unit="MiB"))


def build_model(config: ModelConfig, files: TensorFiles, has: Callable[[str], bool], dtype: torch.dtype,
                quantized: Mapping[str, QuantizedTensor], device: torch.device,
                uri: str, loading: Listener = silent) -> tuple[LanguageModel, str | None]:
    """Build the network for the runtime that :func:`~quantkit.runtime.kernels.choose_runtime` names.

    On a CPU weights are packed whatever the runtime: what torch computes for a row may depend on other rows.

    Args:
        config, dtype: of the model.
        files: where its tensors come from; a :class:`~quantkit.sources.base.BlockSource` has the numbers of
            ``quantized`` too.
        quantized: its quantized weights by name.
        has: whether there is a tensor of a name.
        loading: told of the weights that are there, in MiB as they are stored.

    Returns:
        The network, and why it is run one operation after another; ``None`` if it isn't.

    Raises:
        QuantkitError: it doesn't fit on the device, or a tensor is missing.
    """
    loaded = _LoadedBytes(stored_bytes(config, dtype, quantized), loading)
    release = getattr(files, "release", lambda: None)
    numbers: Callable[[str], QuantizedTensor | None] = quantized.get
    if isinstance(files, BlockSource):
        def numbers(name: str) -> QuantizedTensor | None:
            return files.quantized(name) if name in quantized else None
    choice = choose_runtime(config, dtype, device, quantized)
    check_gpu_memory(config, dtype, quantized, device, uri, choice.runtime == "gpu")
    if choice.runtime == "gpu":  # weights are taken from the file's pages a layer at a time
        weights = Weights(files.tensor, has, dtype, numbers)

        def layer_is_there() -> None:
            release()
            loaded.layer(config)

        return GpuModel(CausalLM(config, weights), device, layer_is_there), None
    if device.type != "cpu" or reason_against_kernels() is not None:
        moved = {name: weight.to(device) for name in quantized if (weight := numbers(name)) is not None}
        return CausalLM(config, Weights(files.tensor, has, dtype, moved.get, device,
                                        loaded.counted)), choice.reason
    packed_bytes = 0

    def pack_and_release(weight: StoredWeight) -> LinearWeight:
        nonlocal packed_bytes
        packed = weight.packed(dtype, release)
        release()  # the file's pages that were read: the weight would be in memory twice
        loaded.counted(weight)
        packed_bytes += packed.nbytes
        if packed_bytes > TRIM_EVERY:
            packed_bytes = 0
            trim_heap()
        return packed

    # the threads that kernels get are as many as torch has now
    threads, _ = torch.get_num_threads(), pool()
    if max(slot.in_features * slot.out_features for slot in linear_slots(config)) < THREADS_FROM:
        torch.set_num_threads(1)
    try:
        ready = (packed_weights(files, quantized, dtype, loaded.counted)
                 if isinstance(files, BlockSource) else {})
        model = CausalLM(config, Weights(files.tensor, has, dtype, numbers, device, pack_and_release, ready))
    finally:
        torch.set_num_threads(threads)
    release()
    trim_heap()
    loaded.finish()
    return (CpuModel(model), None) if choice.runtime == "cpu" else (model, choice.reason)
