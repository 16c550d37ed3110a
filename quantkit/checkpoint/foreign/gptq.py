"""GPTQ checkpoints, as AutoGPTQ, GPTQModel, AutoRound and llm tools after them write them.

A layer is quantized if it has ``qweight``: that is how other readers decide. Activation order (``desc_act``)
is read where it left every group's inputs together, which the layout checks; where it scattered them, the
checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.foreign.base import (
    ForeignLayer,
    Infos,
    Layers,
    Tensors,
    check_stored,
    contradiction,
    granularity,
    group_size,
)
from quantkit.formats.gptq import group_index
from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import LinearSlot
from quantkit.models.reader import ConfigReader

FORMATS = {"gptq": "gptq", "gptq_v2": "gptq-v2"}
HARMLESS = frozenset({
    "quant_method", "method", "meta", "damp_percent", "damp_auto_increment", "true_sequential",
    "static_groups",
    "act_group_aware", "desc_act", "mse", "model_name_or_path", "model_file_base_name", "tokenizer",
    "dataset",
    "batch_size", "backend", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "pad_token_id",
    "module_name_preceding_first_block", "max_input_length", "cache_block_outputs", "disable_exllama",
    "use_exllama", "exllama_config", "offload_to_disk", "offload_to_disk_path", "pack_impl", "hyb_act",
    "modules_in_block_to_quantize", "is_marlin_format", "format", "gc_mode", "auto_forward_data_parallel",
    "wait_for_submodule_finalizers", "vram_strategy", "compute_device_filter", "mock_quantization",
    "failsafe",
    "fail_safe", "mse_", "fallback", "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen",
    "enable_minmax_tuning", "enable_quanted_input", "low_gpu_mem_usage", "to_quant_block_names", "provider"})
"""How the weights were found, and how others run them."""
INERT: Mapping[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",), "adapter": ({},), "rotation": (), "is_marlin_format": (False,),
    "checkpoint_format": tuple(FORMATS), "data_type": ("int",)}
DYNAMIC = frozenset({"bits", "group_size", "sym", "desc_act"})


def layers(config: ConfigReader, infos: Infos, dtype: str) -> Layers:
    """See the module's docstring. Of ``dynamic`` rules, ``-:`` keeps layers, others change their spec."""
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
    config.finish(HARMLESS, INERT)

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
