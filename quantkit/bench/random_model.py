"""Builds a model of a real shape with random weights on the device, in seconds, to measure speed."""

from __future__ import annotations

import torch

from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import UsageError
from quantkit.formats.base import Codes, QuantizedTensor
from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import dtype_of
from quantkit.planning.plan import Plan, make_plan
from quantkit.plugins import registry
from quantkit.recipe import load_recipe
from quantkit.runtime.loader import LoadedModel, build_model
from quantkit.sources.base import ModelSource
from quantkit.spec import QuantSpec
from quantkit.text.tokenizer import Tokenizer

PLAIN = "none"
"""What a recipe is called that leaves all weights as they are."""
STD = 0.02


def random_model(uri: str, recipe: str, device: torch.device, dtype: str = "auto") -> LoadedModel:
    """The shape of a model with weights of nobody's.

    Args:
        uri: whose config and tokenizer.
        recipe: weights are of the kinds that it would leave; ``none``: all plain.
        device: where they are made and run.
        dtype: as for :func:`quantkit.runtime.loader.load`.

    Raises:
        UsageError: a checkpoint, whose weights are of some kind already.
        QuantkitError: there is no such model, or the recipe doesn't fit it.
    """
    source = open_model(uri)
    try:
        if isinstance(source, Checkpoint | ForeignCheckpoint):
            raise UsageError(f"{uri} is quantized already", why="a recipe begins with plain weights",
                             next="synthetic:llama-8b")
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
    """Random tensors by name."""

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
        highest = 2**spec.bits - 1
        codes = torch.randint(0, highest + 1, shape, dtype=torch.uint8, device=self._device,
                              generator=self._generator)
        size = {"int": 2.0**spec.bits / 3.5, "nf": 0.5, "fp": 100.0}[spec.kind]
        if spec.kind == "fp":
            codes = codes & 0xF7  # no NaN among them
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        scale_dtype = dtypes.get(spec.scale_dtype, self._dtype)
        name = next(name for name, dtype in dtypes.items() if dtype == scale_dtype)
        scale = torch.full(spec.scale_shape(shape), STD / size, device=self._device).to(scale_dtype).float()
        zero = None
        if spec.kind == "int" and not spec.symmetric:
            zero = torch.full_like(scale, 2**(spec.bits - 1)).to(torch.uint8)
        packed: QuantizedTensor = registry("formats").get(format).pack(
            Codes(spec.model_copy(update={"scale_dtype": name}), codes, scale, zero), self._dtype)
        return packed

