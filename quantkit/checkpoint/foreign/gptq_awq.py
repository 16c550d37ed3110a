"""GPTQ checkpoints of AutoGPTQ, GPTQModel, AutoRound and llm tools after them, and AWQ checkpoints of AutoAWQ
and GPTQModel.

A layer is quantized if it has ``qweight``: that is how other readers decide. Activation order (``desc_act``)
is read where it left every group's inputs together, which the layout checks; where it scattered them, the
checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from quantkit.checkpoint.foreign.base import (
    ORIGINAL,
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
    granularity,
    group_size,
)
from quantkit.formats.dtypes import FLOATS
from quantkit.formats.gptq import group_index
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader
from quantkit.support.errors import CheckpointError

FORMATS = {"gptq": "gptq", "gptq_v2": "gptq-v2"}
GPTQ_HARMLESS = frozenset({
    "quant_method", "method", "meta", "damp_percent", "damp_auto_increment", "true_sequential",
    "static_groups", "act_group_aware", "desc_act", "mse", "model_name_or_path", "model_file_base_name",
    "tokenizer", "dataset", "batch_size", "backend", "use_cuda_fp16", "model_seqlen",
    "block_name_to_quantize", "pad_token_id", "module_name_preceding_first_block", "max_input_length",
    "cache_block_outputs", "disable_exllama", "use_exllama", "exllama_config", "offload_to_disk",
    "offload_to_disk_path", "pack_impl", "hyb_act", "modules_in_block_to_quantize", "is_marlin_format",
    "format", "gc_mode", "auto_forward_data_parallel", "wait_for_submodule_finalizers", "vram_strategy",
    "compute_device_filter", "mock_quantization", "failsafe", "fail_safe", "mse_", "fallback",
    "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "enable_minmax_tuning",
    "enable_quanted_input", "low_gpu_mem_usage", "to_quant_block_names", "provider"})
"""How the weights were found, and how others run them."""
GPTQ_INERT: Mapping[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",), "adapter": ({},), "rotation": (), "is_marlin_format": (False,),
    "checkpoint_format": tuple(FORMATS), "data_type": ("int",)}
DYNAMIC = frozenset({"bits", "group_size", "sym", "desc_act"})
AWQ_HARMLESS = frozenset({
    "quant_method", "method", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
    "meta", "damp_percent", "true_sequential", "tokenizer", "dataset", "model_seqlen", "desc_act", "sym",
    "act_group_aware", "lm_head", "pack_dtype", "block_name_to_quantize",
    "module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length",
    "cache_block_outputs", "modules_in_block_to_quantize"})
AWQ_INERT: Mapping[str, tuple[Any, ...]] = {
    "version": ("gemm", "GEMM"), "format": ("gemm",), "checkpoint_format": ("gemm",),
    "zero_point": (True, False), "adapter": ({},), "rotation": (), "dynamic": ({},), "bits": (4,),
    "w_bit": (4,)}
AWQ_BACKENDS = ("auto", "autoawq", "legacy_awq", "gemm")


def gptq_layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """Of ``dynamic`` rules, ``-:`` keeps layers, others change their spec."""
    older = config.raw("format")
    version = config.raw("checkpoint_format") or older or "gptq"
    if not isinstance(version, str) or version not in FORMATS:
        raise config.wrong("checkpoint_format", version, f"only {', '.join(FORMATS)} can be read")
    if isinstance(older, str) and older in FORMATS and older != version:
        raise config.wrong("checkpoint_format", version, f"'format' says {older}, with other zero points")
    base = {"bits": config.integer("bits", minimum=2, maximum=8), "group_size": group_size(config),
            "sym": config.flag("sym", True)}
    head = config.flag("lm_head")
    rules = _rules(config)
    config.finish(GPTQ_HARMLESS, GPTQ_INERT)

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        changed = _override(slot.name, rules)
        if f"{slot.name}.qweight" not in infos:
            return None
        if changed is None:
            raise contradiction(slot, "'dynamic'")
        if slot.layer is None and not head:
            raise contradiction(slot, "'lm_head'")
        mine = ConfigReader({**base, **changed}, config.where)
        spec = QuantSpec(bits=mine.integer("bits", minimum=2, maximum=8), symmetric=mine.flag("sym"),
                         granularity=granularity(group_size(mine)), scale_dtype="float16")
        check_stored(slot, infos, "qzeros", "scales")
        if f"{slot.name}.g_idx" in infos:
            return ForeignLayer(FORMATS[version], spec, dtype, ("qweight", "qzeros", "scales", "g_idx"))

        def with_index(tensors: Tensors) -> Tensors:
            groups = spec.scale_shape((slot.out_features, slot.in_features))[1]
            return {**tensors, "g_idx": group_index(slot.in_features, groups)}

        return ForeignLayer(FORMATS[version], spec, dtype, ("qweight", "qzeros", "scales"), with_index)

    return layer


Rules = list[tuple[str, "re.Pattern[str]", Mapping[str, Any]]]


def _rules(config: ConfigReader) -> Rules:
    dynamic = config.raw("dynamic", {})
    if not isinstance(dynamic, dict):
        raise config.wrong("dynamic", dynamic, "it must be a table of patterns")
    rules: Rules = []
    for pattern, change in dynamic.items():
        sign, text = (pattern[:2], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("+:", pattern)
        if not isinstance(change, dict) or (sign == "+:" and change.keys() - DYNAMIC):
            raise config.wrong("dynamic", {pattern: change},
                               f"a rule may change {', '.join(sorted(DYNAMIC))}")
        rules.append((sign, config.pattern("dynamic", text), change))
    return rules


def _override(name: str, rules: Rules) -> Mapping[str, Any] | None:
    """What the first rule that matches changes; ``None`` if it keeps the layer as it was."""
    for sign, pattern, change in rules:
        if pattern.match(name):
            return None if sign == "-:" else change
    return {}


def awq_layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """In the GEMM layout; ``modules_to_not_convert`` must agree. Zero points are in the file also where the
    config says that there are none (GPTQModel's symmetric weights), and its readers use them. Scales of a
    bfloat16 model may be bfloat16 there."""
    if config.raw("bits") is None and config.raw("w_bit") is None:
        config.integer("bits")
    config.only("backend", AWQ_BACKENDS)
    size = group_size(config, "group_size" if config.raw("group_size") is not None else "q_group_size")
    kept = config.raw("modules_to_not_convert", [])
    if not isinstance(kept, list) or not all(isinstance(name, str) and name for name in kept):
        raise config.wrong("modules_to_not_convert", kept, "it must be a list of names")
    for key, allowed in AWQ_INERT.items():
        config.only(key, allowed)
    config.finish(AWQ_HARMLESS, AWQ_INERT)
    spec = QuantSpec(bits=4, symmetric=False, granularity=granularity(size), scale_dtype="float16")

    def layer(slot: LinearSlot) -> ForeignLayer | None:
        if f"{slot.name}.qweight" not in infos:
            return None
        if any(name in slot.name for name in kept):
            raise contradiction(slot, "'modules_to_not_convert'")
        check_stored(slot, infos, "qzeros", "scales")
        return ForeignLayer("awq", spec, dtype, ("qweight", "qzeros", "scales"), _half_scales(slot),
                            ("scales",))

    return layer


def _half_scales(slot: LinearSlot) -> Callable[[Tensors], Tensors]:
    def convert(tensors: Tensors) -> Tensors:
        """Scales as our layout has them, if float16 holds each."""
        scales = tensors["scales"]
        half = scales.to(torch.float16)
        if scales.dtype not in FLOATS.values() or not torch.equal(half.to(scales.dtype), scales):
            raise CheckpointError(f"{slot.name}.scales is {scales.dtype}", next=ORIGINAL,
                                  why="float16, by which its readers multiply, doesn't hold its values")
        return {**tensors, "scales": half}

    return convert
