"""Decoder layers of any family as transformers' own modules, one of them in memory at a time.

The text model's own ``forward`` is run up to the layer that is asked for, with what the layer before has left
in place of all layers before: so masks, positions, embeddings of each layer and all else that a family's
layers take come from the family's own code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quantkit.models.modules import Modules, quiet, without_memory
from quantkit.models.outline import TOWER, Outline
from quantkit.sources.base import ModelSource, name_in_file, release
from quantkit.support.errors import QuantkitError, RecipeError, UnsupportedModelError


@dataclass
class Passed:
    """What one layer hands to those behind it.

    Attributes:
        outputs: what its module returned: hidden states, or a tuple that begins with them.
        shared: by keyword, what it has put into mappings that all layers are given.
    """

    outputs: Any
    shared: dict[str, dict[Any, Any]] = field(default_factory=dict)


class _Reached(Exception):
    """Ends a forward pass behind the layer that was asked for."""

    def __init__(self, passed: Passed) -> None:
        self.passed = passed


class ModuleBlocks:
    """A model's decoder layers as modules.

    Args:
        source: the model, by the names of its files.
        outline: says which tensors are in which layer.
        device: the device that they compute on, in float32.

    Raises:
        UnsupportedModelError: as :class:`~quantkit.models.modules.Modules`, or its modules don't take this
            model's layers.
    """

    def __init__(self, source: ModelSource, outline: Outline, device: torch.device) -> None:
        self._source, self._outline, self._device = source, outline, device
        self._modules = Modules(source, outline, device)
        self._names: dict[int | None, list[str]] = {}
        for name in source.tensors():
            self._names.setdefault(outline.layer_of(name), []).append(name)
        self.blocks, self._text = self._modules.around(self._find_blocks())
        self._forwards = [block.forward for block in self.blocks]
        self._loaded: int | None = None

    def _find_blocks(self) -> str:
        """The path of the layers' list in the network."""
        again = "get config.json and the weights from the same place again"
        kinds = {re.sub(r"\d+", "*", name_in_file(self._source, f"{slot.name}.weight")): slot
                 for slot in reversed(self._outline.slots)}
        paths: list[str] = []
        for slot in kinds.values():
            target, unchanged = self._modules.target(f"{slot.name}.weight")
            place = self._modules.targets.get(target)
            if place is not None and unchanged and place.dim() == 2 and place.shape != (
                    slot.out_features, slot.in_features):
                raise UnsupportedModelError(f"{slot.name} doesn't fit transformers' {self._modules.name}",
                                            why=f"it is {[slot.out_features, slot.in_features]}, and "
                                                f"{list(place.shape)} there", next=again)
            if place is not None and (match := re.match(r"(.+?)\.(\d+)\.", target)) is not None:
                blocks = self._modules.network.get_submodule(match[1])
                if isinstance(blocks, nn.ModuleList) and len(blocks) >= self._outline.num_layers:
                    paths.append(match[1])
        if not paths:
            raise UnsupportedModelError(f"transformers' {self._modules.name} has no place for "
                                        f"{self._outline.slots[0].name}",
                                        why="its layers have other names, or are fewer", next=again)
        return paths[0]

    def prepare(self, tokens: torch.Tensor) -> None:
        """Load all that is before and between the layers; of embeddings the rows of these tokens."""
        used = tokens.unique()
        head = self._modules.network.get_output_embeddings()
        tensors = {}
        for name in self._names.get(None, ()):
            if re.search(TOWER, name) or name.startswith(self._outline.layer_prefix):
                continue
            path, _, part = self._modules.target(name)[0].rpartition(".")
            try:
                module = self._modules.network.get_submodule(path)
            except AttributeError:  # it isn't of this model: what else the file has, transformers leaves too
                continue
            if module is head:
                continue
            tensor = self._source.tensor(name)
            if isinstance(module, nn.Embedding) and part == "weight" and len(tensor) > int(used.max()):
                rows = torch.zeros(tensor.shape)  # of which only these take memory
                rows[used] = tensor[used].float()
                tensor = rows
            tensors[name] = tensor
        self._modules.put(tensors)
        release(self._source)

    def load(self, index: int, replaced: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
        """A layer's module with its weights, in float32; the one loaded before loses its own.

        Args:
            index: of the layer.
            replaced: tensors in place of the file's, by its names.
        """
        self.unload()
        replaced = replaced or {}
        self._modules.put({name: replaced[name] if name in replaced else self._source.tensor(name)
                   for name in self._names[index]})
        release(self._source)
        self._loaded = index
        return self.blocks[index]

    def unload(self) -> None:
        """Let go of the loaded layer's weights."""
        if self._loaded is not None:
            without_memory(self.blocks[self._loaded])
            self._loaded = None

    def tagged(self, index: int, names: list[str]) -> dict[str, torch.Tensor]:
        """A layer's parameters if every weight of these Linears held its place in ``names``, counted from 1,
        and all else 0: which says where transformers puts them, whatever it does with their names."""
        infos = self._source.tensors()
        places = {f"{name}.weight": place for place, name in enumerate(names, 1)}
        self.load(index, {name: torch.full((), float(places.get(name, 0))).expand(infos[name].shape)
                          for name in self._names[index]})
        return {name: parameter.detach() for name, parameter in self.blocks[index].named_parameters()}

    @torch.no_grad()
    def run(self, index: int, tokens: torch.Tensor, before: Passed | None) -> Passed:
        """What a loaded layer leaves.

        Args:
            index: of the layer.
            tokens: int64 ``[B, T]``.
            before: what the layer before it has left; ``None`` for the first one.
        """
        def skipped(*args: Any, **kwargs: Any) -> Any:
            assert before is not None
            return before.outputs

        def computed(*args: Any, **kwargs: Any) -> Any:
            given = {key: value for key, value in kwargs.items() if isinstance(value, MutableMapping)}
            for key, value in given.items():
                value.update({} if before is None else before.shared.get(key, {}))
            entered = {key: dict(value) for key, value in given.items()}
            outputs = self._forwards[index](*args, **kwargs)
            shared = {key: {name: item for name, item in value.items()
                            if entered[key].get(name) is not item} for key, value in given.items()}
            for key, kept in ({} if before is None else before.shared).items():
                shared[key] = {**kept, **shared.get(key, {})}
            raise _Reached(Passed(outputs, shared))

        for place, block in enumerate(self.blocks):
            block.forward = computed if place == index else skipped
        try:
            with quiet():
                self._text(input_ids=tokens.to(self._device), use_cache=False)
        except _Reached as reached:
            return reached.passed
        except QuantkitError:
            raise
        except Exception as error:  # whatever a family's code says
            raise UnsupportedModelError(f"transformers' {self._modules.name} fails in layer {index}",
                                        why=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                                        next="use a data-free recipe: int8, int4-rtn, fp8 or fp8-block"
                                        ) from error
        finally:
            for block, forward in zip(self.blocks, self._forwards, strict=True):
                block.forward = forward
        raise UnsupportedModelError(f"transformers' {self._modules.name} doesn't run its layer {index}",
                                    why="its code leaves it out for this config",
                                    next="use a data-free recipe: int8, int4-rtn, fp8 or fp8-block")


_CHECKED: WeakKeyDictionary[ModelSource, RecipeError | None] = WeakKeyDictionary()
"""What was said of sources: many recipes are planned for one."""


def check_modules(source: ModelSource, outline: Outline) -> None:
    """Raise RecipeError if a model can't be calibrated through transformers. No weight is read."""
    if source not in _CHECKED:
        _CHECKED[source] = None
        try:
            ModuleBlocks(source, outline, torch.device("cpu"))
        except UnsupportedModelError as error:
            remedy = f"{error.next}; or use a data-free recipe: int8, int4-rtn, fp8 or fp8-block"
            _CHECKED[source] = RecipeError(
                f"a model of type {outline.model_type!r} can't be calibrated through transformers",
                why="; ".join(filter(None, (error.what, error.why))), next=remedy)
    if (refusal := _CHECKED[source]) is not None:
        raise refusal
