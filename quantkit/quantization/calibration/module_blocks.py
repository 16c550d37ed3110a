"""Decoder layers of any family as transformers' own modules, one of them in memory at a time.

The model is built without memory for its weights. Its own ``forward`` is run up to the layer that is asked
for, with what the layer before has left in place of all layers before: so masks, positions, embeddings a
layer and all else that a family's layers take come from the family's own code. Tensors get from the file's
names into modules by transformers' own conversions, which also join experts that the file has one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quantkit.models.outline import TOWER, Outline
from quantkit.sources.base import ModelSource, in_file, name_in_file, release
from quantkit.support.errors import RecipeError

UNTOUCHED = 1 << 16
"""Values of an empty tensor from which it gets no memory while a model is built: it is a weight."""
NEXT = "use a data-free recipe: int8, int4-rtn, fp8 or fp8-block"


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
        RecipeError: transformers isn't there, doesn't know the family, or its modules don't take this
            model's layers.
    """

    def __init__(self, source: ModelSource, outline: Outline, device: torch.device) -> None:
        self._source, self._outline, self._device = source, outline, device
        self._model = _empty_model(source, outline)
        for module in self._model.modules():
            module._buffers.update({name: buffer if buffer is None else buffer.to(device)
                                    for name, buffer in module._buffers.items()})
        self._transforms = _conversions(self._model)
        self._targets = self._model.state_dict().keys()
        self._names: dict[int | None, list[str]] = {}
        for name in source.tensors():
            self._names.setdefault(outline.layer_of(name), []).append(name)
        self.blocks = self._find_blocks()
        self._forwards = [block.forward for block in self.blocks]
        self._loaded: int | None = None

    def _find_blocks(self) -> nn.ModuleList:
        first = f"{self._outline.slots[0].name}.weight"
        target = self._target(first)
        match = re.match(r"(.+?)\.(\d+)\.", target)
        if target in self._targets and match is not None:
            blocks = self._model.get_submodule(match[1])
            if isinstance(blocks, nn.ModuleList) and len(blocks) >= self._outline.num_layers:
                return blocks
        name = type(self._model).__name__
        raise unsuitable(self._outline, f"transformers' {name} has no place for {first}")

    def _target(self, name: str) -> str:
        """The parameter that a tensor of the file is, or becomes a part of."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [item for item in self._transforms if isinstance(item, WeightRenaming)]
        converters = [item for item in self._transforms if isinstance(item, WeightConverter)]
        name = name_in_file(self._source, name)
        target, _ = rename_source_key(name, renamings, converters, self._model.base_model_prefix,
                                      self._model.state_dict())
        return str(target)

    def prepare(self, tokens: torch.Tensor) -> None:
        """Load all that is before and between the layers; of embeddings the rows of these tokens."""
        used = tokens.unique()
        head = self._model.get_output_embeddings()
        tensors = {}
        for name in self._names.get(None, ()):
            if re.search(TOWER, name) or name.startswith(self._outline.layer_prefix):
                continue
            path, _, part = self._target(name).rpartition(".")
            try:
                module = self._model.get_submodule(path)
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
        self._put(tensors)
        release(self._source)

    def load(self, index: int, replaced: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
        """A layer's module with its weights, in float32; the one loaded before loses its own.

        Args:
            index: of the layer.
            replaced: tensors in place of the file's, by its names.
        """
        self.unload()
        replaced = replaced or {}
        self._put({name: replaced[name] if name in replaced else self._source.tensor(name)
                   for name in self._names[index]})
        release(self._source)
        self._loaded = index
        return self.blocks[index]

    def unload(self) -> None:
        """Let go of the loaded layer's weights."""
        if self._loaded is not None:
            _without_memory(self.blocks[self._loaded])
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
            with _quiet():
                self._model(input_ids=tokens.to(self._device), use_cache=False)
        except _Reached as reached:
            return reached.passed
        finally:
            for block, forward in zip(self.blocks, self._forwards, strict=True):
                block.forward = forward
        raise unsuitable(self._outline, f"{type(self._model).__name__} doesn't run its layer {index}")

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(
                self._model, in_file(self._source, tensors), LoadStateDictConfig(
                    dtype=torch.float32, device_map={"": self._device}, weight_mapping=self._transforms))
        if info.mismatched_keys or info.conversion_errors:
            wrong = next(iter(info.conversion_errors or info.mismatched_keys))
            raise unsuitable(self._outline, f"{str(wrong)[:200]} doesn't fit transformers' module")


def library() -> str:
    """Whose modules they are, with its version."""
    return f"transformers {version('transformers')}"


_CHECKED: WeakKeyDictionary[ModelSource, RecipeError | None] = WeakKeyDictionary()
"""What was said of sources: many recipes are planned for one."""


def check_modules(source: ModelSource, outline: Outline) -> None:
    """Raise RecipeError if a model can't be calibrated through transformers. No weight is read."""
    if source not in _CHECKED:
        _CHECKED[source] = None
        try:
            ModuleBlocks(source, outline, torch.device("cpu"))
        except RecipeError as error:
            _CHECKED[source] = error
    if (refusal := _CHECKED[source]) is not None:
        raise refusal


def unsuitable(outline: Outline, why: str) -> RecipeError:
    """Why a model isn't calibrated through transformers."""
    return RecipeError(f"a model of type {outline.model_type!r} can't be calibrated through transformers",
                       why=why, next=NEXT)


def _empty_model(source: ModelSource, outline: Outline) -> Any:
    """The model without memory for its weights, from a config that can't bring code of its own."""
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.initialization import no_init_weights
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
        )
    except ImportError as error:
        raise RecipeError(f"a model of type {outline.model_type!r} is calibrated through transformers 5",
                          why=f"that isn't there: {error}",
                          next=f"pip install 'transformers>=5'; or {NEXT}") from None
    config, model_type = source.config(), outline.model_type
    kind = AutoModelForCausalLM if model_type in CAUSAL else AutoModelForImageTextToText
    if model_type not in CAUSAL and model_type not in IMAGE_TEXT:
        raise unsuitable(outline, "this version of transformers has no language model of that type")
    written = {key: value for key, value in config.items()
               if key not in ("auto_map", "quantization_config", "model_type", "architectures")}
    try:
        with no_init_weights(), _Unallocated(), _quiet():
            made = CONFIG_MAPPING[model_type]
            model = kind.from_config(made.from_dict(made._decode_special_floats(written)),
                                     dtype=torch.float32, experts_implementation="eager")
    except Exception as error:  # whatever a family's code says of a config
        raise unsuitable(outline, f"transformers can't build it: {type(error).__name__}: "
                                  f"{' '.join(str(error).split())[:200]}") from None
    _without_memory(model)
    return model.eval()


class _Unallocated(TorchFunctionMode):
    """Large empty tensors, which weights begin as, have no memory."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() >= UNTOUCHED:
                return made
        return func(*args, **kwargs)


def _without_memory(model: nn.Module) -> None:
    """Let parameters have their shapes alone. Two that are one stay so."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = empty.setdefault(id(parameter), nn.Parameter(
                    parameter.detach().to("meta"), requires_grad=False))


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(model)
    return transforms


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and warnings, which are about how models are usually loaded."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
