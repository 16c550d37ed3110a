"""A checkpoint as a source of the plain weights that its file stands for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.manifest import MANIFEST
from quantkit.checkpoint.quantization_config import KEYS
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.base import Format
from quantkit.formats.dtypes import FLOATS
from quantkit.models.outline import is_known
from quantkit.ops.packing import dequantize
from quantkit.plugins.manager import registry
from quantkit.sources.base import ModelSource, QuantizedError, SourceIdentity, TensorInfo, TensorStorage
from quantkit.sources.local import LocalSource
from quantkit.sources.open import open_source
from quantkit.sources.split_experts import LAYOUTS, joined_experts


class DequantizedCheckpoint:
    """See the module's docstring.

    Args:
        checkpoint: ours or another tool's; closed with this.
        uri: its name.
    """

    def __init__(self, checkpoint: Checkpoint | ForeignCheckpoint, uri: str) -> None:
        self.uri, self._checkpoint = uri, checkpoint
        self._rows = {row.name: row for row in checkpoint.layers if row.spec is not None}
        self._infos = {name: info for name, info in checkpoint.infos.items()
                       if name.endswith(".bias") or self._layer(name) is None}
        for row in self._rows.values():
            self._infos[f"{row.name}.weight"] = TensorInfo(f"{row.name}.weight", row.shape, FLOATS[row.dtype])

    def _layer(self, tensor: str) -> str | None:
        """The quantized layer that a tensor of the file is a part of."""
        name = tensor
        while name := name.rpartition(".")[0]:
            if name in self._rows:
                return name
        return None

    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self._checkpoint.config().items() if key not in KEYS}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One of them; float32 where a layer of ours is quantized, in the dtype that :meth:`tensors` says
        where another tool's is. Raises CheckpointError: it isn't there, or can't be right."""
        layer, _, part = name.rpartition(".")
        weight = self._checkpoint.quantized(layer) if part == "weight" else None
        if weight is None:
            return self._checkpoint.tensor(name)
        form: Format = registry("formats").get(weight.format)
        values = dequantize(form, weight)
        return values if isinstance(self._checkpoint, Checkpoint) else values.to(self._infos[name].dtype)

    def stored(self) -> Mapping[str, TensorStorage]:
        """How the file keeps its weights."""
        plain = {name: TensorStorage(str(info.dtype).removeprefix("torch."), info.nbytes)
                 for name, info in self._infos.items()}
        return plain | {f"{row.name}.weight": TensorStorage(str(row.format), row.bytes or 0)
                        for row in self._rows.values()}

    def in_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With experts together where the family's own files have them so."""
        layout = LAYOUTS.get(str(self._checkpoint.config().get("model_type")))
        return dict(tensors) if layout is None else joined_experts(tensors, layout)

    def side_files(self) -> Mapping[str, bytes]:
        return self._checkpoint.side_files()

    def identity(self) -> SourceIdentity:
        if isinstance(self._checkpoint, ForeignCheckpoint):
            return self._checkpoint.identity()
        return SourceIdentity("checkpoint", self.uri)

    @property
    def file_bytes(self) -> int:
        return self._checkpoint.file_bytes

    def release(self) -> None:
        self._checkpoint.release()

    def close(self) -> None:
        self._checkpoint.close()


def is_unknown(opened: ModelSource | Checkpoint | ForeignCheckpoint) -> bool:
    """Whether a model is of a family whose mathematics isn't known here."""
    if isinstance(opened, Checkpoint):
        return opened.manifest.outline is not None
    infos = opened.infos if isinstance(opened, ForeignCheckpoint) else opened.tensors()
    return not is_known(opened.config(), infos)


def open_weights(uri: str, revision: str | None = None) -> ModelSource:
    """The model that a name means; also one that its makers publish in 8 or 4 bits alone, of a family that
    isn't known here: the weights that its file stands for.

    Raises:
        QuantizedError: it is quantized, and of a known family, or by quantkit.
        QuantkitError: it isn't there or can't be read.
    """
    try:
        return open_source(uri, revision)
    except QuantizedError as error:
        if (error.folder / MANIFEST).exists():
            raise
        with closing(LocalSource(error.folder, uri, error.identity, quantized=True)) as source:
            if is_known(source.config(), source.tensors()):
                raise
        return DequantizedCheckpoint(ForeignCheckpoint(error.folder, error.identity), uri)
