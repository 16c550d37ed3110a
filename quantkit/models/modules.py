"""A network of any family as transformers' own modules, whose weights are put in from our files.

It is built without memory for its weights, from a config that can't bring code of its own. Tensors get from
the files' names into modules by transformers' own conversions, which also join experts that a file has one by
one: so whatever transformers reads of a family is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quantkit.models.outline import Outline
from quantkit.sources.base import ModelSource, in_file, name_in_file
from quantkit.support.errors import UnsupportedModelError

_NUMBERED = re.compile(r"[^.]+\.\d+\..*")
"""A name from the list of layers on."""
UNTOUCHED = 1 << 16
"""Values of an empty tensor from which it gets no memory while a network is built: it is a weight."""


def library() -> str:
    """Whose modules they are, with its version."""
    return f"transformers {version('transformers')}"


class Modules:
    """A network without memory for its weights.

    Args:
        source: the model, by the names of its files.
        outline: of it.
        device: the device that it computes on.
        dtype: the dtype of its weights and activations.

    Attributes:
        network: transformers' module of the whole model.
        targets: its parameters and buffers by name, without memory.

    Raises:
        UnsupportedModelError: transformers isn't there, doesn't know the family, or can't build it.
    """

    def __init__(self, source: ModelSource, outline: Outline, device: torch.device,
                 dtype: torch.dtype = torch.float32) -> None:
        self._source, self._outline, self._device, self._dtype = source, outline, device, dtype
        self.network = _empty_network(source.config(), outline.model_type, dtype)
        for module in self.network.modules():
            module._buffers.update({name: buffer if buffer is None else buffer.to(device)
                                    for name, buffer in module._buffers.items()})
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._conversions: list[Any] = get_model_conversion_mapping(self.network)
        self.targets: dict[str, torch.Tensor] = self.network.state_dict()

    def target(self, name: str) -> tuple[str, bool]:
        """The parameter that a tensor of the model is, or becomes a part of; and whether it is that as it
        is. Neither may be there."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [item for item in self._conversions if isinstance(item, WeightRenaming)]
        converters = [item for item in self._conversions if isinstance(item, WeightConverter)]
        name = name_in_file(self._source, name)
        target, pattern = rename_source_key(name, renamings, converters, self.network.base_model_prefix,
                                            self.targets)
        return str(target), pattern is None

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put tensors where they belong; of a layer's all must be there. Others than the network has are left
        out. Raises UnsupportedModelError: they don't fit."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with quiet():
            info, _ = convert_and_load_state_dict_in_model(
                self.network, in_file(self._source, tensors), LoadStateDictConfig(
                    dtype=self._dtype, device_map={"": self._device}, weight_mapping=self._conversions))
        if info.mismatched_keys or info.conversion_errors:
            wrong = next(iter(info.conversion_errors or info.mismatched_keys))
            raise UnsupportedModelError(f"{self._source.uri} doesn't fit transformers' {self.name}",
                                        why=f"{str(wrong)[:200]} is of another shape there",
                                        next="get config.json and the weights from the same place again")

    def leave_out(self, pattern: str) -> None:
        """Let parameters whose names have this in them be on the device without memory there: each is one
        NaN, which shows if it is used. A network's own code asks any of its parameters for the device."""
        nan = torch.full((), torch.nan, dtype=self._dtype, device=self._device)
        for path, module in self.network.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and re.search(pattern, f"{path}.{name}"):
                    module._parameters[name] = nn.Parameter(nan.expand(parameter.shape), requires_grad=False)

    def around(self, path: str) -> tuple[Any, Any]:
        """The module at a path, and the innermost model of transformers that it is in: of a model of images
        and text the text model, which needs nothing of the rest."""
        from transformers import PreTrainedModel

        inside = [self.network]
        for name in path.split("."):
            inside.append(getattr(inside[-1], name))
        models = [module for module in inside if isinstance(module, PreTrainedModel)]
        return inside[-1], models[-1]

    def head_alone(self) -> Modules:
        """The same network, whose layers have no memory and whose head is this one's."""
        alone = Modules(self._source, self._outline, self._device, self._dtype)
        inside = {id(module) for module in self.base.modules()}
        for name, module in self.network.named_modules():
            if id(module) not in inside:
                alone.network.get_submodule(name)._parameters.update(module._parameters)
        return alone

    @property
    def base(self) -> Any:
        """The network without its head. Raises UnsupportedModelError: it isn't told apart."""
        base = self.network.base_model
        if base is self.network:  # whose name for it is another class's
            base = getattr(self.network, "model", None)
        if base is None:
            raise UnsupportedModelError(f"{self.name} of transformers isn't a model with a head",
                                        why="hidden states and logits can't be told apart")
        return base

    @property
    def name(self) -> str:
        """The class of the network."""
        return type(self.network).__name__


