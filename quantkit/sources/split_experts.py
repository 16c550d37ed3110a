"""Files that keep all experts of a layer in one tensor, seen as if each expert had its own.

=========================  ====================================  ==========================================
tensor of the file         shape                                 an expert's tensors
=========================  ====================================  ==========================================
``gate_up_proj``           ``[experts, 2 · size, hidden]``       ``weight [size, hidden]`` of gate and up
``down_proj``              ``[experts, hidden, size]``           ``weight [hidden, size]`` of down
``…_bias``                 ``[experts, out]``                    ``bias``
``…_blocks`` (MXFP4)       uint8 ``[experts, out, in/32, 16]``   ``blocks [out, in/32, 16]``
``…_scales`` (MXFP4)       uint8 ``[experts, out, in/32]``       ``scales [out, in/32]``
=========================  ====================================  ==========================================

Some families have a weight's last two sides the other way round. Gate's rows come first and up's behind them;
in gpt-oss's files gate's are 0, 2, …, up's 1, 3, …. Which of these a tensor is can't be told from its shape:
of families that aren't in :data:`LAYOUTS` experts stay together.

https://huggingface.co/docs/transformers/model_doc/gpt_oss
https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from quantkit.sources.base import ModelSource, TensorInfo, in_file, prefetch
from quantkit.sources.wrapper import SourceWrapper
from quantkit.support.errors import SourceError

_LINEARS = {"input": "gate_up_proj", "output": "down_proj"}
_GRANITE = re.compile(r"(?<=\.block_sparse_moe)\.(input|output)_linear\.weight$")


class Layout(NamedTuple):
    """How a family's files keep experts.

    Attributes:
        transposed: whether weights are ``[experts, in, out]``.
        interleaved: whether gate's and up's rows take turns.
        by_shape: files of the family have either; transposed is what doesn't fit otherwise.
        linears: they are called ``input_linear.weight`` and ``output_linear.weight``, as Granite's.
    """

    transposed: bool = False
    interleaved: bool = False
    by_shape: bool = False
    linears: bool = False

    def name(self, stored: str) -> str:
        """What most families call a tensor of the file."""
        match = _GRANITE.search(stored) if self.linears else None
        return stored if match is None else f"{stored[:match.start()]}.experts.{_LINEARS[match[1]]}"

    def stored(self, name: str) -> str:
        """What the file calls it: the inverse of :meth:`name`."""
        for linear, projection in _LINEARS.items():
            if self.linears and name.endswith(f".experts.{projection}"):
                return f"{name.removesuffix(f'.experts.{projection}')}.{linear}_linear.weight"
        return name


FAMILIES = ("gpt_oss",)
"""By ``model_type``: whose experts every engine but ours reads together."""
_TEXT_OF = {"llama4": Layout(transposed=True), "qwen3_vl_moe": Layout(transposed=True, by_shape=True),
            "qwen3_5_moe": Layout(), "gemma4": Layout()}
_GRANITES = ("granitemoe", "granitemoehybrid", "granitemoeshared")
LAYOUTS = {**dict.fromkeys(FAMILIES, Layout(transposed=True, interleaved=True)),
           **dict.fromkeys(_GRANITES, Layout(linears=True)), **_TEXT_OF,
           **{f"{name}_text": layout for name, layout in _TEXT_OF.items()}}
"""By ``model_type``: whose files are such."""
READ_SINGLY = ("llama4", "llama4_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Of these, the families of which transformers, too, reads experts one by one."""
_FUSED = re.compile(r"((?:model\.|model\.language_model\.|language_model\.model\.)layers\."
                    r"(?:0|[1-9]\d{0,4})\.(?:[a-z_]{1,40}\.)?experts)\.(gate_up|down)_proj(_[a-z]+)?")
