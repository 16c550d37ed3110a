"""gpt-oss files, which keep all experts of a layer in one tensor, seen as if each expert had its own.

=========================  ====================================  ==========================================
tensor of the file         shape                                 an expert's tensors
=========================  ====================================  ==========================================
``gate_up_proj``           ``[experts, hidden, 2 · size]``       ``weight [size, hidden]`` of gate and up
``down_proj``              ``[experts, size, hidden]``           ``weight [hidden, size]`` of down
``…_bias``                 ``[experts, out]``                    ``bias``
``…_blocks`` (MXFP4)       uint8 ``[experts, out, in/32, 16]``   ``blocks [out, in/32, 16]``
``…_scales`` (MXFP4)       uint8 ``[experts, out, in/32]``       ``scales [out, in/32]``
=========================  ====================================  ==========================================

Gate and up lie interleaved: gate's rows (of a plain weight, columns) are 0, 2, …, up's 1, 3, ….

https://huggingface.co/docs/transformers/model_doc/gpt_oss
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from quantkit.sources.base import ModelSource, TensorInfo, prefetch
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SourceError

FAMILIES = ("gpt_oss",)
"""By ``model_type``: whose files are such."""
_FUSED = re.compile(r"(model\.layers\.(?:0|[1-9]\d{0,4})\.mlp\.experts)\.(gate_up|down)_proj(_[a-z]+)?")
_PARTS = {None: "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_DIMENSIONS = {"weight": 3, "bias": 2, "blocks": 4, "scales": 3}
_MAX_EXPERTS = 4096
_MAX_TENSORS = 1_200_000
"""Tensors of single experts, all kinds together; more is a malformed file, not a model."""


class _Place(NamedTuple):
    """Where an expert's tensor is: in which of the file's, and which part of it."""

    fused: str
    expert: int
    part: str
    first: int
    """Of interleaved rows; -1 where they aren't."""


def split_experts(source: ModelSource) -> ModelSource:
    """The source, or its experts one by one where the file keeps them together.

    Raises:
        SourceError: a tensor of experts has another shape than the config's number of experts allows, or
            there are experts of both kinds.
    """
    if source.config().get("model_type") not in FAMILIES:
        return source
    return SplitExpertsSource(source) if any(map(_FUSED.fullmatch, source.tensors())) else source


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate's and up's rows ``[experts, size, …]`` as they lie in a file, ``[experts, 2 · size, …]``."""
    return torch.stack((gate, up), 2).flatten(1, 2)


class SplitExpertsSource(SourceWrapper):
    """What isn't named here is the source's. An expert is read when it is asked for, and no other.

    Args:
        source: the source of a model whose ``model_type`` is in :data:`FAMILIES`.

    Raises:
        SourceError: as :func:`split_experts`.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        self._places: dict[str, _Place] = {}
        self._infos: dict[str, TensorInfo] = {}
        config = source.config()
        count = config.get("num_local_experts", config.get("num_experts"))
        for name, info in source.tensors().items():
            for new, place in self._parts(name, info, count):
                if new in self._infos:
                    raise SourceError(f"{self.uri} has the tensor {new!r} twice",
                                      why=f"by itself and as a part of {place.fused if place else name!r}",
                                      next="download the model again")
                if place is not None:
                    self._places[new] = place
                shape = info.shape if place is None else _shape(info.shape, place)
                self._infos[new] = TensorInfo(new, shape, info.dtype)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, those of experts one by one."""
        return self._infos

    def tensor(self, name: str) -> torch.Tensor:
        """One of them; an expert's is in memory of its own. Raises SourceError for an unknown name."""
        if name not in self._infos:
            raise SourceError(f"{self.uri} has no tensor {name[:120]!r}")
        if (place := self._places.get(name)) is None:
            return self._source.tensor(name)
        expert = self._source.tensor(place.fused)[place.expert]
        if place.part == "weight":
            expert = expert.T
        rows = expert if place.first < 0 else expert[place.first::2]
        return rows.clone(memory_format=torch.contiguous_format)

    def prefetch(self, names: Iterable[str]) -> None:
        """All experts of a layer, for some."""
        prefetch(self._source, dict.fromkeys(map(self._inner, names)))

    def _inner(self, name: str) -> str:
        place = self._places.get(name)
        return name if place is None else place.fused

    def _parts(self, name: str, info: TensorInfo, count: object) -> Iterator[tuple[str, _Place | None]]:
        """What a tensor of the file is here, by name: itself, or parts of it."""
        match = _FUSED.fullmatch(name)
        if match is None or match[3] not in _PARTS:
            yield name, None
            return
        part = _PARTS[match[3]]
        if type(count) is not int or not 0 < count <= _MAX_EXPERTS or info.shape[:1] != (count,) or (
                len(info.shape) != _DIMENSIONS[part]):
            raise SourceError(f"{self.uri}: {name} has shape {list(info.shape)}",
                              why=f"it must have {_DIMENSIONS[part]} dimensions, the first for experts, of "
                                  f"which config.json has {str(count)[:40]}",
                              next="get config.json and the weights from the same place again")
        if len(self._infos) > _MAX_TENSORS:
            raise SourceError(f"{self.uri} has more than {_MAX_TENSORS:,} tensors of experts",
                              why="no model has", next="download the model again")
        inputs = (("gate_proj", 0), ("up_proj", 1)) if match[2] == "gate_up" else (("down_proj", -1),)
        if match[2] == "gate_up" and info.shape[2 if part == "weight" else 1] % 2:
            raise SourceError(f"{self.uri}: {name} has shape {list(info.shape)}",
                              why="gate and up are equally large",
                              next="get config.json and the weights from the same place again")
        for expert in range(count):
            for projection, first in inputs:
                yield f"{match[1]}.{expert}.{projection}.{part}", _Place(name, expert, part, first)


def _shape(fused: tuple[int, ...], place: _Place) -> tuple[int, ...]:
    rows, *others = (fused[2], fused[1]) if place.part == "weight" else fused[1:]
    return (rows if place.first < 0 else rows // 2, *others)
