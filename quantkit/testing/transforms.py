"""The contract of transforms: ``quantkit.transforms.base``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantkit.errors import PluginError
from quantkit.methods.base import LayerStats
from quantkit.models.architecture import linear_slots, parse_config, tensor_shapes
from quantkit.models.decoder import CausalLM
from quantkit.models.linear import Weights
from quantkit.sources.base import ModelSource
from quantkit.sources.open import open_source
from quantkit.spec import Granularity, QuantSpec
from quantkit.testing.tiny import FAMILIES, VOCAB, tiny_model
from quantkit.transforms.base import LayerTensors, Transform

SMALL_ERROR = 1e-4
"""Of logits of a few units, in float32: what is left when nothing but the order of sums has changed."""


def check_transform(transform: Transform, families: Iterable[str] = tuple(FAMILIES)) -> None:
    """Put a transform, with default options, to tiny models of every family that it doesn't refuse, and check
    what ``quantkit.transforms.base`` promises: the same logits, tensors as they are announced, the same
    result twice, nothing written to the model.

    Args:
        transform: the transform.
        families: which; at least one must be accepted.

    Raises:
        PluginError: a promise is broken; the family is named.
    """
    taken = 0
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            source = open_source(str(tiny_model(folder, family, dtype="float32")))
            try:
                if transform.refuses(parse_config(source.config())) is None:
                    taken += 1
                    _check_transformed(transform, source, f"transform {transform.name!r} on {family}")
            finally:
                source.close()
    if not taken:
        raise PluginError(f"transform {transform.name!r} refuses every family that it was asked for")


def _check_transformed(transform: Transform, source: ModelSource, where: str) -> None:
    def must(holds: bool, promise: str) -> None:
        if not holds:
            raise PluginError(f"{where}: {promise}",
                              why="quantkit.transforms.base says what a transform promises")

    config, options = parse_config(source.config()), transform.options()
    original = {name: source.tensor(name).clone() for name in source.tensors()}
    changed = transform.source(source, config, options)
    config, infos = parse_config(changed.config()), changed.tensors()
    tensors = {name: changed.tensor(name) for name in infos}
    must({name: info.shape for name, info in infos.items()} == tensor_shapes(config),
         "its tensors aren't those of its config")
    must(all((infos[name].dtype, infos[name].shape) == (tensor.dtype, tuple(tensor.shape))
             for name, tensor in tensors.items()), "a tensor isn't as it is announced")
    if transform.layer is not None:
        for index in range(config.num_layers):
            layers = [_transformed_layer(transform, changed, index) for _ in range(2)]
            must(layers[0].keys() == layers[1].keys() and all(torch.equal(layers[0][n], layers[1][n])
                                                              for n in layers[0]), "two runs differ")
            tensors |= layers[0]
    must(all(torch.equal(source.tensor(name), tensor) for name, tensor in original.items()),
         "it wrote to the model")
    difference = (_logits(changed.config(), tensors) - _logits(source.config(), original)).abs().max()
    must(bool(difference < SMALL_ERROR), f"logits differ by {float(difference):.2g}")


def _transformed_layer(transform: Transform, source: ModelSource, index: int) -> dict[str, torch.Tensor]:
    """What becomes of a layer whose inputs have outliers and will be rounded to 8 bits with the weights."""
    config, random = parse_config(source.config()), torch.Generator().manual_seed(index)
    spec = QuantSpec(bits=8, granularity=Granularity(strategy="channel"), activations="token",
                     scale_dtype="float32")
    stats = {}
    for slot in linear_slots(config):
        if slot.layer == index:
            x = torch.randn(256, slot.in_features, generator=random)
            x[:, ::7] *= 20
            stats[slot.name] = LayerStats(256, x.T @ x / 256, x.abs().amax(dim=0))
    tensors = LayerTensors(source.tensor, source.tensors().__contains__, dict.fromkeys(stats, spec), stats,
                           config.offset_norms)
    assert transform.layer is not None
    transform.layer(config, index, tensors, transform.options())
    return tensors.changed


@torch.no_grad()
def _logits(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weights = Weights(tensors.__getitem__, tensors.__contains__, torch.float32)
    ids = torch.randint(4, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    return CausalLM(parse_config(config), weights)(ids)
