"""Qwen3's mixtures of experts, https://arxiv.org/abs/2505.09388: experts in place of most layers' MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.architecture import Architecture
from quantkit.models.config import (
    ROUTER_TRAINING,
    Experts,
    ModelConfig,
    expert_counts,
    layer_count,
    parse_dense,
    uniform_windows,
)
from quantkit.models.reader import ConfigReader


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Every ``decoder_sparse_step``-th layer has experts, but for those in ``mlp_only_layers``. A window is
    all layers', or nobody's."""
    reader = ConfigReader(config, "config.json of a qwen3_moe model")
    bias = reader.flag("attention_bias")
    reader.only("mlp_bias", (False,))
    enabled = reader.flag("use_sliding_window") and not reader.null("sliding_window")
    window = reader.integer("sliding_window", 4096)
    reader.only("max_window_layers", (0,)) if enabled else reader.raw("max_window_layers")
    return parse_dense(reader, "qwen3_moe", windows=uniform_windows(reader, window if enabled else None),
                       qkv_bias=bias, o_bias=bias, qk_norm=True, kv_heads=4, max_positions=32768,
                       ignored=ROUTER_TRAINING, experts=_experts(reader))


def _experts(reader: ConfigReader) -> Experts | None:
    count, chosen = expert_counts(reader, 128, 8)
    every, layers = reader.integer("decoder_sparse_step", 1), layer_count(reader)
    dense = reader.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
        raise reader.wrong("mlp_only_layers", dense, f"it must list layers from 0 to {layers - 1}")
    routed = tuple((index + 1) % every == 0 and index not in dense for index in range(layers))
    size, normalized = reader.integer("moe_intermediate_size", 768), reader.flag("norm_topk_prob")
    return Experts(count, chosen, size, normalized, routed) if any(routed) else None


ARCHITECTURE = Architecture("qwen3_moe", ("Qwen3MoeForCausalLM",), parse)
