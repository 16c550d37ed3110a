"""Builds a model of a real shape with random weights on the device, in seconds, to measure speed."""

from __future__ import annotations

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.base import QuantizedTensor
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import dtype_of
from quantkit.plugins.manager import registry
from quantkit.quantization.methods.random_codes import random_codes, scale_for
from quantkit.quantization.planning.plan import Plan, make_plan
from quantkit.quantization.recipe import load_recipe
from quantkit.runtime.loader import LoadedModel, build_model
from quantkit.sources.base import ModelSource
from quantkit.support.errors import UsageError
from quantkit.text.tokenizer import Tokenizer

PLAIN = "none"
"""What a recipe is called that leaves all weights as they are."""
STD = 0.02


def random_model(uri: str, recipe: str, device: torch.device, dtype: str = "auto") -> LoadedModel:
    """The shape of a model with weights of nobody's.

    Args:
        uri: the model whose config and tokenizer are taken.
        recipe: weights are of the kinds that it would leave; ``none``: all plain.
        device: the device that makes and runs them.
        dtype: the dtype of activations, as for :func:`quantkit.runtime.loader.load`.

    Raises:
        UsageError: a checkpoint, whose weights are of some kind already.
        QuantkitError: there is no such model, or the recipe doesn't fit it.
    """
    source = open_model(uri)
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            raise UsageError(f"{uri} is quantized already", why="a recipe begins with plain weights",
                             next=f"quantkit bench decode synthetic:llama-8b --random {recipe}")
        plan = None if recipe == PLAIN else make_plan(load_recipe(recipe), source)
        return _made(source, uri, recipe, plan, device, dtype)
    finally:
        source.close()


def _made(source: ModelSource, uri: str, recipe: str, plan: Plan | None, device: torch.device,
          dtype: str) -> LoadedModel:
    hf = source.config()
    config, kind = parse_config(hf), dtype_of(hf, dtype)
    weights = _Weights(config, kind, device)
    packed = {row.name: weights.quantized(row.spec, row.format, row.shape)
              for row in (plan.rows if plan else ()) if row.spec is not None and row.format is not None}
    model, reason = build_model(config, weights, weights.shapes.__contains__, kind, packed, device, uri)
    sizes = kind.itemsize * sum(shape.numel() for name, shape in weights.shapes.items()
                                if name.removesuffix(".weight") not in packed)
    sizes += sum(weight.nbytes for weight in packed.values())
    bits = plan.bits_per_weight if plan else 8.0 * kind.itemsize
    return LoadedModel(model, config, Tokenizer(source.side_files(), hf), uri, f"random {recipe}", None,
                       sizes, bits, sizes, reason)


class _Weights:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in tensor_shapes(config).items()}
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._norm = 0.0 if config.offset_norms else 1.0

    def tensor(self, name: str) -> torch.Tensor:
        """Norms leave their rows as they are, what is multiplied is N(0, 0.02²)."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.full(shape, self._norm, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(
            0, STD, generator=self._generator)

    def quantized(self, spec: QuantSpec, format: str, shape: tuple[int, int]) -> QuantizedTensor:
        """Random codes, and scales with which their weights are about as large as plain ones."""
        if spec.scale_dtype == "model":
            spec = spec.model_copy(update={"scale_dtype": str(self._dtype).removeprefix("torch.")})
        codes = random_codes(spec, shape, self._generator, scale_for(spec, STD))
        packed: QuantizedTensor = registry("formats").get(format).pack(codes, self._dtype)
        return packed