def renamed(model_type: str, linears: Iterable[str]) -> tuple[str, str] | None:
    """The first Linear that has another name than in the files in transformers' layers of a family, or is a
    part of a Linear there, and its name there: quantized it isn't found. ``None`` if there is none, or
    transformers isn't there."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None
    conversions = [item for kind in (model_type, f"{model_type}_text")
                   for item in get_checkpoint_conversion_mapping(kind) or ()]
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    for name in {re.sub(r"\d+", "0", name): name for name in linears}.values():
        joining = [] if ".experts." in name else converters  # experts it joins quantized, too
        there = str(rename_source_key(f"{name}.weight", renamings, joining)[0])
        if _NUMBERED.findall(f"{name}.weight") != _NUMBERED.findall(there):
            return name, there.removesuffix(".weight")
    return None


def config_there(config: Mapping[str, Any], model_type: str) -> Any:
    """transformers' config of a model. Raises UnsupportedModelError: transformers isn't there, doesn't know
    the family, or refuses what ``config.json`` says."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise UnsupportedModelError(f"a model of type {model_type!r} is run through transformers 5 here",
                                    why=f"that isn't there: {error}",
                                    next="pip install 'transformers>=5'") from None
    if model_type not in {*_mapping("CAUSAL_LM"), *_mapping("IMAGE_TEXT_TO_TEXT")}:
        raise UnsupportedModelError(f"{library()} has no language model of type {model_type!r}",
                                    why="its mathematics isn't known here either",
                                    next="pip install --upgrade transformers")
    written = {key: value for key, value in config.items()
               if key not in ("auto_map", "quantization_config", "model_type", "architectures")}
    with _built(model_type):
        made = CONFIG_MAPPING[model_type]
        return made.from_dict(made._decode_special_floats(written))


def _empty_network(config: Mapping[str, Any], model_type: str, dtype: torch.dtype) -> Any:
    there = config_there(config, model_type)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    kind = AutoModelForCausalLM if model_type in _mapping("CAUSAL_LM") else AutoModelForImageTextToText
    with _built(model_type), no_init_weights(), _Unallocated(), quiet():
        network = kind.from_config(there, dtype=dtype, experts_implementation="eager")
    without_memory(network)
    return network.eval()


def _mapping(heads: str) -> Mapping[str, Any]:
    """The families that have such heads."""
    from transformers.models.auto import modeling_auto

    names: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{heads}_MAPPING_NAMES")
    return names


@contextmanager
def _built(model_type: str) -> Iterator[None]:
    """Whatever a family's code says of a config is an error that names the model's type."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(f"transformers can't build this model of type {model_type!r}",
                                    why=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                                    next="get the model's complete config.json") from None


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


def without_memory(model: nn.Module) -> None:
    """Let parameters have their shapes alone. Two that are one stay so."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = empty.setdefault(id(parameter), nn.Parameter(
                    parameter.detach().to("meta"), requires_grad=False))


@contextmanager
def quiet() -> Iterator[None]:
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
