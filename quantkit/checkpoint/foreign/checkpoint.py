"""A checkpoint without ``quantkit.json``, seen as if it were one of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.foreign import bitsandbytes, compressed_tensors, fine_grained_fp8, mlx, mxfp4
from quantkit.checkpoint.foreign.base import ORIGINAL, Dialect, ForeignLayer, Layers
from quantkit.checkpoint.foreign.gptq_awq import awq_layers, gptq_layers
from quantkit.checkpoint.integrity import packed_fault
from quantkit.checkpoint.manifest import LayerRow, bits_per_weight
from quantkit.checkpoint.quantization_config import stored_quantization
from quantkit.formats.base import Format, QuantizedTensor
from quantkit.formats.dtypes import FLOATS
from quantkit.models.architecture import EMBEDDING, LinearSlot, all_slots, parse_config, tensor_shapes
from quantkit.models.outline import is_known
from quantkit.models.reader import ConfigReader
from quantkit.plugins.manager import registry
from quantkit.sources.base import MappedFile, ModelSource, SourceIdentity, TensorInfo
from quantkit.sources.causal_lm import WRAPPERS, resolve_head
from quantkit.sources.local import LocalSource
from quantkit.sources.split_experts import split_experts
from quantkit.support.errors import CheckpointError, QuantkitError, UnsupportedModelError, did_you_mean

DIALECTS: dict[str, Dialect] = {"gptq": gptq_layers, "awq": awq_layers, "bitsandbytes": bitsandbytes.layers,
                                "compressed-tensors": compressed_tensors.layers,
                                "fp8": fine_grained_fp8.layers, "mlx": mlx.layers, "mxfp4": mxfp4.layers}
"""By ``quant_method``."""
MARKS = {"fp8": (fine_grained_fp8.SCALES,), "compressed-tensors": ("weight_scale",)}
"""Tensors that every quantized Linear has, by the ``quant_method``s that are read of any family."""
MAX_SIDE = 1 << 24


class ForeignCheckpoint:
    """Another tool's checkpoint; has what :class:`~quantkit.checkpoint.reader.Checkpoint` has, but no
    manifest and no hashes to check against.

    The dtype and shape of every tensor are checked when it is opened, the values of a layer when it is read.

    Args:
        folder: with ``config.json`` and safetensors.
        identity: the place that the folder came from, if it wasn't here.

    Attributes:
        path: the place of the folder.
        layers: a row for every Linear; the method is the tool's ``quant_method``.

    Raises:
        CheckpointError: an unknown ``quant_method``, a key or value that changes the maths and isn't
            implemented, or tensors that aren't what the config says.
        SourceError: the files are malformed.
    """

    manifest = None

    def __init__(self, folder: Path, identity: SourceIdentity | None = None) -> None:
        self.path = folder
        self.source = LocalSource(folder, identity.uri if identity else str(folder), identity, quantized=True)
        try:
            self._quantized: dict[str, ForeignLayer] = {}
            self._model: ModelSource = resolve_head(split_experts(self.source))
            self._infos = dict(self._model.tensors())
            self.layers = tuple(self._rows())
            self._shapes = {row.name: row.shape for row in self.layers}
            self._drop_empty_biases()
        except BaseException:
            self.close()
            raise

    def _rows(self) -> list[LayerRow]:
        raw = self._model.config()
        if str(raw.get("model_type")) in WRAPPERS:
            raise CheckpointError(f"{self.path} is a quantized model of images and text",
                                  why="only unquantized multimodal checkpoints are read, as the text model "
                                      "inside", next=ORIGINAL)
        method, layers = self._layers(raw)
        self._known = is_known(raw, self._infos)
        slots = all_slots(parse_config(raw)) if self._known else self._stored_slots(method)
        pairs = [(slot, layers(slot)) for slot in slots]
        return [self._row(slot, method, layer) for slot, layer in pairs if layer or slot.name != EMBEDDING]

    def _stored_slots(self, method: str) -> list[LinearSlot]:
        """Of a family that isn't known, what is quantized by the tensors' names."""
        if method not in MARKS:
            raise CheckpointError(f"{self.path} is quantized by {method}, of a family that isn't known here",
                                  why=f"of such a family {' and '.join(MARKS)} are read", next=ORIGINAL)
        slots = []
        for name in self._infos:
            layer, _, suffix = name.rpartition(".")
            if suffix not in MARKS[method]:
                continue
            if (shape := self._infos.get(f"{layer}.weight_shape")) is not None and shape.shape == (2,):
                sides = [int(side) for side in self._model.tensor(f"{layer}.weight_shape")]
            else:
                sides = list(self._infos[f"{layer}.weight"].shape) if f"{layer}.weight" in self._infos else []
            if len(sides) != 2 or not all(0 < side < MAX_SIDE for side in sides):
                raise CheckpointError(f"layer {layer[:120]} of {self.path} has no shape",
                                      why=f"beside {suffix} there is no matrix, or it is {sides}",
                                      next=ORIGINAL)
            slots.append(LinearSlot(layer, sides[0], sides[1], None, layer))
        inside = {f"{slot.name}.weight" for slot in slots}
        other = next((name for name, info in self._infos.items() if info.dtype == torch.float8_e4m3fn
                      and name not in inside and not name.endswith("_scale")), None)
        if other is not None:
            raise CheckpointError(f"{other[:120]} of {self.path} can't be read",
                                  why="it is stored in fp8 and is no Linear's weight with scales",
                                  next=ORIGINAL)
        return slots

    def _layers(self, raw: dict[str, Any]) -> tuple[str, Layers]:
        quantization = stored_quantization(raw)
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method is None:
            raise CheckpointError(f"{self.path}: config.json doesn't say how the model is quantized",
                                  why="its quantization_config has no quant_method", next=ORIGINAL)
        if not isinstance(method, str) or method not in DIALECTS:
            lost = method == "quantkit"
            raise CheckpointError(
                f"{self.path} is quantized by {method!r}, which can't be read",
                why="its quantkit.json is missing, without which nobody can read it" if lost
                else did_you_mean(str(method), DIALECTS),
                next="copy the checkpoint again from where it came" if lost else ORIGINAL)
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in FLOATS:
            raise CheckpointError(f"config.json has dtype {dtype[:80]!r}", why=f"known: {', '.join(FLOATS)}",
                                  next=ORIGINAL)
        try:
            return method, DIALECTS[method](
                ConfigReader(quantization, f"{self.path}: quantization_config ({method})"), self._infos,
                dtype)
        except UnsupportedModelError as error:
            raise CheckpointError(error.what, why=error.why, next=ORIGINAL) from error

    def _row(self, slot: LinearSlot, method: str, layer: ForeignLayer | None) -> LayerRow:
        shape, name = (slot.out_features, slot.in_features), slot.name
        if layer is None:
            info = self._infos.get(f"{name}.weight")
            if info is None or tuple(info.shape) != shape or info.dtype not in FLOATS.values():
                stored = sorted(n for n in self._infos if n.startswith(f"{name}."))[:5]
                raise CheckpointError(f"layer {name} of {self.path} has no plain weight {list(shape)}",
                                      why=f"by its quantization_config it isn't quantized; it has {stored}",
                                      next="download the checkpoint again")
            bits = 8 * info.nbytes / math.prod(shape)
            return LayerRow(name=name, shape=shape, dtype=str(info.dtype).removeprefix("torch."), bits=bits,
                            bytes=info.nbytes)
        form: Format = registry("formats").get(layer.format)
        if name == EMBEDDING and not hasattr(form, "rows"):
            raise CheckpointError(f"the embedding of {self.path} is quantized by {method}",
                                  why=f"format {form.name} can't give single rows", next=ORIGINAL)
        try:
            layout = form.layout(layer.spec, shape, FLOATS[layer.dtype])
        except QuantkitError as error:
            raise CheckpointError(f"layer {name} of {self.path} can't be read", why=error.why or error.what,
                                  next=ORIGINAL) from error
        self._quantized[name] = layer
        for suffix in layer.stored:
            info = self._infos.pop(f"{name}.{suffix}")
            wanted = layout.get(suffix)
            fits = wanted is not None and (info.dtype, tuple(info.shape)) == wanted
            if not fits and suffix not in layer.rewritten:
                raise CheckpointError(
                    f"tensor {name}.{suffix} of {self.path} is {info.dtype} {list(info.shape)}",
                    why=f"{layer.format} {layer.spec.label()} of a layer {list(shape)} has "
                        + (f"{wanted[0]} {list(wanted[1])} there" if wanted else "no such tensor"),
                    next="download the checkpoint again")
        for suffix, (dtype, size) in layout.items():
            self._infos[f"{name}.{suffix}"] = TensorInfo(f"{name}.{suffix}", size, dtype)
        total = sum(self._infos[f"{name}.{suffix}"].nbytes for suffix in layout)
        return LayerRow(name=name, shape=shape, dtype=layer.dtype, method=method, format=layer.format,
                        spec=layer.spec, bits=8 * total / math.prod(shape), bytes=total)

    def _drop_empty_biases(self) -> None:
        """Some tools store a bias of zeros beside every layer that they quantized."""
        if not self._known:
            return
        known = tensor_shapes(parse_config(self._model.config()))
        for name in self._quantized:
            bias = f"{name}.bias"
            if bias in self._infos and bias not in known and not self._model.tensor(bias).any():
                del self._infos[bias]

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor; those of quantized layers in our layouts."""
        return self._infos

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears over their parameters."""
        return bits_per_weight(self.layers)

    @property
    def file_bytes(self) -> int:
        return self.source.file_bytes

    def config(self) -> dict[str, Any]:
        """``config.json``, ``quantization_config`` included."""
        return self._model.config()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that full name."""
        return name in self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor of the file. Raises QuantkitError for an unknown name."""
        return self._model.tensor(name)

    def quantized(self, layer: str) -> QuantizedTensor | None:
        """The packed weight of a layer in a layout of ours; ``None`` if it isn't quantized.

        Raises:
            CheckpointError: its values can't be right, or its inputs are out of order.
        """
        foreign = self._quantized.get(layer)
        if foreign is None:
            return None
        shape = self._shapes[layer]
        stored = {suffix: self._model.tensor(f"{layer}.{suffix}") for suffix in foreign.stored}
        packed = QuantizedTensor(foreign.format, foreign.spec, shape, FLOATS[foreign.dtype],
                                 foreign.convert(stored))
        layout = registry("formats").get(foreign.format).layout(foreign.spec, shape, packed.dtype)
        try:
            if {k: (t.dtype, tuple(t.shape)) for k, t in packed.tensors.items()} != layout:
                raise CheckpointError("its tensors have other shapes than its spec says")
            if (fault := packed_fault(packed)) is not None:
                raise CheckpointError(fault)
        except CheckpointError as error:
            raise CheckpointError(f"layer {layer} of {self.path}: {error.what}", why=error.why,
                                  next=error.next or "download the checkpoint again") from error
        return packed

    def side_files(self) -> Mapping[str, bytes]:
        """Tokenizer and generation files, by plain name."""
        return self.source.side_files()

    def identity(self) -> SourceIdentity:
        """Which checkpoint it is, with the hashes of its files."""
        return self.source.identity()

    def release(self) -> None:
        """What was read of the files needn't stay in memory."""
        self.source.release()

    def mapped_files(self) -> Sequence[MappedFile]:
        """See :class:`~quantkit.sources.base.ModelSource`."""
        return self.source.mapped_files()

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> ForeignCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
