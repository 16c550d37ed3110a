"""The weights of a GGUF file as this CPU's kernels read them, in a file of the user's cache folder.

To pack blocks takes seconds, to map what was packed nothing. The file is a safetensors file with a tensor of
bytes for each layer, in which the parts of a :class:`~quantkit.ops.cpu_weight.CpuWeight` lie one after
another; the name has a hash of all that it depends on. What it holds can be made anew at any time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.shards import LazyTensor, tensor_chunks
from quantkit.formats.base import QuantizedTensor
from quantkit.ops.cpu_machine import isa
from quantkit.ops.cpu_weight import CpuWeight
from quantkit.ops.stored_weight import QuantizedWeight
from quantkit.runtime.memory.weights import packed_sample
from quantkit.sources.base import BlockSource, TensorInfo
from quantkit.sources.safetensors_file import SafetensorsFile
from quantkit.support.errors import SourceError
from quantkit.support.units import human_bytes

PARTS = ("weights", "scales", "outer", "zeros")
"""Tensors of a packed weight, in the order in which they lie."""
LINE = 64
"""Bytes to whose multiples parts are filled up."""


def packed_weights(source: BlockSource, blocks: Mapping[str, QuantizedTensor], dtype: torch.dtype,
                   packing: Callable[[QuantizedTensor], object]) -> dict[str, CpuWeight]:
    """The weights, mapped from their file, which is written first if it isn't there.

    Args:
        source: the source that has their numbers.
        blocks: the weights by name, without numbers.
        dtype: the dtype of activations.
        packing: called with each weight that has been packed.

    Returns:
        Those by name that a CPU kernel of ours takes; none if they can't be kept: nobody may write there, or
        the disk is full.

    Raises:
        SourceError: the source's file was changed meanwhile.
    """
    from quantkit_kernels.kept import cache_folder, is_ours

    base = cache_folder()
    if base is None or not blocks:
        return {}
    samples = {name: packed_sample(weight.format, weight.spec, weight.shape[1], "bfloat16", dtype)
               for name, weight in blocks.items()}
    like = {name: _like(sample, blocks[name].shape) for name, sample in samples.items() if sample is not None}
    path = base.with_name("packed") / f"{_place(source)}-{_key(source, like)}.safetensors"
    if not path.is_file() or not is_ours(path.stat()):
        try:
            _write(path, source, like, dtype, packing)
        except OSError as error:
            size = human_bytes(sum(weight.nbytes for weight in like.values()))
            warnings.warn(f"weights of {source.uri} are packed at each start: what was packed can't be kept "
                          f"in {path.parent} ({error.strerror or error}), for which {size} are needed; "
                          "QUANTKIT_CACHE=DIR names another folder", stacklevel=2)
            return {}
    try:
        file = SafetensorsFile(path)
        return {name: _taken(weight, file.tensor(name)) for name, weight in like.items()}
    except SourceError:  # damaged: it is made anew at the next start
        path.unlink(missing_ok=True)
        return {}


def _like(sample: CpuWeight, shape: tuple[int, int]) -> CpuWeight:
    """The sample with as many rows as ``shape`` says, without numbers."""
    full = dataclasses.replace(sample, shape=shape)

    def longer(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return torch.empty(tensor.shape[0] * full.stripes // sample.stripes, *tensor.shape[1:],
                           dtype=tensor.dtype, device="meta")

    weights, scales, outer, zeros = (longer(getattr(sample, part)) for part in PARTS)
    assert weights is not None
    return dataclasses.replace(full, weights=weights, scales=scales, outer=outer, zeros=zeros)


def _place(source: BlockSource) -> str:
    """By which files of the same model are known, for others of which there is no use any more."""
    return hashlib.sha256(str(Path(source.uri).absolute()).encode()).hexdigest()[:16]


def _key(source: BlockSource, like: Mapping[str, CpuWeight]) -> str:
    from quantkit_kernels.cpu.compiled import sources_digest

    layers = [(name, weight.kernel.name, weight.shape, weight.nbytes) for name, weight in like.items()]
    content = [__version__, sources_digest(), isa().name, source.fingerprint(), layers]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:40]


def _spans(weight: CpuWeight) -> dict[str, tuple[torch.Tensor, int, int]]:
    """Each part with its first and last byte in the layer's tensor."""
    spans, end = {}, 0
    for part in PARTS:
        if (tensor := getattr(weight, part)) is not None:
            spans[part] = tensor, end, end + tensor.nbytes
            end += tensor.nbytes + -tensor.nbytes % LINE
    return spans


def _size(weight: CpuWeight) -> int:
    last = max(end for _, _, end in _spans(weight).values())
    return last + -last % LINE


def _taken(like: CpuWeight, data: torch.Tensor) -> CpuWeight:
    """The weight whose parts lie in ``data``."""
    if tuple(data.shape) != (_size(like),):
        raise SourceError("a layer has another size than its weight")
    parts: dict[str, Any] = {part: data[begin:end].view(tensor.dtype).view(tensor.shape)
                             for part, (tensor, begin, end) in _spans(like).items()}
    return dataclasses.replace(like, **parts)


def _write(path: Path, source: BlockSource, like: Mapping[str, CpuWeight], dtype: torch.dtype,
           packing: Callable[[QuantizedTensor], object]) -> None:
    """Whoever reads sees all of it or nothing, also while another process writes it too. Files of the same
    model that were made of other bytes or by other kernels go.

    Raises:
        OSError: it can't be written.
        SourceError: the source's file was changed meanwhile.
    """
    def packed(name: str) -> torch.Tensor:
        stored = source.quantized(name)
        weight = QuantizedWeight(stored).packed(dtype)
        assert isinstance(weight, CpuWeight) and weight.kernel.name == like[name].kernel.name
        data = torch.zeros(_size(weight), dtype=torch.uint8)
        for tensor, begin, end in _spans(weight).values():
            data[begin:end] = tensor.reshape(-1).view(torch.uint8)
        packing(stored)
        return data

    lazy = {name: LazyTensor(TensorInfo(name, (_size(weight),), torch.uint8), functools.partial(packed, name))
            for name, weight in like.items()}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in tensor_chunks(lazy):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        source.fingerprint()
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    for other in path.parent.glob(f"{path.name.partition('-')[0]}-*.safetensors"):
        if other != path:
            other.unlink(missing_ok=True)
