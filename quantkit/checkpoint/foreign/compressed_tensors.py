"""compressed-tensors checkpoints, as llm-compressor writes them: groups of layers, each with its scheme.

A layout that compressed-tensors has and quantkit reads is a line in :data:`READERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from quantkit.checkpoint.foreign.base import (
    ORIGINAL,
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    square,
    unchanged,
)
from quantkit.checkpoint.quantization_config import SCALE_DTYPES
from quantkit.formats import bits as stream
from quantkit.formats import e4m3
from quantkit.formats.dtypes import FLOATS, dtype_name
from quantkit.formats.spec import Granularity, QuantSpec
from quantkit.models.architecture import EMBEDDING, LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

CLASSES = ("Linear", "Embedding")
"""Of everything but the embedding, and of it."""
HARMLESS = frozenset({"quant_method", "version", "global_compression_ratio"})
INERT: Mapping[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed", "frozen"), "kv_cache_scheme": (), "transform_config": ({},),
    "moe_sparsity_config": (), "format": ()}
WEIGHTS_HARMLESS = frozenset({"observer", "observer_kwargs", "zp_dtype"})
WEIGHTS_INERT: Mapping[str, tuple[Any, ...]] = {
    "dynamic": (False,), "actorder": (False, "static", "weight"), "block_structure": ()}
INPUTS_INERT: Mapping[str, tuple[Any, ...]] = {
    "symmetric": (True,), "group_size": (), "block_structure": (), "actorder": (False,)}
KINDS = {"int": "int", "float": "fp"}
FP4 = {("nvfp4-pack-quantized", "tensor_group"): "e4m3", ("mxfp4-pack-quantized", "group"): "e8m0"}
"""The dtype of 4-bit floats' scales, by layout and strategy."""


@dataclass(frozen=True)
class Targets:
    """Names, patterns and classes. A pattern that means one name only is kept as one: some have thousands."""

    names: frozenset[str]
    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def best(self, name: str) -> int:
        """How exactly a layer is named: 3 by name, 2 by pattern, 1 by class, 0 not at all."""
        if name in self.names:
            return 3
        if name in self.exact or any(pattern.match(name) for pattern in self.patterns):
            return 2
        return int(CLASSES[name == EMBEDDING] in self.names)


