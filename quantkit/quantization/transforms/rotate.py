"""Rotates the whole model: the residual stream between its layers, and the values of each head.

An orthogonal matrix ``R`` between layers changes nothing if all that writes there is multiplied by it and
all that reads there by its inverse; RMSNorm keeps lengths, once its weight is part of what reads it. No
channel sticks out after that, of the weights' inputs or of the keys' and values' heads, and nothing is
left to do when the model runs: QuaRot, https://arxiv.org/abs/2404.00456. ``spec.rotation`` does the rest
(before ``down``) while the model runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.models.architecture import linear_slots
from quantkit.models.config import ModelConfig
from quantkit.models.scale_groups import ScaleGroup, scale_groups
from quantkit.ops.hadamard import apply_hadamard
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.transforms.base import Transform
from quantkit.sources.base import ModelSource, TensorInfo
from quantkit.sources.untied import EMBEDDING, HEAD
from quantkit.sources.wrapper import SourceWrapper

NORM = "model.norm.weight"
ROWS = 1 << 14
"""Rows in float32 at a time."""


class RotateOptions(MethodOptions):
    """Options of ``apply_hadamard``.

    Attributes:
        values: rotate each head's values too.
    """

    values: bool = True


class RotatedSource(SourceWrapper):
    """A model whose hidden states are rotated; tensors keep their dtypes. A tied head becomes one of its own,
    since it takes in the last norm and the embedding doesn't.

    Args:
        source: the model.
        config: its shape.
        values: rotate each head's values too.
    """

    def __init__(self, source: ModelSource, config: ModelConfig, values: bool) -> None:
        super().__init__(source)
        self._tied = config.tie_word_embeddings
        self._dim, self._one = config.head_dim, 0.0 if config.offset_norms else 1.0
        self._norms = {NORM}
        self._read_by: dict[str, str] = {HEAD: NORM}
        self._values: dict[str, ScaleGroup] = {}
        self._reads_values: set[str] = set()
        hidden = {f"{slot.name}.weight" for slot in linear_slots(config)}
        for index in range(config.num_layers):
            for seam in scale_groups(config, index):
                readers = {f"{name}.weight" for name in (*seam.readers, seam.router) if name}
                if seam.rows is None:
                    self._norms.add(norm := f"{seam.writer}.weight")
                    self._read_by |= dict.fromkeys(readers, norm)
                elif seam.heads is not None and values:
                    self._values[seam.writer] = seam
                    self._reads_values |= readers
        self._writes = {name.removesuffix(".weight") for name in hidden - set(self._read_by)}

    def config(self) -> dict[str, Any]:
        """The source's, with ``tie_word_embeddings`` false."""
        return {**self._source.config(), "tie_word_embeddings": False}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's, and the head."""
        infos = self._source.tensors()
        if not self._tied or EMBEDDING not in infos:
            return infos
        return {**infos, HEAD: dataclasses.replace(infos[EMBEDDING], name=HEAD)}

    def tensor(self, name: str) -> torch.Tensor:
        """The source's, rotated in float32, in the dtype that it has there."""
        tensor = self._source.tensor(EMBEDDING if name == HEAD and self._tied else name)
        if name in self._norms:
            return torch.full_like(tensor, self._one)
        layer = name.rpartition(".")[0]
        if name == EMBEDDING:
            return _by_rows(tensor, None)
        if name in self._read_by:
            norm = self._source.tensor(self._read_by[name]).float() + 1 - self._one
            tensor = _by_rows(tensor, norm)
        elif layer in self._writes:
            tensor = self._written(name, tensor)
        return self._with_values(tensor, self._values[layer].rows) if layer in self._values else tensor

    def _written(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What adds to the hidden states; of o also its columns, which read the heads' values."""
        exact = tensor.float()
        if name in self._reads_values:
            exact = apply_hadamard(exact.view(exact.shape[0], -1, self._dim)).view(exact.shape)
        # a bias, or a weight's columns
        rotated = apply_hadamard(exact) if exact.dim() == 1 else apply_hadamard(exact.T).T
        return rotated.to(tensor.dtype).contiguous()

    def _with_values(self, tensor: torch.Tensor, rows: tuple[int, int] | None) -> torch.Tensor:
        """The rows (or the bias) that make values, head by head."""
        assert rows is not None
        part, result = slice(*rows), tensor.clone()
        heads = tensor[part].float().unflatten(0, (-1, self._dim))
        result[part] = apply_hadamard(heads.movedim(1, -1)).movedim(-1, 1).flatten(0, 1).to(tensor.dtype)
        return result


def _by_rows(tensor: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    result = torch.empty_like(tensor)
    for start in range(0, tensor.shape[0], ROWS):
        part = tensor[start:start + ROWS].float()
        result[start:start + ROWS] = apply_hadamard(part if norm is None else part * norm).to(tensor.dtype)
    return result


def source(model: ModelSource, config: ModelConfig, options: MethodOptions) -> ModelSource:
    """The model, rotated."""
    assert isinstance(options, RotateOptions)
    return RotatedSource(model, config, options.values)


def refuses(config: ModelConfig) -> str | None:
    """A norm after a layer weighs channels that would no longer be the same ones."""
    if config.sandwich_norms:
        return f"{config.model_type} normalizes what its layers add to the hidden states, channel by channel"
    return None


TRANSFORM = Transform(name="rotate", paper="https://arxiv.org/abs/2404.00456", source=source,
                      options=RotateOptions, refuses=refuses)