_SINGLE = re.compile(r"([\w.]{1,200}\.experts)\.(\d{1,5})\.(gate|up|down)_proj\.(weight|bias|blocks|scales)")
_SIDES = {"gate": 0, "up": 1, "down": -1}
_PARTS = {None: "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_ENDS = {part: end or "" for end, part in _PARTS.items()}
_DIMENSIONS = {"weight": 3, "bias": 2, "blocks": 4, "scales": 3}
_MAX_EXPERTS = 4096
_MAX_TENSORS = 1_200_000
"""Tensors of single experts, all kinds together; more is a malformed file, not a model."""


class _Place(NamedTuple):
    """Where an expert's tensor is: in which of the file's, and which part of it."""

    fused: str
    expert: int
    part: str
    side: int
    """0: gate's rows, 1: up's, -1: all."""


def read_together(model_type: str, names: Iterable[str]) -> bool:
    """Whether transformers reads a model's experts only as its family's files have them: together, while
    ``names``, of Linears, has them one by one."""
    together = model_type in LAYOUTS and model_type not in READ_SINGLY
    return together and any(".experts." in name for name in names)


def split_experts(source: ModelSource) -> ModelSource:
    """The source, or its experts one by one where the file keeps them together.

    Raises:
        SourceError: a tensor of experts has another shape than the config's number of experts allows, or
            there are experts of both kinds.
    """
    layout = LAYOUTS.get(str(source.config().get("model_type")))
    if layout is None or not any(map(_FUSED.fullmatch, map(layout.name, source.tensors()))):
        return source
    return SplitExpertsSource(source, layout)


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate's and up's rows ``[experts, size, …]`` as they lie in a file, ``[experts, 2 · size, …]``."""
    return torch.stack((gate, up), 2).flatten(1, 2)


def fused(sides: Sequence[torch.Tensor], layout: Layout, *, weight: bool) -> torch.Tensor:
    """Rows ``[experts, rows, …]`` of gate and up, or of one projection, as a family's files have them.

    Args:
        sides: gate's and up's, or one projection's.
        layout: that of the family.
        weight: whether they are weights, which may be transposed there.
    """
    rows = sides[0]
    if len(sides) > 1:
        rows = interleaved(*sides) if layout.interleaved else torch.cat([*sides], 1)
    return rows.mT if weight and layout.transposed else rows


def joined_experts(tensors: Mapping[str, torch.Tensor], layout: Layout,
                   plain: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Tensors with those of experts together, as such a family's files have them, but for those called
    ``plain`` there, which aren't transposed; of a layer's experts all must be there."""
    joined: dict[str, torch.Tensor] = {}
    experts: defaultdict[tuple[str, str], dict[int, dict[int, torch.Tensor]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if (match := _SINGLE.fullmatch(name)) is None:
            joined[name] = tensor
            continue
        side = _SIDES[match[3]]
        together = f"{match[1]}.{'down' if side < 0 else 'gate_up'}_proj{_ENDS[match[4]]}"
        experts[together, match[4]].setdefault(side, {})[int(match[2])] = tensor
    for (name, part), sides in experts.items():
        parts = [torch.stack([side[expert] for expert in sorted(side)]) for _, side in sorted(sides.items())]
        joined[layout.stored(name)] = fused(parts, layout, weight=part == "weight" and name not in plain)
    return joined


class SplitExpertsSource(SourceWrapper):
    """What isn't named here is the source's. An expert is read when it is asked for, and no other.

    Args:
        source: the source of a model whose ``model_type`` is in :data:`LAYOUTS`.
        layout: that of its family.

    Raises:
        SourceError: as :func:`split_experts`.
    """

    def __init__(self, source: ModelSource, layout: Layout) -> None:
        super().__init__(source)
        self._layout = layout
        self._plain: set[str] = set()  # of a family that has either, those that aren't transposed
        self._places: dict[str, _Place] = {}
        self._infos: dict[str, TensorInfo] = {}
        config = source.config()
        text = config.get("text_config")
        config = {**config, **(text if isinstance(text, dict) else {})}
        count = config.get("num_local_experts", config.get("num_experts"))
        hidden, size = config.get("hidden_size"), config.get("moe_intermediate_size")
        together = sum(_FUSED.fullmatch(layout.name(name)) is not None for name in source.tensors())
        if type(count) is int and count * together > _MAX_TENSORS:
            raise SourceError(f"{self.uri} has more than {_MAX_TENSORS:,} tensors of experts",
                              why="no model has", next="download the model again")
        for name, info in source.tensors().items():
            if layout.by_shape and (match := _FUSED.fullmatch(name)) is not None and type(size) is int and (
                    info.shape[1:] == ((2 * size, hidden) if match[2] == "gate_up" else (hidden, size))):
                self._plain.add(name)
            for new, place in self._parts(name, info, count):
                if new in self._infos:
                    raise SourceError(f"{self.uri} has the tensor {new!r} twice",
                                      why=f"by itself and as a part of {place.fused if place else name!r}",
                                      next="download the model again")
                if place is not None:
                    self._places[new] = place
                shape = info.shape if place is None else self._shape(info.shape, place)
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
        rows = self._source.tensor(place.fused)[place.expert]
        if self._turned(place.fused, place.part):
            rows = rows.T
        if place.side >= 0:
            rows = rows[place.side::2] if self._layout.interleaved else rows.chunk(2)[place.side]
        return rows.clone(memory_format=torch.contiguous_format)

    def in_file(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return in_file(self._source, joined_experts(tensors, self._layout, self._plain))

    def prefetch(self, names: Iterable[str]) -> None:
        """All experts of a layer, for some."""
        prefetch(self._source, dict.fromkeys(map(self._inner, names)))

    def _inner(self, name: str) -> str:
        place = self._places.get(name)
        return name if place is None else place.fused

    def _parts(self, name: str, info: TensorInfo, count: object) -> Iterator[tuple[str, _Place | None]]:
        """What a tensor of the file is here, by name: itself, or parts of it."""
        match = _FUSED.fullmatch(self._layout.name(name))
        if match is None or match[3] not in _PARTS or not (self._layout.interleaved or (
                match[3] is None and info.dtype.is_floating_point)):
            yield name, None
            return
        part = _PARTS[match[3]]
        if type(count) is not int or not 0 < count <= _MAX_EXPERTS or info.shape[:1] != (count,) or (
                len(info.shape) != _DIMENSIONS[part]):
            raise SourceError(f"{self.uri}: {name} has shape {list(info.shape)}",
                              why=f"it must have {_DIMENSIONS[part]} dimensions, the first for experts, of "
                                  f"which config.json has {str(count)[:40]}",
                              next="get config.json and the weights from the same place again")
        inputs = (("gate_proj", 0), ("up_proj", 1)) if match[2] == "gate_up" else (("down_proj", -1),)
        rows = info.shape[2 if self._turned(name, part) else 1]
        if match[2] == "gate_up" and rows % 2:
            raise SourceError(f"{self.uri}: {name} has shape {list(info.shape)}",
                              why="gate and up are equally large",
                              next="get config.json and the weights from the same place again")
        for expert in range(count):
            for projection, side in inputs:
                yield f"{match[1]}.{expert}.{projection}.{part}", _Place(name, expert, part, side)

    def _turned(self, fused: str, part: str) -> bool:
        """Whether a tensor of the file is transposed."""
        return part == "weight" and self._layout.transposed and fused not in self._plain

    def _shape(self, fused: tuple[int, ...], place: _Place) -> tuple[int, ...]:
        rows, *others = (fused[2], fused[1]) if self._turned(place.fused, place.part) else fused[1:]
        return (rows if place.side < 0 else rows // 2, *others)
