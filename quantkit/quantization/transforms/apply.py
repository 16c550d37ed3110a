"""Finds, checks and applies a recipe's transforms."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.models.architecture import parse_config
from quantkit.models.config import ModelConfig
from quantkit.plugins.manager import describe_entry, is_builtin, registry
from quantkit.quantization.methods.base import MethodOptions
from quantkit.quantization.methods.options import checked_options
from quantkit.quantization.specs import TransformSpec
from quantkit.quantization.transforms.base import LayerTensors, Transform
from quantkit.sources.base import ModelSource
from quantkit.sources.checked import CheckedSource
from quantkit.support.errors import PluginError, RecipeError


def resolve(specs: Iterable[TransformSpec]) -> list[tuple[Transform, MethodOptions]]:
    """Every transform with its options. Raises UsageError for an unknown one, RecipeError for options,
    PluginError for one that nothing would call."""
    table, resolved = registry("transforms"), []
    for spec in specs:
        transform: Transform = table.get(spec.name)
        if transform.layer is not None and not transform.needs:  # it would never be called
            what = describe_entry("transforms", spec.name)
            raise PluginError(f"{what} changes layers and needs no statistics",
                              why="layers are changed once their inputs are measured",
                              next='declare what it is measured for: needs=frozenset({"largest"})')
        options = checked_options(f"transform {spec.name}", transform.options, spec.options)
        resolved.append((transform, options))
    return resolved


def transformed(specs: Iterable[TransformSpec], source: ModelSource) -> ModelSource:
    """The model of ``source`` as the whole-model transforms present it.

    Raises:
        RecipeError: one of the transforms, also of those that change layers later, isn't for this model.
    """
    for transform, options in resolve(specs):
        config = parse_config(source.config())
        if (why := transform.refuses(config)) is not None:
            raise RecipeError(f"transform {transform.name} can't be used on {source.uri}", why=why,
                              next="leave it out of the recipe")
        source = transform.source(source, config, options)
        if not is_builtin("transforms", transform.name):
            source = CheckedSource(source, describe_entry("transforms", transform.name))
    return source


def apply_to_layer(transform: Transform, options: MethodOptions, config: ModelConfig, index: int,
                   tensors: LayerTensors) -> None:
    """Let a transform change a layer, if it changes layers. Raises PluginError if a plugin's leaves something
    else than tensors of the model's names and shapes."""
    if transform.layer is None:
        return
    transform.layer(config, index, tensors, options)
    if not is_builtin("transforms", transform.name) and (fault := tensors.fault()) is not None:
        raise PluginError(f"{describe_entry('transforms', transform.name)}: in layer {index} {fault}",
                          why="LayerTensors.changed holds new tensors of the model by their full names",
                          next="correct it: quantkit.testing.check_transform finds such errors")