@dataclass(frozen=True)
class ConfigGroup:
    """One of ``config_groups``."""

    format: str
    targets: Targets
    spec: QuantSpec


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """``ignore`` overrides ``targets``; a name overrides a pattern, and a pattern overrides a class."""
    default_format = config.raw("format", "dense")
    sparsity = config.raw("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise config.wrong("sparsity_config", sparsity, "only dense weights can be read")
    ignored = _targets(config, "ignore", config.raw("ignore", []))
    table = config.raw("config_groups", {})
    if not isinstance(table, dict) or not table:
        raise config.wrong("config_groups", table, "it must be a table of groups")
    groups = [_group(f"{config.where}: {name}", group, str(default_format)) for name, group in table.items()]
    config.finish(HARMLESS, INERT)

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        if slot.name == EMBEDDING and f"{slot.name}.weight" in infos:
            return None  # a pattern that means Linears may match it too
        group = None if ignored.best(slot.name) else _chosen(slot.name, groups)
        return None if group is None else READERS[group.format](slot, group.spec, infos, dtype)

    return layer


def _group(where: str, group: Any, default_format: str) -> ConfigGroup:
    if not isinstance(group, dict):
        raise CheckpointError(f"{where} is no table", why="a preset's name says nothing about the file",
                              next="save the checkpoint again with a recent compressed-tensors")
    config = ConfigReader(group, where)
    config.only("output_activations", ())
    form = config.raw("format", default_format)
    if not isinstance(form, str) or form not in READERS:
        raise config.wrong("format", form, f"only {', '.join(READERS)} can be read")
    targets = _targets(config, "targets", config.raw("targets"))
    weights = config.raw("weights")
    if not isinstance(weights, dict):
        raise config.wrong("weights", weights, "it must be a table")
    spec = _spec(ConfigReader(weights, f"{where}: weights"), _activations(config), form)
    config.finish(frozenset(), {})
    return ConfigGroup(form, targets, spec)


@dataclass(frozen=True)
class Inputs:
    """What inputs are rounded to as they come.

    Attributes:
        kind, bits: of the levels.
        strategy: ``token``, ``group`` or ``tensor_group``.
        size: values in a group.
        scale_dtype: the dtype of groups' scales; ``None``: they aren't rounded.
    """

    kind: str
    bits: int
    strategy: str = "token"
    size: int | None = None
    scale_dtype: str | None = None


def _activations(group: ConfigReader) -> Inputs | None:
    """What inputs are rounded to; ``None`` if they aren't."""
    inputs = group.raw("input_activations")
    if inputs is None:
        return None
    if not isinstance(inputs, dict):
        raise group.wrong("input_activations", inputs, "it must be a table")
    config = ConfigReader(inputs, f"{group.where}: input_activations")
    strategy, dynamic = config.raw("strategy"), config.raw("dynamic", False)
    if dynamic is not True and (dynamic, strategy) != ("local", "tensor_group"):
        raise config.wrong("dynamic", inputs.get("dynamic"), "only activations whose scale is found when the "
                           "model runs are implemented, not such whose scale is in the file")
    if strategy not in ("token", "group", "tensor_group") or (strategy == "tensor_group") != (
            dynamic == "local"):
        raise config.wrong("strategy", strategy, "only a scale a token and a scale a group of a token are "
                                                 "implemented")
    kind, bits = _kind(config), config.integer("num_bits", 8, minimum=2, maximum=8)
    size = None if strategy == "token" else config.integer("group_size", minimum=2)
    stored = config.raw("scale_dtype")
    if stored is not None and stored not in SCALE_DTYPES.values():
        raise config.wrong("scale_dtype", stored, f"known: {', '.join(SCALE_DTYPES.values())}")
    config.finish(WEIGHTS_HARMLESS, INPUTS_INERT)
    return Inputs(kind, bits, strategy, size, stored)


def _kind(config: ConfigReader) -> Any:
    kind = config.raw("type", "int")
    if not isinstance(kind, str) or kind not in KINDS:
        raise config.wrong("type", kind, f"only {' and '.join(KINDS)} are implemented")
    return KINDS[kind]


def _spec(config: ConfigReader, inputs: Inputs | None, form: str) -> QuantSpec:
    strategy: Any = config.raw("strategy") or ("group" if config.raw("group_size") else "tensor")
    scales: Any = FP4.get((form, strategy), "model") if isinstance(strategy, str) else "model"
    if strategy not in ("tensor", "channel", "group", "block") and scales == "model":
        raise config.wrong("strategy", strategy, "only tensor, channel, group, block and, in NVFP4, "
                                                 "tensor_group are implemented")
    size = config.integer("group_size", minimum=2) if strategy in ("group", "tensor_group") else None
    if strategy == "block":
        size = square(config, "block_structure")
    config.only("actorder", WEIGHTS_INERT["actorder"])
    bits, symmetric = config.integer("num_bits", 8, minimum=2, maximum=8), config.flag("symmetric", True)
    kind = _kind(config)
    config.finish(WEIGHTS_HARMLESS | {"group_size", "scale_dtype"}, WEIGHTS_INERT)
    if inputs is not None and (inputs.kind, inputs.bits) != (kind, bits):
        raise config.wrong("num_bits", bits, f"inputs are rounded to {inputs.kind}{inputs.bits}; only "
                                             "weights and inputs of the same kind and bits are implemented")
    in_groups = strategy in ("block", "tensor_group") or scales != "model"
    wanted = Inputs(kind, bits, "tensor_group" if strategy == "tensor_group" else "group", size,
                    SCALE_DTYPES.get(scales)) if in_groups else Inputs(kind, bits)
    if inputs is not None and inputs != wanted:
        raise config.wrong("strategy", strategy, f"with such weights {wanted} is implemented, not {inputs}")
    granularity: Any = {"block": "tile", "tensor_group": "group"}.get(strategy, strategy)
    try:
        return QuantSpec(kind=kind, bits=bits, symmetric=symmetric, scale_dtype=scales,
                         activations=None if inputs is None else "group" if in_groups else "token",
                         granularity=Granularity(strategy=granularity, size=size))
    except ValidationError as error:
        raise config.wrong("strategy", strategy, error.errors()[0]["msg"]) from None


def _targets(config: ConfigReader, key: str, names: Any) -> Targets:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.wrong(key, names, "it must be a list of names")
    texts = [name[3:] for name in names if name.startswith("re:")]
    exact = {text: name for text in texts if (name := _only_name(text)) is not None}
    return Targets(frozenset(name for name in names if not name.startswith("re:")), frozenset(exact.values()),
                   tuple(config.pattern(key, text) for text in texts if text not in exact))


def _only_name(pattern: str) -> str | None:
    """The one name that a pattern such as ``^model\\.norm$`` means."""
    name = pattern[1:-1].replace("\\.", ".")
    return name if pattern == f"^{re.escape(name)}$" else None


def _chosen(name: str, groups: Sequence[ConfigGroup]) -> ConfigGroup | None:
    """The group that names the layer most exactly. Raises CheckpointError if two different ones do."""
    marks = [group.targets.best(name) for group in groups]
    if not (best := max(marks)):
        return None
    schemes = {(group.format, group.spec): group for group,
               mark in zip(groups, marks, strict=True) if mark == best}
    if len(schemes) > 1:
        raise CheckpointError(f"{name} is in two of config_groups", why="readers disagree on which counts",
                              next=ORIGINAL)
    return next(iter(schemes.values()))


def _fp4(slot: LinearSlot, spec: QuantSpec, infos: Infos, model_dtype: str) -> ForeignLayer:
    """4-bit floats; nothing but the model's own dtype says which the weights had."""
    form, names = "mxfp4-pack-quantized", ["weight_packed", "weight_scale"]
    if spec.scale_dtype == "e4m3":
        form = "nvfp4-pack-quantized"
        names += ["weight_global_scale"] + ["input_global_scale"] * spec.static_inputs
    check_stored(slot, infos, *names)
    return ForeignLayer(form, spec, model_dtype, tuple(names))


def _pack_quantized(slot: LinearSlot, spec: QuantSpec, infos: Infos, model_dtype: str) -> ForeignLayer:
    """Scales are stored in the weight's dtype. Zero points lie packed; older versions left them int8."""
    names = ["weight_packed", "weight_scale", "weight_shape"]
    names += [] if spec.symmetric else ["weight_zero_point"]
    dtype = _scales(slot, names, infos)
    if f"{slot.name}.weight_g_idx" in infos:
        raise CheckpointError(f"{slot.name} has inputs in another order than its groups (actorder: group)",
                              why="every group would need its inputs gathered from all over the row",
                              next="get a checkpoint made with actorder: weight or none, or " + ORIGINAL)
    spec = spec.model_copy(update={"scale_dtype": dtype})

    def packed_zeros(tensors: Tensors) -> Tensors:
        signed = tensors["weight_zero_point"]
        if signed.dtype != torch.int8:
            return tensors
        return {**tensors, "weight_zero_point": _packed_zeros(signed, spec.bits)}

    return ForeignLayer("pack-quantized", spec, dtype, tuple(names),
                        unchanged if spec.symmetric else packed_zeros, ("weight_zero_point",))


def _plain(slot: LinearSlot, spec: QuantSpec, infos: Infos, model_dtype: str) -> ForeignLayer:
    """A byte a weight. Integers of fewer bits, with groups or zero points, and all those that are multiplied
    with inputs as they are, lie in our ``pack-quantized``."""
    names = ["weight", "weight_scale"]
    zeros = f"{slot.name}.weight_zero_point" in infos  # older versions left zeros beside symmetric weights
    names += ["weight_zero_point"] if zeros or not spec.symmetric else []
    dtype = _scales(slot, names, infos)
    info, shape = infos[f"{slot.name}.weight"], (slot.out_features, slot.in_features)
    wanted = torch.int8 if spec.kind == "int" else e4m3.DTYPE
    if (info.dtype, tuple(info.shape)) != (wanted, shape):
        raise CheckpointError(f"{slot.name}.weight is {info.dtype} {list(info.shape)}",
                              why=f"by its quantization_config, {spec.label()}, it is {wanted} {list(shape)}",
                              next="download the checkpoint again")
    spec = spec.model_copy(update={"scale_dtype": dtype})
    packs = spec.kind == "int" and spec.activations is None

    def convert(tensors: Tensors) -> Tensors:
        contents, again = dict(tensors), "download the checkpoint again"
        zeros = contents.pop("weight_zero_point", None) if spec.symmetric else None
        if zeros is not None and bool(zeros.any()):
            raise CheckpointError(f"{slot.name} has zero points", next=again,
                                  why="its quantization_config says that it has none")
        if not packs:
            return contents
        half = 1 << (spec.bits - 1)
        level = contents.pop("weight").to(torch.int16) + half
        if bool(((level < 0) | (level >= 2 * half)).any()):
            raise CheckpointError(f"{slot.name} has a weight beyond {spec.bits} bits", next=again)
        if not spec.symmetric:
            contents["weight_zero_point"] = _packed_zeros(contents["weight_zero_point"],
                                                                  spec.bits)
        return contents | {"weight_packed": stream.pack(level.to(torch.uint8), spec.bits),
                                   "weight_shape": torch.tensor(shape, dtype=torch.int64)}

    form = "pack-quantized" if packs else "int-quantized" if spec.kind == "int" else "float-quantized"
    return ForeignLayer(form, spec, dtype, tuple(names), convert, ("weight", "weight_zero_point"))


def _scales(slot: LinearSlot, names: Sequence[str], infos: Infos) -> str:
    """The dtype of a layer's scales, once all its tensors are known to be there."""
    check_stored(slot, infos, *names)
    dtype = infos[f"{slot.name}.weight_scale"].dtype
    if dtype not in FLOATS.values():
        raise CheckpointError(f"{slot.name}.weight_scale is {dtype}", why=f"known: {', '.join(FLOATS)}",
                              next="download the checkpoint again")
    return dtype_name(dtype)


def _packed_zeros(signed: torch.Tensor, bits: int) -> torch.Tensor:
    """Zero points that lie as int8, one each → along *out* in words."""
    level = (signed.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    return stream.pack(level.T.contiguous(), bits).T.contiguous()


Reader = Callable[[LinearSlot, QuantSpec, Infos, str], ForeignLayer]
READERS: dict[str, Reader] = {"pack-quantized": _pack_quantized, "int-quantized": _plain,
                              "float-quantized": _plain, "naive-quantized": _plain,
                              "nvfp4-pack-quantized": _fp4, "mxfp4-pack-quantized": _fp4}
"""By the layout's name in compressed-tensors: ``(layer, spec, the file's tensors, dtype of the model) →
ForeignLayer``."""
