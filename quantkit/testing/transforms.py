"""The contract of transforms: ``quantkit.quantization.transforms.base``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.quantization.methods.base import LayerStats, MethodOptions
from quantkit.quantization.transforms.base import LayerTensors, Transform
from quantkit.sources.base import ModelSource
from quantkit.sources.open import open_source
from quantkit.testing.contract import (
    Contract,
    check_name,
    check_reason,
    global_generators,
    raised,
    same_tensors,
)
from quantkit.testing.tiny import FAMILIES, VOCAB, tiny_model

STATISTICS = ("hessian", "largest")
"""What a transform may need."""

SPEC = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), activations="token",
                 scale_dtype="float32")

SMALL_ERROR = 1e-4
"""Of logits of a few units, in float32: what is left when nothing but the order of sums has changed."""


def check_transform(transform: Transform, families: Iterable[str] = tuple(FAMILIES)) -> None:
    """Put a transform, with default options, to tiny models of every family that it doesn't refuse, and check
    what ``quantkit.quantization.transforms.base`` promises: the same logits, tensors as they are announced,
    the same result twice, nothing written to the model, no global random generator, and no statistics but
    those that ``needs`` declares.

    Args:
        transform: the transform.
        families: which; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the family is named.
    """
    contract = Contract(f"transform {getattr(transform, 'name', transform)!r}",
                        "quantkit.quantization.transforms.base")
    contract.must(isinstance(transform, Transform), f"it is a {type(transform).__name__}, not a Transform")
    _check_description(contract, transform)
    taken = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            source = open_source(str(tiny_model(folder, family, dtype="float32")))
            try:
                case = contract.at(family)
                config = parse_config(source.config())
                if check_reason(case, "refuses", case.call("refuses", transform.refuses, config)) is None:
                    taken += 1
                    with global_generators(case):
                        _check_transformed(case, transform, source)
            finally:
                source.close()
    contract.must(bool(taken), "it refuses every family that it was asked for")


def _check_description(contract: Contract, transform: Transform) -> None:
    check_name(contract, "transforms", transform, transform.name)
    contract.must(isinstance(transform.paper, str) and transform.paper.startswith(("https://", "http://")),
                  f"paper is {transform.paper!r}; it must be a link")
    contract.must(not isinstance(transform.needs, str) and set(transform.needs) <= set(STATISTICS),
                  f"needs is {transform.needs!r}; it must be a frozenset of {' and '.join(STATISTICS)}")
    contract.must(transform.layer is None or bool(transform.needs),
                  "it changes layers and needs no statistics, so that it would never be called",
                  'declare what a layer is measured for: needs=frozenset({"largest"})')
    contract.must(isinstance(transform.options, type) and issubclass(transform.options, MethodOptions),
                  "options is no subclass of MethodOptions")
    contract.call("making its options with nothing given", transform.options)
    check_reason(contract, "idle", contract.call("idle", transform.idle, SPEC))


def _check_transformed(case: Contract, transform: Transform, source: ModelSource) -> None:
    config, options = parse_config(source.config()), transform.options()
    original = {name: source.tensor(name).clone() for name in source.tensors()}
    changed: Any = case.call("source", transform.source, source, config, options)
    case.must(changed is not None and all(hasattr(changed, name) for name in ("config", "tensors", "tensor")),
              f"source returned a {type(changed).__name__}, not a ModelSource")
    config, infos = case.call("reading its config", parse_config, changed.config()), changed.tensors()
    tensors = {name: case.call(f"tensor({name!r})", changed.tensor, name) for name in infos}
    case.must({name: info.shape for name, info in infos.items()} == tensor_shapes(config),
              "its tensors aren't those of its config")
    case.must(all(isinstance(tensor, torch.Tensor)
                  and (infos[name].dtype, infos[name].shape) == (tensor.dtype, tuple(tensor.shape))
                  for name, tensor in tensors.items()), "a tensor isn't as it is announced")
    if transform.layer is not None:
        for index in range(config.num_layers):
            layers = [_transformed_layer(case, transform, changed, index) for _ in range(2)]
            case.must(same_tensors(*layers), "two runs differ")
            for name, tensor in layers[0].items():
                case.must(name in tensors, f"layer {index} changes {name!r}, which no such model has")
                case.must(tensor.shape == tensors[name].shape,
                          f"layer {index} makes {name} {list(tensor.shape)}, "
                          f"it was {list(tensors[name].shape)}")
            tensors |= layers[0]
    case.must(all(torch.equal(source.tensor(name), tensor) for name, tensor in original.items()),
              "it wrote to the model")
    difference = (_logits(changed.config(), tensors) - _logits(source.config(), original)).abs().max()
    case.must(bool(difference < SMALL_ERROR), f"logits differ by {float(difference):.2g}")


def _transformed_layer(case: Contract, transform: Transform, source: ModelSource,
                       index: int) -> dict[str, torch.Tensor]:
    """What becomes of a layer whose inputs have outliers and will be rounded to 8 bits with the weights."""
    config, random = parse_config(source.config()), torch.Generator().manual_seed(index)
    stats: dict[str, LayerStats] = {}
    for slot in linear_slots(config):
        if slot.layer == index:
            x = torch.randn(256, slot.in_features, generator=random)
            x[:, ::7] *= 20
            stats[slot.name] = LayerStats(256, x.T @ x / 256, x.abs().amax(dim=0))
    assert transform.layer is not None
    declared = {name: LayerStats(measured.tokens, measured.hessian if "hessian" in transform.needs else None,
                                 measured.largest if "largest" in transform.needs else None)
                for name, measured in stats.items()}
    specs = dict.fromkeys(stats, SPEC)
    tensors = LayerTensors(source.tensor, source.tensors().__contains__, specs, declared, config.offset_norms)
    try:
        result: object = transform.layer(config, index, tensors, transform.options())
    except Exception as error:  # whatever a stranger's code raises
        _blame_needs(case, transform, config, LayerTensors(
            source.tensor, source.tensors().__contains__, specs, stats, config.offset_norms), index)
        raise case.error(f"layer {index} raises {raised(error)}") from error
    case.must(result is None,
              f"layer returned a {type(result).__name__}; it must change the tensors that it is given")
    case.must(all(isinstance(tensor, torch.Tensor) for tensor in tensors.changed.values()),
              "layer put something else than tensors into changed")
    return tensors.changed


def _blame_needs(case: Contract, transform: Transform, config: ModelConfig, tensors: LayerTensors,
                 index: int) -> None:
    """Raise PluginError if the layer succeeds when it has statistics that it doesn't declare."""
    assert transform.layer is not None
    try:
        transform.layer(config, index, tensors, transform.options())
    except Exception:  # they aren't what it lacks
        return
    lacking = ", ".join(f"stats.{name}" for name in STATISTICS if name not in transform.needs)
    raise case.error(f"it reads {lacking} without declaring it in needs", 'needs=frozenset({"hessian"})')


@torch.no_grad()
def _logits(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weights = Weights(tensors.__getitem__, tensors.__contains__, torch.float32)
    ids = torch.randint(4, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    return CausalLM(parse_config(config), weights)(ids)
